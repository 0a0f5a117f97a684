"""What can be set: flag groups, flags and their checks, and DeepSpeed's JSON; imports no torch."""
