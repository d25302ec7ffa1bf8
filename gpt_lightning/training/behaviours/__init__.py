"""What each run of GPTModule does beside the model: a callback in each file."""
