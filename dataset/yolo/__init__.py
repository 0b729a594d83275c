"""Folders in the layout of YOLO's tools (Ultralytics, Roboflow, Label Studio): a text file for each image."""
