"""`python -m experiments.course` measures and writes the report."""

import sys

from experiments.course.report import run
from gpt_lightning.cli import main

sys.exit(main(run=run))
