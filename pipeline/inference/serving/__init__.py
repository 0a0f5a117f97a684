"""Finished models behind OpenAI's HTTP interface, and a page for chat and votes: `rlhf serve`."""
