"""Records of small language models on tiny Shakespeare: `python -m experiments.speedrun`."""
