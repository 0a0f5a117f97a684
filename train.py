"""`python train.py ...` in a checkout: the same as `rlhf train ...`."""

import sys

from rlhf.main import run_subcommand

if __name__ == "__main__":
    sys.exit(run_subcommand("train", sys.argv[1:], prog="python train.py"))
