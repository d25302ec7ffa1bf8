"""Runs several commands one after the other in the ranks of one program, from a JSON list of them.

    python tests/training/several_fits.py '[["fit", "--trainer.devices=2", ...], ...]'

The ranks import PyTorch once, which takes longer than a tiny run.
"""

import json
import sys

from gpt_lightning.training.fit import run_cli

if __name__ == "__main__":
    for command in json.loads(sys.argv[1]):
        run_cli(command)
