"""Commands that are neither training nor a benchmark."""
