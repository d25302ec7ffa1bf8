"""Training with Lightning: the module, the data module, the callbacks and the command line."""
