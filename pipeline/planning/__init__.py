"""Plan a run before it starts: the memory of each phase, whether it fits, and what to change where it does not.

A stage says in its `needs.py` what it holds and computes (`needs.py` here has the types). Models are built and run on
the meta device (`measurement.py`), DeepSpeed's states are counted by formula (`memory.py`), and a page says the result
(`page.py`). Nothing here knows a stage, and nothing is allocated.
"""
