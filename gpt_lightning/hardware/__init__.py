"""Devices, precisions, memory, peak rates and the ranks of a run."""
