"""What pfl lacks for federated learning on images. Knows pfl and torch, nothing of FLAIR."""
