"""pycls: train, fine-tune, evaluate and time image classifiers."""

__version__ = "0.1.0"
