"""Measurements of your own machine."""
