"""Evaluation of a model on published tasks and on texts."""
