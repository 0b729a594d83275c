"""What a trained model says about images: a command, and `trained` for code of your own."""

from benchmarks.predict.personal import own_model
from benchmarks.predict.trained import Trained, trained

__all__ = ["Trained", "own_model", "trained"]
