"""Step 3 with its phases watched: peak memory of each, and when the first one began. A worker: prints one JSON line.

`python -m benchmarks.speed.watched --cap-gib 80 -- STEP-3 FLAGS`. The command is the stage's own, on a device of which
only a part may be used where a cap is given.
"""

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

# Module, class (or none), function -> the phase that it is.
WATCHED = {
    ("step3_ppo.rollout", "Sampler", "sample"): "generate",
    ("step3_ppo.scoring", "Passes", "run"): "score",
    ("step3_ppo.updater", "Updater", "update"): "train",
}


class Watch:
    """Peak GiB of each phase over all its calls, and the time at which the first call began."""

    def __init__(self) -> None:
        self.peaks: dict[str, float] = {}
        self.reserved = 0.0
        self.began: float | None = None

    def around(self, phase: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """The same method, watched."""
        import torch

        def call(*args: Any, **kwargs: Any) -> Any:
            self.began = self.began or time.monotonic()
            if not torch.cuda.is_available():
                self.peaks[phase] = 0.0
                return method(*args, **kwargs)
            torch.cuda.reset_peak_memory_stats()
            try:
                return method(*args, **kwargs)
            finally:
                # The stage itself begins both peaks anew at each step.
                self.peaks[phase] = max(self.peaks.get(phase, 0.0), torch.cuda.max_memory_allocated() / 2**30)
                self.reserved = max(self.reserved, torch.cuda.max_memory_reserved() / 2**30)

        return call

    def install(self) -> None:
        """Watch the phases of step 3; imports the stage."""
        for (module, owner, name), phase in WATCHED.items():
            holder = importlib.import_module(module)
            holder = getattr(holder, owner) if owner else holder
            setattr(holder, name, self.around(phase, getattr(holder, name)))


def set_cap(gib: float) -> None:
    """PyTorch may hold this many GiB of the device; 0: all."""
    import torch

    if gib and torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory / 2**30
        torch.cuda.set_per_process_memory_fraction(min(gib / total, 1.0))


def main() -> None:
    """Run the stage, and print what was seen."""
    cut = sys.argv.index("--")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cap-gib", type=float, default=0.0, help="GiB that PyTorch may hold; 0: all")
    options = parser.parse_args(sys.argv[1:cut])
    started, watch = time.monotonic(), Watch()
    watch.install()
    importlib.import_module("step3_ppo.training")
    imported = time.monotonic()
    set_cap(options.cap_gib)
    code = importlib.import_module("step3_ppo.main").main(sys.argv[cut + 1 :])

    found = {f"{phase}_peak_gib": peak for phase, peak in watch.peaks.items()}
    found |= {"peak_gib": max(watch.peaks.values(), default=0.0), "imports_s": imported - started}
    found["reserved_gib"] = watch.reserved
    if watch.began is not None:
        found["first_step_s"] = watch.began - imported
    print(json.dumps(found), flush=True)
    os._exit(code)


if __name__ == "__main__":
    main()
