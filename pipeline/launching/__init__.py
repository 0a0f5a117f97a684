"""What train.py stands on: its flags, the plan of steps, the machine, the launcher process. Imports no torch."""
