"""Step 3's outputs: actor, critic, averaged actor; and its resume checkpoints."""

from dataclasses import asdict
from pathlib import Path

from pipeline.checkpoints import checkpoint
from pipeline.checkpoints.fingerprint import RunFingerprint, data_fingerprint, model_fingerprint
from pipeline.checkpoints.model_folder import model_documents, save_model, saved_dtype
from pipeline.configuration.resume_rules import defaults_of, values_by_rule
from pipeline.data.batching import SFTBatch
from pipeline.data.cache import StageData
from pipeline.data.loader import StepLoader
from pipeline.engine.moving_average import MovingAverage
from pipeline.models.reward_model import pad_id_for_pooling
from pipeline.run.run import Run
from step3_ppo.config import PPOConfig
from step3_ppo.models import Models
from step3_ppo.prompts import Plan
from step3_ppo.state import Collected, State


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


def checkpoint_content(
    models: Models, *, state: State, collected: Collected | None, average: MovingAverage | None
) -> checkpoint.Content:
    """Everything that evolves, and the rollout where its updates are not all done."""
    kept = collected if state.update else None
    return checkpoint.Content(
        state={"ppo": asdict(state), "rollout": kept.metrics if kept else None},
        engines={"actor": models.actor, "critic": models.critic},
        fragments={"average": average.fragments()} if average is not None else {},
        tensors=kept.tensors() if kept else {},
    )


def run_fingerprint(
    config: PPOConfig, prompts: StageData, text: StepLoader[SFTBatch] | None, plan: Plan
) -> RunFingerprint:
    """What a resumed run must share with the one that wrote its checkpoint."""
    reward = config.reward_model_name_or_path or config.critic.model_name_or_path
    paths = {"actor": config.actor.model_name_or_path, "critic": config.critic.model_name_or_path, "reward": reward}
    hashes = {f"{name} model": model_fingerprint(path) for name, path in paths.items()}
    hashes["prompts"] = data_fingerprint(prompts.train)
    if text is not None:
        hashes["ptx text"] = data_fingerprint(text.rows)
    return RunFingerprint(
        settings=values_by_rule(config, "same"),
        hashes=hashes,
        sizes={"prompts of a rollout": plan.prompts_per_rollout, "rows of an optimizer step": plan.rows_per_step},
        layout=values_by_rule(config, "rounding"),
        defaults=defaults_of(config),
    )
