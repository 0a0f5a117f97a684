"""Plan a run before it starts: the memory of each phase, whether it fits, and what to change if it does not.

Each stage lists its models and passes in its `needs.py`; `needs.py` here has the types. `measurement.py` builds and
runs the models on the meta device, where nothing is allocated. `memory.py` adds DeepSpeed's states by formula, and
`page.py` prints the result. No module here knows a particular stage.
"""
