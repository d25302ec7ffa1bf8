"""`python -m experiments.speedrun` trains a record."""

import sys

from experiments.speedrun.command import run
from gpt_lightning.cli import main

sys.exit(main(run=run))
