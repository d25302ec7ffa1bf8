"""Experiments on gpt_lightning: not in the wheel, and with a lower bar than the package."""
