"""Spare the garbage collector the objects that imports leave: two million, over which each collection takes a second.

Models and engines collect whenever they are made.
"""

import gc


def freeze() -> None:
    """Take every object that exists now, but for garbage, from the collector."""
    gc.collect()
    gc.freeze()
