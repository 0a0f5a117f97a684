"""Prompts, and plain text for the ptx loss."""

from typing import Any

from pipeline.configuration.groups import DataConfig
from pipeline.data.batching import SFTBatch, packed_sft_batch
from pipeline.data.cache import StageData
from pipeline.data.loader import StepLoader
from pipeline.run.run import Run
from pipeline.training.inputs import prepare_data
from step3_ppo.config import PPOConfig


def make_prompts(run: Run, config: PPOConfig, tokenizer: Any) -> StageData:
    """Prompts to train on, and held-out ones."""
    return prepare_data(
        "ppo",
        config.data,
        tokenizer=tokenizer,
        max_prompt_seq_len=config.data.max_prompt_seq_len,
        long_prompts=config.data.long_prompts,
    )


def make_text(run: Run, config: PPOConfig, tokenizer: Any) -> StepLoader[SFTBatch] | None:
    """Blocks of plain text, as many an optimizer step as there are responses; None without ptx."""
    if not config.data.unsupervised_data_path:
        return None
    source = DataConfig(
        data_path=config.data.unsupervised_data_path, eval_fraction=0.0, data_output_path=config.data.data_output_path
    )
    length = config.data.max_prompt_seq_len + config.sampling.max_answer_seq_len
    built = prepare_data("text", source, tokenizer=tokenizer, max_seq_len=length)
    return StepLoader(
        built.train,
        [[row] for row in range(len(built.train))],
        lambda packs: packed_sft_batch(packs, pad_id=tokenizer.pad_token_id),
        micro_batch_size=config.optimizer.per_device_train_batch_size,
        accumulation=config.optimizer.gradient_accumulation_steps,
        world_size=run.world.size,
        rank=run.world.rank,
        seed=config.run.seed,
    )
