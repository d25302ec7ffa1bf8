"""Weights of trained GPT-2s from other programs, and in their formats."""
