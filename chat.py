"""`python chat.py ...` in a checkout: the same as `rlhf chat ...`, and with `--serve` as `rlhf serve ...`."""

import sys

from rlhf.main import run_subcommand

if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word != "--serve"]
    serves = len(words) < len(sys.argv) - 1
    sys.exit(run_subcommand("serve" if serves else "chat", words, prog=f"python chat.py{' --serve' * serves}"))
