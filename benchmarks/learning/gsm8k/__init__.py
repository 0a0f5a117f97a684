"""GSM8K: its rows, the figures of answers to them, and the runs of its report."""
