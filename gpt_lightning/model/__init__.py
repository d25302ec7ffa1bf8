"""GPT-2 in PyTorch alone: no Lightning, no data."""
