"""Step 3's outputs: actor, critic, averaged actor; and its resume checkpoints."""

from dataclasses import asdict
from pathlib import Path

from pipeline import checkpoint
from pipeline.earlier_runs import settings_of
from pipeline.prepare import model_documents, saved_dtype
from pipeline.reward_model import pad_id_for_pooling
from pipeline.run import Run
from pipeline.saving import save_model
from step3_ppo.config import PPOConfig
from step3_ppo.ema import MovingAverage
from step3_ppo.models import Models
from step3_ppo.phases import State


def save_models(run: Run, config: PPOConfig, models: Models, average: MovingAverage | None) -> None:
    """The model folders. A collective."""
    output = Path(config.run.output_dir)
    save_actor(run, config, models, output / "actor", kind="PPO-tuned model")
    if average is not None:
        with average.swapped_in():
            save_actor(run, config, models, output / "actor_ema", kind="Moving average of a PPO-tuned model")
    critic = models.critic.module
    save_model(
        critic.model,
        models.tokenizer,
        output / "critic",
        dtype=saved_dtype(run),
        documents=model_documents(run, base=config.critic.model_name_or_path, kind="PPO critic"),
        config_changes={
            "num_labels": 1,
            "pad_token_id": pad_id_for_pooling(models.tokenizer),
            "score_mean": critic.score_mean,
            "score_std": critic.score_std,
        },
    )


def save_actor(run: Run, config: PPOConfig, models: Models, folder: Path, *, kind: str) -> None:
    """The actor's folder. A collective."""
    save_model(
        models.actor.module.model,
        models.tokenizer,
        folder,
        dtype=saved_dtype(run),
        documents=model_documents(run, base=config.actor.model_name_or_path, kind=kind),
        merged=not config.deepspeed.save_adapter_only,
    )


def save_checkpoint(run: Run, config: PPOConfig, models: Models, state: State, average: MovingAverage | None) -> None:
    """Everything that evolves. A collective."""
    checkpoint.save(
        run.folder,
        step=state.step,
        engines={"actor": models.actor, "critic": models.critic},
        state={"ppo": asdict(state), "settings": settings_of(config)},
        tensors=average.averages if average is not None else {},
        keep=config.run.keep_checkpoints,
    )
