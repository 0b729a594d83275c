"""Cityscapes: street scenes of German cities with masks of 19 classes, by city (Cordts et al. 2016)."""
