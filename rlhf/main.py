"""Run `rlhf SUBCOMMAND ...`: import the subcommand and pass it the remaining arguments.

A subcommand is a module of this package, of `rlhf/rewards/` or of `rlhf/models/`, imported when it is called:
`rlhf --help` takes milliseconds.
"""

import importlib
import sys

from pipeline.console import HELP, HELP_ALL, outlive_console, quit_on_interrupt
from pipeline.errors import EXIT_DONE, EXIT_ENVIRONMENT, EXIT_INPUT, nearest, say

# Subcommands whose modules are in a subfolder.
FOLDERS = {"eval": "rewards.", "sample": "rewards.", "reward": "rewards."}
FOLDERS |= dict.fromkeys(("convert", "export", "merge"), "models.")
# Subcommand (also the name of its module) -> its line of help.
SUBCOMMANDS = {
    "init": "write a commented YAML file of flags for a model and data",
    "train": "run SFT (1), a reward model (2), PPO, GRPO, DPO and others (3)",
    "chat": "chat with a model",
    "serve": "chat and compare in a browser; OpenAI's HTTP interface",
    "compare": "answer the same prompts with several models, side by side",
    "eval": "evaluate base, SFT, final and reward models on held-out rows",
    "sample": "write answers to prompts, with log-probabilities and scores",
    "report": "write report.html, report.md and curves/ of one or more runs",
    "convert": "convert a DeepSpeed-Chat model to a folder of this project",
    "export": "write a checkpoint's models as plain model folders",
    "merge": "merge a LoRA adapter into its base model",
    "reward": "try reward functions on rows, or a task with the model to train",
}


def main(argv: list[str] | None = None, *, prog: str = "rlhf") -> int:
    """Run a subcommand; returns the exit code. Messages name the program by `prog`."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in (*HELP, *HELP_ALL):
        outlive_console()
        rows = (f"  {name:<9}{meaning}" for name, meaning in SUBCOMMANDS.items())
        lines = [f"usage: {prog} SUBCOMMAND [--FLAG VALUE ...]", "", *rows, ""]
        lines.append(f"Flags of a subcommand: {prog} SUBCOMMAND --help")
        print("\n".join(lines), file=sys.stdout if argv else sys.stderr)
        return EXIT_DONE if argv else EXIT_INPUT
    name, *rest = argv
    if name == "--version":
        from pipeline.files import PROJECT, own_version

        print(PROJECT, own_version())
        return EXIT_DONE
    if name not in SUBCOMMANDS:
        hint = nearest(name, SUBCOMMANDS) or f"; expected one of {', '.join(SUBCOMMANDS)}"
        say(f"error: {name}: unknown subcommand{hint}")
        return EXIT_INPUT
    return run_subcommand(name, rest, prog=f"{prog} {name}")


def run_subcommand(name: str, argv: list[str], *, prog: str) -> int:
    """Import a subcommand and run it; returns the exit code. Ctrl-C ends it without a traceback."""
    quit_on_interrupt()
    if name == "train" and not {*HELP, *HELP_ALL}.isdisjoint(argv):
        name = "train_config"
    try:
        module = importlib.import_module(f"rlhf.{FOLDERS.get(name, '')}{name}")
    except ModuleNotFoundError as error:
        what = f"{error.name} is not installed for {sys.executable}"
        say(f"error: {what}; activate the environment of the project (README.md, Install)")
        return EXIT_ENVIRONMENT
    return module.main(argv, prog=prog)


if __name__ == "__main__":
    sys.exit(main(prog="python -m rlhf.main"))
