"""Infrastructure that the benchmarks share."""
