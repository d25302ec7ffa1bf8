import sys

from gpt_lightning.cli import main

sys.exit(main())
