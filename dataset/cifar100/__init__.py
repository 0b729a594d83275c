"""CIFAR-100 with Google's federated splits (Hsu, Qi and Brown, Appendix B.1)."""
