"""GPUs of this machine on which no other process holds memory: those of a run that says nothing of GPUs. No torch."""

import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

from pipeline.errors import EnvironmentFault, counted
from pipeline.launching.machine import check_device_count, visible_gpus

# MiB that a GPU may have in use without a process: idle ones report up to some tens, a CUDA context takes some 500.
IDLE_MIB = 200


def ask(query: str, num_fields: int) -> list[list[str]] | None:
    """Return the rows of a query of nvidia-smi; None where it does not answer it."""
    if not shutil.which("nvidia-smi"):
        return None
    command = ["nvidia-smi", f"--query-{query}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    rows = [[value.strip() for value in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    return None if done.returncode or any(len(row) != num_fields for row in rows) else rows


def holders(visible: Sequence[str]) -> dict[str, tuple[str, str]] | None:
    """Return visible GPU -> its number, and what others hold of it in words ("" for nothing); None: not known.

    Processes of other containers are listed nowhere; memory in use tells of them, but for a GPU that draws a screen.
    """
    table, listed = ask("gpu=index,uuid,memory.used,display_active", 4), ask("compute-apps=gpu_uuid,pid", 2)
    found: dict[str, tuple[str, str]] = {}
    for name in visible if table and listed is not None else ():
        rows = [row for row in table or () if name == row[0] or row[1].startswith(name)]
        if len(rows) != 1:  # a part of a GPU (MIG)
            return None
        number, uuid, used, draws = rows[0]
        pids = [pid for gpu, pid in listed or () if gpu == uuid]
        is_held = pids or (used.isdigit() and int(used) > IDLE_MIB and draws != "Enabled")
        by = f" by process {', '.join(pids)}" if pids else ""
        found[name] = number, f"{used} MiB in use{by}" if is_held else ""
    return found or None


def choose_gpus(count: int, had: int, *, starts: bool) -> tuple[dict[str, Any], str]:
    """Return the launcher's flags of a run on free GPUs of this machine, and a line that says which; "" without GPUs.

    Args:
        count: GPUs of --num-gpus; 0: as many as the run had, or all that are free.
        had: ranks that the run to resume had; 0: none is there.
        starts: False where nothing will run, as in a dry run; then the line says what is lacking.

    Raises:
        EnvironmentFault: fewer GPUs are free than are asked for, or than the run had.
    """
    visible, wanted = visible_gpus(), count or had
    if not visible:
        kind = "single_node" if wanted > 1 else "single_gpu"
        return {"deployment_type": kind, "num_gpus": wanted if wanted > 1 else count}, ""
    check_device_count(count)
    found = holders(visible)
    held = {name: what for name, (_, what) in (found or {}).items() if what}
    free = [name for name in visible if name not in held]
    why, lacking = f"--num-gpus {count}" if count else f"the run had {counted(had, 'rank')}", ""
    if wanted > len(free) or not free:
        fewer = f"--num-gpus {len(free)}, or " if free else ""
        lacking = (
            f"{f'{why}, but ' if wanted else ''}{len(free)} of {len(visible)} GPUs are free"
            f"{''.join(f', GPU {name}: {what}' for name, what in held.items())}; wait, or give {fewer}"
            "--deployment-type single_node, which takes GPUs that others use too"
        )
        if starts:
            raise EnvironmentFault(lacking)
        free = visible
    chosen = free[: wanted or None]
    flags: dict[str, Any] = {"deployment_type": "single_gpu" if len(chosen) == 1 else "single_node", "num_gpus": count}
    if found and chosen != visible[: len(chosen)]:
        flags |= {"num_gpus": 0, "include": f"localhost:{','.join(found[name][0] for name in chosen)}"}
    elif 1 < len(chosen) < len(visible):
        flags["num_gpus"] = len(chosen)
    left = ", ".join(f"{name} ({held.get(name, why)})" for name in visible if name not in chosen)
    unknown = "" if found else "; nvidia-smi does not say whether other processes hold memory of them"
    return flags, lacking or f"GPUs of this run: {', '.join(chosen)}{f'; not used: {left}' if left else ''}{unknown}"
