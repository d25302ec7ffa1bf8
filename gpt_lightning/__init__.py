"""Train, reproduce and measure GPT-2 with PyTorch Lightning."""

__version__ = "0.1.0"
