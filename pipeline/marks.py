"""The small files by which folders and processes are recognised: their names, and a way to replace one atomically.

Whoever looks at a folder of this project (data sources, checks of outputs, the supervisor) finds them here.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

OURS = "training_config.json"  # every model folder of this project has one
RUN_LOCK = "run.lock"  # every run folder has one
CACHE_TAG = "CACHEDIR.TAG"  # every folder of cached rows has one (https://bford.info/cachedir)


def replace_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write JSON beside `file` and rename it, not flushed to disk: a reader finds the old content or the new."""
    beside = file.with_name(f".{file.name}.writing")
    beside.write_text(json.dumps(content) + "\n", encoding="utf-8")
    beside.replace(file)
