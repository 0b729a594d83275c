"""CIFAR-10 with the pixels that pfl-research's benchmark trains on."""
