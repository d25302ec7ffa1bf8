"""Published results beside ours, row by row."""
