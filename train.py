"""`python train.py ...` in a checkout: the same as `rlhf train ...`."""

import sys

from rlhf.train import main

if __name__ == "__main__":
    sys.exit(main(prog="python train.py"))
