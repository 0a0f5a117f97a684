"""Flags of step 1."""

from typing import Literal, Self

from pydantic import Field, model_validator

from pipeline.configuration.groups import DataConfig, DeepSpeedConfig, Group, ModelConfig, OptimizerConfig, RunConfig


class SFTDataConfig(DataConfig):
    """Data"""

    max_seq_len: int = Field(512, ge=8, description="Tokens of a training row; longer rows are cut on the right")
    train_on_prompt: bool = Field(False, description="Train on prompt tokens too, as DeepSpeed-Chat does")
    train_turns: Literal["all", "last"] = Field("all", description="Assistant turns that are trained in a conversation")
    packing: bool = Field(False, description="Put several rows into one sequence; they do not see each other")
    sft_only_data_path: list[str] = Field([], description="Further sources of step 1, taken whole")


class SFTConfig(Group):
    """Step 1: supervised fine-tuning of a causal language model."""

    model: ModelConfig = ModelConfig(learning_rate=1e-5)
    data: SFTDataConfig = SFTDataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    run: RunConfig = RunConfig(output_dir="output/sft")
    keep_best: bool = Field(False, description="Keep the weights with the lowest eval_loss instead of the last ones")

    @model_validator(mode="after")
    def _packing_needs_a_mask(self) -> Self:
        if self.data.packing and self.model.attn_implementation == "flash_attention_2":
            raise ValueError("packing: flash_attention_2 takes no mask that keeps samples apart; use sdpa or eager")
        return self
