"""Reports of several benches in one document."""
