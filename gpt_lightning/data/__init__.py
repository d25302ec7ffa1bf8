"""Text, tokens, shards and batches; without Lightning and without a model."""
