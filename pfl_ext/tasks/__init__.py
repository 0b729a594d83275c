"""What is learnt: losses and scores."""
