"""Names of the files by which folders of this project are recognised.

Whoever looks at a folder (data sources, checks of inputs and outputs) finds them here. Imports nothing.
"""

OURS = "training_config.json"  # every model folder of this project has one
RUN_LOCK = "run.lock"  # every run folder has one
CACHE_TAG = "CACHEDIR.TAG"  # every folder of cached rows has one (https://bford.info/cachedir)
