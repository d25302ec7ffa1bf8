"""Measurements of one's own machine; columns.yaml has the columns of their tables."""
