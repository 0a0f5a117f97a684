"""The `Stage` of DPO, IPO and KTO: stage 3 from pairs or labelled responses instead of PPO."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pipeline.configuration.stage import Stage, Start
from pipeline.data.row_kinds import PAIRS
from step3_dpo.config import DPOConfig
from step3_dpo.rows import RESPONSES

# Factor of LoRA's default learning rate over that of full training. Measured with SmolLM2-135M-Instruct: DPO of all
# weights at 5e-6 learns as much as LoRA of rank 32 at 6e-5 to 1e-4
# (benchmarks/reports/lora_rates_smollm2_h100_202611.md).
LORA_FACTOR = 20.0

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


def rows_of(config: DPOConfig) -> dict[str, Any]:
    """Return the kind of rows that the method reads, and the shares of --data-split (indices) that a run trains on."""
    shares = STAGE.shares if config.data.take_reward_share else STAGE.shares[1:]
    return {"rows": RESPONSES.name if config.method == "kto" else PAIRS.name, "shares": shares}


def export(checkpoint: "OfflineCheckpoint") -> None:
    """Write the model folder of a checkpoint."""
    from step3_dpo.training import save_module

    config: DPOConfig = checkpoint.run.resolved.config
    module = checkpoint.language_model("model", config.model)
    save_module(checkpoint.run, module, checkpoint.tokenizer(config.model), step=checkpoint.saved["step"])


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
    rows=PAIRS.name,
    shares=(1, 2),
    rows_of=rows_of,
    drops_share_of={2: "take_reward_share"},
    starts={"": Start("actor", "sft")},
    runs_by_section=True,
    reached={"eval_accuracy": 1, "eval_margin": 1},
    loop=loop,
    start_models=start_models,
    needs=needs,
    lora_factor=lambda _: LORA_FACTOR,
    export=export,
)
