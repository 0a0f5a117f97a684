"""What evolves in step 3 besides engines and moving average: counters, and the rollout that is being trained on."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

import torch

from step3_ppo.experience import Experience, Responses


@dataclass(slots=True)
class State:
    """Everything of step 3 that evolves, besides the engines and the moving average."""

    step: int = 0
    rollout: int = 0
    update: int = 0  # optimizer steps of the current rollout that are done; 0: the next one is to be sampled
    evaluated: int = -1  # the step of the last evaluation
    first_ratio_error: float = 0.0  # of the current rollout's first update
    kl_coef: float = 0.0
    num_tokens: int = 0
    skipped_updates: int = 0
    bad_in_a_row: int = 0


@dataclass(frozen=True, slots=True)
class Collected:
    """A rollout ready for updates, with its metrics; the same on every rank."""

    responses: Responses
    experience: Experience
    metrics: dict[str, float]

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a checkpoint keeps of it, besides the metrics."""
        parts: dict[str, Any] = {"responses": self.responses, "experience": self.experience}
        return {f"{name}/{f.name}": getattr(part, f.name) for name, part in parts.items() for f in fields(part)}

    @classmethod
    def restored(cls, tensors: Mapping[str, torch.Tensor], metrics: dict[str, float], device: torch.device) -> Self:
        """From what `tensors` gave."""

        def part(name: str, kind: Any) -> Any:
            return kind(**{f.name: tensors[f"{name}/{f.name}"].to(device) for f in fields(kind)})

        return cls(part("responses", Responses), part("experience", Experience), metrics)
