"""The `Stage` of DPO, IPO and KTO: stage 3 from pairs or labelled responses instead of PPO."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from pipeline.configuration.stage import Stage, Start
from step3_dpo.config import DPOConfig

if TYPE_CHECKING:
    from pipeline.checkpoints.offline import OfflineCheckpoint
    from pipeline.engine.start_models import StartModel
    from pipeline.planning.needs import StageNeeds
    from pipeline.run.run import Run


def loop() -> "Callable[[Run, DPOConfig], None]":
    """Import and return the loop of the stage."""
    from step3_dpo.training import train

    return train


def start_models(config: DPOConfig, base_of_output: Mapping[str, str]) -> "list[StartModel]":
    """Return the start model with its checks.

    Args:
        base_of_output: folder of an earlier stage's output -> the model which that stage starts from.
    """
    from pipeline.engine.start_models import decoder_start
    from pipeline.models.paths import check_language_model

    return [decoder_start(config, base_of_output, check_language_model, length=config.data.max_seq_len)]


def needs(config: DPOConfig, base_of_output: Mapping[str, str], dtype: str, ranks: int) -> "StageNeeds":
    """Return what a rank needs, for the planner.

    The reference is freed before the model is loaded, and its pass needs less memory than an evaluation.
    """
    from pipeline.planning.needs import supervised_needs

    length, is_kto = config.data.max_seq_len, config.method == "kto"
    what = f"{'responses' if is_kto else 'pairs'} (at most {length} tokens a sequence)"
    sequences = 1 if is_kto else 2
    shared = supervised_needs(config, base_of_output, ranks, length=length, what=what, sequences=sequences)
    if not is_kto:
        return shared
    (training,) = shared.phases["train"]
    mismatched = replace(training, trains=False, accumulates=False)
    return replace(shared, phases={**shared.phases, "train": [training, mismatched]})


def export(checkpoint: "OfflineCheckpoint") -> None:
    """Write the model folder of a checkpoint."""
    checkpoint.save_language_model(checkpoint.run.resolved.config.card)


STAGE = Stage(
    number=3,
    methods={
        "dpo": "direct preference optimisation",
        "ipo": "identity preference optimisation",
        "kto": "Kahneman-Tversky optimisation",
    },
    section="dpo",
    title="preference optimisation",
    package="step3_dpo",
    config=DPOConfig,
    starts=lambda _: {"": Start("actor", "sft")},
    reached={"eval_accuracy": 1, "eval_margin": 1},
    loop=loop,
    start_models=start_models,
    needs=needs,
    export=export,
)
