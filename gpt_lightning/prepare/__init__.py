"""`gpt-lightning prepare`: texts become shards of tokens and a manifest, or nothing at all."""
