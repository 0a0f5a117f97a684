"""Flags of step 2."""

from typing import Literal, Self

from pydantic import Field, model_validator

from pipeline.configuration.groups import DataConfig, DeepSpeedConfig, Group, ModelConfig, OptimizerConfig, RunConfig


class PairDataConfig(DataConfig):
    """Data"""

    max_seq_len: int = Field(512, ge=8, description="Tokens of prompt and response together")
    long_pairs: Literal["drop", "truncate_left"] = Field(
        "drop", description="Pairs above max_seq_len: dropped, or the prompt cut on its left"
    )


class RewardConfig(Group):
    """Step 2: a reward model from pairs of responses."""

    model: ModelConfig = ModelConfig(learning_rate=5e-5, weight_decay=0.1)
    data: PairDataConfig = PairDataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    run: RunConfig = RunConfig(output_dir="output/reward")
    reward_loss: Literal["last_token", "per_token"] = Field(
        "last_token", description="Bradley-Terry on the score of the last token, or DeepSpeed-Chat's mean over tokens"
    )
    centering_coef: float = Field(0.0, ge=0, description="Weight of (chosen + rejected)^2, which keeps scores near 0")
    keep_best: bool = Field(False, description="Keep the weights with the best accuracy instead of the last ones")

    @model_validator(mode="after")
    def _options_that_do_not_go_together(self) -> Self:
        if self.reward_loss == "per_token" and self.centering_coef:
            raise ValueError("centering_coef: needs --reward_loss last_token, found per_token")
        if self.deepspeed.save_adapter_only:
            raise ValueError("save_adapter_only: a reward model is always saved whole, with its new head")
        return self


class RewardEvalConfig(Group):
    """Evaluate a reward model on held-out pairs: accuracy, margins, calibration, and what trivial rules reach."""

    path: str = Field("output/reward", description="Reward model: the output of step 2")
    data_path: list[str] = Field(..., min_length=1, description="Pairs; the held-out rows are scored")
    eval_fraction: float = Field(0.1, gt=0, lt=1, description="Share held out where a source has no test split")
    max_seq_len: int = Field(512, ge=8, description="Tokens; longer pairs lose the left of their prompt")
    batch_size: int = Field(16, ge=1, description="Pairs scored at once")
    data_seed: int = Field(1234, ge=0, description="The run's --data_seed: it chooses the held-out prompts")
    eval_data_path: list[str] = Field([], description="The run's --eval_data_path, where it had one")
    column_map: str = Field("", description="Columns of other names: prompt=question,chosen=best")
    json_output: bool = Field(False, description="Print one JSON object instead of text")
