"""Write a checkpoint's models as plain folders without resuming its run: `rlhf export output/runs/sft --output DIR`."""

import importlib
import os
from pathlib import Path

from pipeline.configuration.flag_table import flag
from pipeline.configuration.flags import stage_arguments
from pipeline.configuration.groups import Dtype, Group
from pipeline.run.entry import command_config, run_command
from step1_sft.config import SFTConfig
from step2_reward.config import RewardConfig
from step3_ppo.config import PPOConfig

STAGES: dict[str, type[Group]] = {"sft": SFTConfig, "reward": RewardConfig, "ppo": PPOConfig}
# The module of each stage with `export(checkpoint)`.
EXPORTS = {"sft": "step1_sft.training", "reward": "step2_reward.training", "ppo": "step3_ppo.state"}


class ExportConfig(Group):
    """Export a checkpoint as model folders, for example: output/runs/sft --output output/sft-at-200"""

    checkpoint: str = flag(
        ..., "Folder of a checkpoint, or of a run: its newest whole checkpoint", kind="path", positional=True
    )
    output: str = flag(..., "New folder for the model; in stage 3 the parent of actor/, critic/", kind="written path")
    dtype: Dtype = flag("auto", "Data type of the saved weights; auto: as the run saves them, fp32: unrounded")


def main(argv: list[str] | None = None, *, prog: str = "rlhf export") -> int:
    """Run the command line; returns the exit code. `prog` is how a user calls this program, for its help."""
    return run_command(lambda: run(stage_arguments(argv), prog))


def run(argv: list[str], prog: str) -> None:
    """Check the command line, read the checkpoint, and write its models."""
    config = command_config(ExportConfig, argv, section="export", prog=prog)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # nothing runs on a GPU; else DeepSpeed says that it found none
    import transformers

    from pipeline.checkpoints.offline import open_checkpoint

    transformers.logging.disable_progress_bar()
    checkpoint = open_checkpoint(Path(config.checkpoint).expanduser(), STAGES, output=config.output, dtype=config.dtype)
    importlib.import_module(EXPORTS[checkpoint.run.stage]).export(checkpoint)
    dtype = checkpoint.run.resolved.config.run.save_dtype
    print(f"{config.output}: step {checkpoint.saved['step']} of {checkpoint.run.stage} in {dtype}")
