"""Fast versions of parts of the model; each has a plain twin, and a test that they agree."""
