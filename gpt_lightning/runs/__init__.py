"""What a run leaves behind: its settings, checkpoints, resume and log."""
