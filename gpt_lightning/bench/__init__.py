"""Measurements of one's own machine."""
