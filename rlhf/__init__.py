"""The command `rlhf` and its subcommands: train, chat, compare."""
