"""Published results compared with ours, row by row."""
