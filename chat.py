"""`python chat.py ...` in a checkout: the same as `rlhf chat ...`."""

import sys

from rlhf.chat import main

if __name__ == "__main__":
    sys.exit(main(prog="python chat.py"))
