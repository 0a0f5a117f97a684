"""The flags of stage 2, the reward model, and of its evaluation."""

from typing import Literal, Self

from pydantic import model_validator

from pipeline.configuration.flag_table import flag
from pipeline.configuration.groups import (
    TOKEN_FLAGS,
    DeepSpeedConfig,
    Group,
    ModelConfig,
    OptimizerConfig,
)
from pipeline.configuration.run_flags import RunConfig
from pipeline.configuration.stage import PairDataConfig, SupervisedConfig


class RewardConfig(SupervisedConfig):
    """Stage 2: a reward model from pairs of responses."""

    rows, shares, makes_chat_model = "pairs", (1,), False
    model: ModelConfig = ModelConfig(learning_rate=5e-5, weight_decay=0.1)
    data: PairDataConfig = PairDataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    run: RunConfig = RunConfig(output_dir="output/reward")
    reward_loss: Literal["last_token", "per_token"] = flag(
        "last_token",
        "Bradley-Terry loss of the last token's scores, or its mean over tokens (DeepSpeed-Chat)",
        refused=dict.fromkeys(("beta", "label_smoothing", "offload_reference_model"), "DPO is --step 3 --method dpo"),
    )
    centering_coef: float = flag(
        0.0, "Weight of (chosen + rejected)^2, which keeps scores near 0", ge=0, read_if="--reward-loss last_token"
    )
    keep_best: bool = flag(False, "Save the weights of the best accuracy, not the last ones", on_resume="output")

    @model_validator(mode="after")
    def _is_saved_whole(self) -> Self:
        if self.deepspeed.save_adapter_only:
            raise ValueError("save_adapter_only: a reward model is always saved whole, with its new head")
        return self


class RewardEvalConfig(Group):
    """Evaluate a reward model on pairs: accuracy, margins, calibration, and the accuracy of trivial rules."""

    model: str = flag(
        "output/reward",
        "Reward model: the output of stage 2",
        kind="path",
        aliases=("path", "model_name_or_path"),
        positional=True,
        ignored=TOKEN_FLAGS,
    )
    data_path: list[str] = flag(..., "Rows to evaluate on, for a reward model pairs", min_length=1, kind="path")
    eval_split: Literal["auto", "all", "held_out"] = flag(
        "auto", "all rows, or held_out: the run's evaluation rows; auto: all, unless --eval-fraction is given"
    )
    eval_fraction: float = flag(0.1, "Fraction held out if a source has no test split; 1: all rows", gt=0, le=1)
    max_seq_len: int = flag(
        512, "Most tokens of prompt and response; longer pairs' prompts are truncated on the left", ge=8
    )
    batch_size: int = flag(16, "Pairs or prompts scored at once", ge=1)
    data_seed: int = flag(1234, "The run's --data-seed: it chooses the held-out prompts", ge=0)
    eval_data_path: list[str] = flag(
        [], "Sources of which all rows are scored; those of --data-path are then not", kind="path"
    )
    column_map: str = flag("", "Column names in your data: prompt=question,chosen=best")
    json_output: bool = flag(False, "Print one JSON object instead of text")
