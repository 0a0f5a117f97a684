"""Step 3 over ranks: what tests/multi/test_ranks_ppo.py compares."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from stages import current_world, make_run, watched_steps, weights
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from pipeline import dist
from pipeline.checkpoints import checkpoint
from pipeline.engine.moving_average import MovingAverage
from pipeline.generation.rollouts import Prompt, RandomKey, Sampling
from pipeline.run.run import Run
from pipeline.training.steps import Stopping
from step3_ppo import updater as trainer
from step3_ppo.config import PPOConfig
from step3_ppo.data import make_prompts, make_text
from step3_ppo.micro_batches import Lengths
from step3_ppo.models import Models, make_models, make_tokenizers
from step3_ppo.phases import Phases
from step3_ppo.prompts import make_plan
from step3_ppo.save import checkpoint_content, run_fingerprint, save_models
from step3_ppo.state import Collected, State

Words = tuple[object, ...]

PROMPTS_PER_ROLLOUT = 8
ROWS_PER_STEP = 4
LOGGED = ("loss/policy", "loss/value", "loss/ptx", "policy/approx_kl", "policy/ratio_max", "policy/clipfrac",
          "value/clipfrac", "actor/grad_norm", "critic/grad_norm")  # fmt: skip


@dataclass
class Notes:
    """Stands for the recorder: keeps the metrics of each step."""

    steps: list[dict[str, float]] = field(default_factory=list)
    scores: Any = None

    def begin(self, phase: str) -> float:
        return time.monotonic()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.steps.append(dict(values))

    def write_training(self, step: int, values: Mapping[str, float], **rates: float) -> None:
        self.steps.append(dict(values))

    def column(self, name: str) -> list[float]:
        return [values[name] for values in self.steps if name in values]


@dataclass
class Loop:
    """Everything of a run."""

    run: Run
    config: PPOConfig
    models: Models
    phases: Phases
    average: MovingAverage | None
    notes: Notes


def setup(inputs: Path, micro: int, words: Words = (), *, batches: int = 1, stage: int = 0) -> Loop:
    """`micro` rows a micro-batch, ROWS_PER_STEP rows an update, PROMPTS_PER_ROLLOUT prompts a rollout, two epochs."""
    size = dist.world_size()
    run = make_run(
        PPOConfig,
        "ppo",
        [
            *("--actor_model_name_or_path", inputs / "base", "--critic_model_name_or_path", inputs / "scorer"),
            *("--data_path", inputs / "few.jsonl", "--eval_data_path", inputs / "test.jsonl", "--data_split", "none"),
            *("--data_output_path", inputs / "cache", "--max_prompt_seq_len", 48, "--max_answer_seq_len", 12),
            *("--actor_learning_rate", 2e-4, "--critic_learning_rate", 2e-4, "--dtype", "fp32"),
            *("--actor_zero_stage", stage, "--critic_zero_stage", stage),
            *("--per_device_train_batch_size", micro, "--gradient_accumulation_steps", ROWS_PER_STEP // micro // size),
            *("--per_device_generation_batch_size", PROMPTS_PER_ROLLOUT // size // batches),
            *("--generation_batches", batches, "--ppo_epochs", 2, "--per_device_eval_batch_size", 3, "--max_steps", 8),
            *("--policy_clip", 0.05, "--value_clip", 0.05),
            *("--kl_target", 0.5, "--kl_horizon", 100, "--stage3_param_persistence_threshold", 0),
            *words,
        ],
    )
    config = run.resolved.config
    return make_loop(run, config)


def make_loop(run: Run, config: PPOConfig) -> Loop:
    models = make_models(run, config, make_tokenizers(config))
    prompts, text = make_prompts(run, config, models.tokenizer), make_text(run, config, models.tokenizer)
    plan = make_plan(config, num_prompts=len(prompts.train), world_size=run.world.size)
    average = MovingAverage(models.actor.module, decay=config.ppo.ema_decay) if config.ppo.enable_ema else None
    notes, state = Notes(), State(kl_coef=config.ppo.kl_coef)
    phases = Phases(
        run, config, models, prompts=prompts, text=text, plan=plan, rate=lambda step: 1.0, average=average,
        recorder=notes, state=state, stopping=Stopping(run),  # type: ignore[arg-type]
    )  # fmt: skip
    assess = phases.assess

    def watched(*given: Any) -> Any:
        found = assess(*given)
        notes.scores = found[0]
        return found

    phases.assess = watched  # type: ignore[method-assign]
    return Loop(run, config, models, phases, average, notes)


def tensors_of(rows: Any) -> dict[str, torch.Tensor]:
    return {f.name: getattr(rows, f.name) for f in fields(rows)}


def rollout_findings(loop: Loop, collected: Collected) -> dict[str, Any]:
    return {
        "responses": tensors_of(collected.responses),
        "scores": {name: tensor for name, tensor in tensors_of(loop.notes.scores).items() if tensor is not None},
        "experience": tensors_of(collected.experience),
        "kl": collected.metrics["objective/kl"],
        "sampler_error": collected.metrics.get("policy/sampler_error"),
    }


def run_updates(phases: Phases, collected: Collected) -> None:
    for _ in phases.updates(collected):
        pass


def rollouts(
    inputs: Path, micro: int, words: Words = (), *, batches: int = 1, stage: int = 0, count: int = 2, first: int = 0
) -> dict[str, Any]:
    """Findings of `count` rollouts and all updates on them; gradients of the very first update."""
    loop = setup(inputs, micro, words, batches=batches, stage=stage)
    loop.phases.state.rollout = first
    seen: list[Any] = []
    found = []
    with watched_steps(trainer, seen):
        for _ in range(count):
            collected = loop.phases.collect()
            found.append(rollout_findings(loop, collected))
            run_updates(loop.phases, collected)
    state = loop.phases.state
    return {
        "rollouts": found,
        "metrics": {name: loop.notes.column(name) for name in LOGGED},
        "first_ratio_error": loop.notes.column("policy/first_ratio_error"),
        "actor": seen[0][0] if len(seen[0]) == 2 else {},
        "critic": seen[0][-1],
        "state": [state.step, state.rollout, state.kl_coef, state.num_tokens, state.skipped_updates],
    }


def plain_scores(inputs: Path) -> dict[str, Any]:
    """What transformers alone says about the first rollout, row by row without padding; the first policy gradient."""
    loop = setup(inputs, 2 // dist.world_size())
    collected = loop.phases.collect()
    responses, experience = collected.responses, collected.experience
    policy = AutoModelForCausalLM.from_pretrained(inputs / "base", dtype=torch.float32).eval()
    scorer = AutoModelForSequenceClassification.from_pretrained(inputs / "scorer", dtype=torch.float32).eval()
    log_probs = torch.zeros_like(experience.log_probs)
    values, scores = torch.zeros_like(log_probs), []
    used = experience.response_mask[:ROWS_PER_STEP].sum()
    for n, start, length in zip(
        range(len(log_probs)), responses.prompt_lengths.tolist(), responses.response_lengths.tolist(), strict=True
    ):
        ids = responses.sequences[n : n + 1, : start + length]
        chosen = torch.log_softmax(policy(ids).logits[0, start - 1 : -1], dim=-1)
        chosen = chosen.gather(1, ids[0, start:, None])[:, 0]
        if n < ROWS_PER_STEP:
            ratio = (chosen - chosen.detach()).exp()
            (-(experience.advantages[n, :length] * ratio).sum() / used).backward()
        log_probs[n, :length] = chosen.detach()
        with torch.no_grad():
            raw = scorer.score(scorer.model(ids).last_hidden_state)[0, :, 0]
        values[n, :length] = (raw[start - 1 : -1] - scorer.config.score_mean) / scorer.config.score_std
        scores.append(raw[-1])
    gradients = {f"model.{name}": p.grad for name, p in policy.named_parameters() if p.grad is not None}
    return {
        "scores": {"log_probs": log_probs, "ref_log_probs": log_probs, "values": values, "scores": torch.stack(scores)},
        "gradients": gradients,
    }


def bad_gradient(inputs: Path, stage: int, engine: str, words: Words = ()) -> dict[str, Any]:
    """A NaN in one model's gradient on the last rank: neither model moves on any rank, and the next update is clean."""
    loop = setup(inputs, 2 // dist.world_size(), ("--enable_ema", *words), stage=stage)
    models, phases = loop.models, loop.phases
    collected = phases.collect()
    batches, *_ = phases.updater.updates(Lengths.of(collected.responses), rollout=0)
    before = {"actor": weights(models.actor), "critic": weights(models.critic)}
    assert loop.average is not None
    average = {name: value.clone() for name, value in loop.average.averages.items()}

    def update() -> tuple[dict[str, float], bool]:
        metrics, stepped = phases.updater.update(
            collected.responses, collected.experience, batches,
            num_tokens=phases.updater.num_tokens(collected.responses, collected.experience, batches)[0],
            kl_coef=0.1, rate_factor=1.0, train_actor=True, text=None,
        )  # fmt: skip
        phases._count(stepped)
        return metrics, stepped

    poisoned = next(p for name, p in getattr(models, engine).module.named_parameters() if name.endswith("fc1.bias"))
    is_last = current_world().rank == dist.world_size() - 1
    hook = poisoned.register_hook(lambda grad: grad * float("nan")) if is_last else None
    _, stepped = update()
    if hook is not None:
        hook.remove()
    moved = max(
        (before[name][key] - value).abs().max().item()
        for name, module in (("actor", models.actor), ("critic", models.critic))
        for key, value in weights(module).items()
    )
    drifted = max((loop.average.averages[name] - average[name]).abs().max().item() for name in average)
    seen: list[Any] = []
    with watched_steps(trainer, seen):
        metrics, stepped_again = update()
    state = phases.state
    return {
        "moved": moved,
        "drifted": drifted,
        "stepped": [stepped, stepped_again],
        "counts": [state.step, state.skipped_updates, state.bad_in_a_row],
        "metrics": {name: [metrics[name]] for name in LOGGED if name in metrics},
        "actor": seen[0][0],
        "critic": seen[0][1],
        "actor_weights": weights(models.actor),
        "critic_weights": weights(models.critic),
    }


def saved(inputs: Path, stage: int, words: Words = ()) -> dict[str, Any]:
    """The three folders after one rollout, as read from disk; and the live actor's weights after saving."""
    loop = setup(inputs, 2 // dist.world_size(), ("--enable_ema", "--ema_decay", 0.5, *words), stage=stage)
    run_updates(loop.phases, loop.phases.collect())
    assert loop.average is not None
    with loop.average.swapped_in():
        swapped = weights(loop.models.actor)
    before = weights(loop.models.actor)
    save_models(loop.run, loop.config, loop.models, loop.average)
    after = weights(loop.models.actor)
    folder = Path(loop.config.run.output_dir)
    found: dict[str, Any] = {
        "swapped": swapped,
        "moved": max((before[name] - after[name]).abs().max().item() for name in before),
    }
    for name, auto in (
        ("actor", AutoModelForCausalLM),
        ("actor_ema", AutoModelForCausalLM),
        ("critic", AutoModelForSequenceClassification),
    ):
        model, info = auto.from_pretrained(folder / name, dtype=torch.float32, output_loading_info=True)
        found[name] = dict(model.state_dict())
        found[f"{name} problems"] = sorted(
            map(str, [*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]])
        )
    return found


def resumed(inputs: Path, stage: int, words: Words = ()) -> dict[str, Any]:
    """Two rollouts in one go; and one, a checkpoint, everything made anew, and the second."""
    words = ("--enable_ema", "--unsupervised_data_path", inputs / "text.jsonl", *words)
    whole = setup(inputs, 2 // dist.world_size(), words, stage=stage)
    for _ in range(2):
        run_updates(whole.phases, whole.phases.collect())
    first = setup(inputs, 2 // dist.world_size(), words, stage=stage)
    run_updates(first.phases, first.phases.collect())
    text, plan = first.phases.text, first.phases.plan
    fingerprint = run_fingerprint(first.config, first.phases.prompts, text, plan)
    content = checkpoint_content(first.models, state=first.phases.state, collected=None, average=first.average)
    saver = checkpoint.Saver(first.run, fingerprint, keep=1, background=True)
    saver.save(content, step=first.phases.state.step)
    run_updates(first.phases, first.phases.collect())  # what is written is the state as it was
    saver.finish()
    second = make_loop(first.run, first.config)
    engines = {"actor": second.models.actor, "critic": second.models.critic}
    found = checkpoint.load(first.run, "auto", engines, fingerprint, force=False)
    assert found is not None and second.average is not None and whole.average is not None
    second.average.restore(found.fragments["average"])
    second.phases.state = State(**found.state["ppo"])
    run_updates(second.phases, second.phases.collect())
    steps = len(second.notes.steps)
    return {
        "uninterrupted": [[values.get(name, 0.0) for name in LOGGED] for values in whole.notes.steps[-steps:]],
        "resumed": [[values.get(name, 0.0) for name in LOGGED] for values in second.notes.steps],
        "states": [whole.phases.state.kl_coef, second.phases.state.kl_coef],
        "averages": [whole.average.averages, second.average.averages],
        "weights": [weights(whole.models.actor), weights(second.models.actor)],
    }


def uneven(inputs: Path, stage: int) -> dict[str, Any]:
    """Ranks decode different numbers of tokens (under ZeRO-3 a hook that is still on would wait for ever)."""
    loop = setup(inputs, 2 // dist.world_size(), stage=stage)
    hybrid, rows = loop.phases.hybrid, loop.phases.prompts.train
    prompts = [Prompt(rows[n]["prompt_ids"], rows[n]["prompt_id"]) for n in range(4)]
    length = 3 if current_world().rank else 12
    with hybrid.generation():
        found = hybrid.generate(prompts, num_samples=1, sampling=Sampling(length), key=RandomKey(1234, "rollout"))
    collected = loop.phases.collect()
    run_updates(loop.phases, collected)
    return {
        "longest": max(len(response) for response in found.responses),
        "first": torch.stack([response[0] for response in found.responses]),
        "losses": loop.notes.column("loss/policy"),
    }


def evaluated(inputs: Path, stage: int) -> dict[str, Any]:
    """The metrics of held-out prompts, whose number does not divide."""
    loop = setup(inputs, 2 // dist.world_size(), stage=stage)
    loop.phases.evaluate()
    return loop.notes.steps[0]


def shape_cases(size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for stage in range(4):
        for micro in {4 // size, 2 // size, 1} if stage in (0, 3) else {2 // size}:
            found[f"z{stage} m{micro}"] = partial(rollouts, micro=micro, stage=stage)
        found[f"z{stage} bad actor"] = partial(bad_gradient, stage=stage, engine="actor")
        found[f"z{stage} bad critic"] = partial(bad_gradient, stage=stage, engine="critic")
        found[f"z{stage} bf16"] = partial(rollouts, micro=2 // size, stage=stage, words=("--dtype", "bf16"))
        found[f"z{stage} resume"] = partial(resumed, stage=stage)
        found[f"z{stage} saved"] = partial(saved, stage=stage)
    return found


def cases() -> dict[str, Any]:
    size = dist.read_environment()[1]
    found: dict[str, Any] = {"plain": plain_scores, **shape_cases(size)}
    micro = 2 // size
    lora = ("--actor_lora_dim", 4, "--critic_lora_dim", 4)
    recompute = ("--actor_gradient_checkpointing", "--critic_gradient_checkpointing")
    for name, words in {
        "recomputed": recompute,
        "two samples": ("--num_samples_per_prompt", 2),
        "kl in loss": ("--kl_in_loss", "--kl_estimator", "k3"),
    }.items():
        found[f"z0 {name}"] = partial(rollouts, micro=micro, words=words)
    one_step = ("--ppo_epochs", 1, "--gradient_accumulation_steps", PROMPTS_PER_ROLLOUT // micro // size)
    for stage in (0, 3):
        found[f"z{stage} sampler"] = partial(
            rollouts, micro=micro, stage=stage, words=("--old_log_probs", "sampler", *one_step)
        )
        found[f"z{stage} lora"] = partial(rollouts, micro=micro, stage=stage, words=lora)
        found[f"z{stage} small batches"] = partial(rollouts, micro=micro, stage=stage, batches=2)
        found[f"z{stage} partial"] = partial(rollouts, micro=micro, stage=stage, first=2, count=1)
        found[f"z{stage} saved lora"] = partial(saved, stage=stage, words=lora)
        found[f"z{stage} uneven"] = partial(uneven, stage=stage)
        found[f"z{stage} eval"] = partial(evaluated, stage=stage)
    for stage in range(4):
        found[f"z{stage} ptx"] = partial(ptx, micro=micro, stage=stage)
    whole = ("--stage3_param_persistence_threshold", 100_000)
    found["z3 unpartitioned"] = partial(rollouts, micro=micro, stage=3, words=whole)
    found["z3 unpartitioned saved"] = partial(saved, stage=3, words=whole)
    found["z3 by layers"] = partial(rollouts, micro=micro, stage=3, words=("--zero3_gather", "layers"))
    offload = ("--offload", "--offload_parameters", "--offload_reference_model", "--offload_reward_model")
    found["z3 offload"] = partial(rollouts, micro=micro, stage=3, words=offload)
    found["z3 offload bad actor"] = partial(bad_gradient, stage=3, engine="actor", words=("--offload",))
    found["z1 offload"] = partial(rollouts, micro=micro, stage=1, words=("--offload",))
    found["z2 offload"] = partial(rollouts, micro=micro, stage=2, words=("--offload",))
    found["z3 actor z0 critic"] = partial(rollouts, micro=micro, stage=3, words=("--critic_zero_stage", 0))
    return found


def ptx(inputs: Path, micro: int, stage: int) -> dict[str, Any]:
    words = ("--unsupervised_data_path", inputs / "text.jsonl", "--unsup_coef", 1.5)
    return rollouts(inputs, micro, words, stage=stage)
