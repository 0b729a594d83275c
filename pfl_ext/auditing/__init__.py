"""Audits of private training: canaries, and the lower bounds of epsilon that they prove."""
