"""Users' images as a pfl FederatedDataset."""
