"""`python prompt_eval.py ...` in a checkout: the same as `rlhf compare ...`."""

import sys

from rlhf.compare import main

if __name__ == "__main__":
    sys.exit(main(prog="python prompt_eval.py"))
