#!/usr/bin/env bash
# _run.sh DEPLOYMENT [deepspeed launcher flags] STAGE [stage flags]: becomes the supervisor of one stage (rlhf/launch.py).
# Works from any folder: relative paths in the flags are those of the caller.
set -euo pipefail

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
if [[ -e $root/pyproject.toml ]]; then
    # A checkout; an installed project is found without this.
    export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
fi
# `python -m` must not take a folder of the caller's that is called pipeline or launch for ours.
export PYTHONSAFEPATH=1
# Libraries announce what will change in their next version; nobody who runs a stage can act on it.
export PYTHONWARNINGS="${PYTHONWARNINGS:-ignore::FutureWarning}"
exec "${PYTHON:-$(command -v python || command -v python3)}" -m rlhf.launch "$@"
