"""The flags of stage 1, supervised fine-tuning; shared groups are defined in pipeline/configuration/groups.py."""

from typing import Literal

from pipeline.configuration.flag_table import flag
from pipeline.configuration.groups import DataConfig, DeepSpeedConfig, ModelConfig, OptimizerConfig
from pipeline.configuration.run_flags import RunConfig
from pipeline.configuration.stage import SupervisedConfig

CARD = "Supervised fine-tuned model"  # heading of the model card


class SFTDataConfig(DataConfig):
    """Data"""

    max_seq_len: int = flag(
        512,
        "Most tokens of a training row; longer rows are truncated on the right",
        ge=8,
        other_tools="max_length max_seq_length cutoff_len",
    )
    train_on_prompt: bool = flag(False, "Train on prompt tokens too, as DeepSpeed-Chat does")
    train_turns: Literal["all", "last"] = flag("all", "Assistant turns of a conversation that are trained")
    packing: bool = flag(
        False,
        "Pack several rows into one sequence; attention stays within each row",
        excludes="--attn-implementation flash_attention_2",
    )
    sft_only_data_path: list[str] = flag([], "Further data of stage 1, used in full", kind="path", on_resume="data")


class SFTConfig(SupervisedConfig):
    """Stage 1: supervised fine-tuning of a language model."""

    rows, shares = "sequences", (0,)
    model: ModelConfig = ModelConfig(learning_rate=1e-5)
    data: SFTDataConfig = SFTDataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    run: RunConfig = RunConfig(output_dir="output/sft")
    eval_metric: Literal["loss", "bleu", "rouge"] = flag(
        "loss",
        "Metric of evaluations: the loss alone, or also BLEU or ROUGE-L of greedy answers to the held-out prompts",
        on_resume="free",
        other_tools="predict_with_generate",
    )
    eval_max_new_tokens: int = flag(
        128, "Tokens of a greedy answer", ge=1, on_resume="free", other_tools="max_new_tokens generation_max_length"
    )
    keep_best: bool = flag(False, "Save the weights of the lowest eval_loss, not the last ones", on_resume="output")
