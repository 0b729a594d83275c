"""What an adversary finds out of private training: canaries, and lower bounds of epsilon."""
