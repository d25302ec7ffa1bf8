"""Report of a systems course's assignment: `python -m experiments.course`."""
