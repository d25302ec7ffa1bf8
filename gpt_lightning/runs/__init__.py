"""Settings of a run, and the files that it leaves: checkpoints, logs, and resuming from them."""
