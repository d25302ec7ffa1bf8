"""Text, tokens, shards and batches. Knows no model."""
