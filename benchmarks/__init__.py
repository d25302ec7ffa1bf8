"""Measurements whose results are on the pages of this folder."""
