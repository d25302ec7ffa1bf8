"""Callbacks of a training run, one a file."""
