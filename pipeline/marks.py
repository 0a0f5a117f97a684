"""Names of the files that identify folders of this project.

Data sources and checks of inputs and outputs read them here. The module imports nothing.
"""

OURS = "training_config.json"  # every model folder of this project has one
RUN_LOCK = "run.lock"  # every run folder has one
CACHE_TAG = "CACHEDIR.TAG"  # every folder of cached rows has one (https://bford.info/cachedir)
