"""The command line as a module: `python -m rlhf train ...`."""

import sys

from rlhf.main import main

sys.exit(main(prog="python -m rlhf"))
