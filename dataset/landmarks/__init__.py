"""Landmarks-User-160k and gld23k (Hsu, Qi and Brown, Section 4.2; TensorFlow Federated)."""
