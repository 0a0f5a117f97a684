"""Built-in reward functions, by the name that a user types (table.py); pure Python with TRL's signature."""
