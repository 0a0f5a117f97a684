"""Write the model folders of stage 3: one for each trained model, and one for the moving average of the actor."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from pipeline.checkpoints.model_folder import save_trained
from pipeline.checkpoints.offline import OfflineCheckpoint
from pipeline.models.reward_model import score_head_fields
from pipeline.models.source import ModelSource
from pipeline.run.run import Run
from step3_ppo.config import PPOConfig
from step3_ppo.models.engines import Models, head_settings
from step3_ppo.models.roles import Role


def save_models(run: Run, models: Models, *, step: int) -> None:
    """Write the model folders. A collective."""
    config: PPOConfig = run.resolved.config
    for role in config.trained_roles:
        module = models.trained[role.name].module
        save_model(run, role, module, models.tokenizer, step=step)
        if role.name == "actor" and models.average is not None:
            with models.average.swapped_in():
                save_model(run, role, module, models.tokenizer, step=step, is_average=True)


def save_model(
    run: Run, role: Role, module: Any, tokenizer: PreTrainedTokenizerBase, *, step: int, is_average: bool = False
) -> None:
    """Write the folder of a model or of its moving average. A collective."""
    config: PPOConfig = run.resolved.config
    fields = None
    if role.has_values:
        fields = score_head_fields(tokenizer, score_mean=module.score_mean, score_std=module.score_std, label="value")
    folder = Path(config.run.output_dir) / (f"{role.name}_ema" if is_average else role.name)
    kind = f"{config.method.title}{role.card}"
    kind = f"Moving average of a {kind}" if is_average else kind
    model = config.flags_of(role)
    save_trained(run, module, tokenizer, folder, model=model, kind=kind, step=step, score_fields=fields)


def export(checkpoint: OfflineCheckpoint) -> None:
    """Write the model folders of a checkpoint, one model in memory at a time."""
    run, step, config = checkpoint.run, checkpoint.saved["step"], checkpoint.run.resolved.config
    tokenizer = checkpoint.tokenizer(config.actor)
    for role in config.trained_roles:
        flags = config.flags_of(role)
        if role.has_values:
            head = head_settings(config, role, ModelSource(flags.model_name_or_path))
            module = checkpoint.value_model(role.name, flags, **head)
            if (module.score_mean, module.score_std) == (0.0, 1.0):
                module.score_mean, module.score_std = checkpoint.state["ppo"].get("score_constants") or (0.0, 1.0)
        else:
            module = checkpoint.language_model(role.name, flags)
        save_model(run, role, module, tokenizer, step=step)
        del module
        if role.name == "actor" and checkpoint.has_average:
            average = checkpoint.language_model(role.name, flags, average=True)
            save_model(run, role, average, tokenizer, step=step, is_average=True)
            del average
