"""`python chat.py ...` in a checkout: the same as `rlhf chat ...`."""

import sys

from rlhf.main import run_subcommand

if __name__ == "__main__":
    sys.exit(run_subcommand("chat", sys.argv[1:], prog="python chat.py"))
