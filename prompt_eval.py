"""`python prompt_eval.py ...` in a checkout: the same as `rlhf compare ...`."""

import sys

from rlhf.main import run_subcommand

if __name__ == "__main__":
    sys.exit(run_subcommand("compare", sys.argv[1:], prog="python prompt_eval.py"))
