"""`python -m gpt_lightning` is `gpt-lightning`."""

import sys

from gpt_lightning.cli import main

sys.exit(main())
