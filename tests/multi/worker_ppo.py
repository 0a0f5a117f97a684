"""Step 3 over ranks: what tests/multi/test_ranks_ppo.py compares."""

import json
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from stages import current_world, make_run, watched_steps, weights
from support.ds_arguments import PARTITIONED_FILE
from support.ppo_loop import PPOLoop, make_loop
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from pipeline import dist
from pipeline.checkpoints import checkpoint
from pipeline.errors import Interrupted
from pipeline.generation.rollouts import Prompt, RandomKey, Sampling
from pipeline.rendezvous import num_ranks
from pipeline.rewards.rows import Scale, ScoredRows
from step3_ppo import training
from step3_ppo import updater as updater_module
from step3_ppo.config import PPOConfig
from step3_ppo.experience import Collected, Responses
from step3_ppo.state import checkpoint_content

Words = tuple[object, ...]

PROMPTS_PER_ROLLOUT = 8
ROWS_PER_STEP = 4
LOGGED = ("loss/policy", "loss/value", "loss/ptx", "policy/approx_kl", "policy/ratio_max", "policy/clipfrac",
          "value/clipfrac", "loss/kl", "loss/entropy_bonus", "actor/grad_norm", "critic/grad_norm")  # fmt: skip


def setup(inputs: Path, micro: int, words: Words = (), *, batches: int = 1, stage: int = 0) -> PPOLoop:
    """`micro` rows a micro-batch, ROWS_PER_STEP rows an update, PROMPTS_PER_ROLLOUT prompts a rollout, two epochs."""
    size = dist.world_size()
    run = make_run(
        PPOConfig,
        "ppo",
        [
            *("--actor-model-name-or-path", inputs / "base", "--critic-model-name-or-path", inputs / "scorer"),
            *("--data-path", inputs / "few.jsonl", "--eval-data-path", inputs / "test.jsonl", "--data-split", "none"),
            *("--data-output-path", inputs / "cache", "--max-prompt-seq-len", 48, "--max-answer-seq-len", 12),
            *("--actor-learning-rate", 2e-4, "--critic-learning-rate", 2e-4, "--dtype", "fp32"),
            *("--actor-zero-stage", stage, "--critic-zero-stage", stage),
            *("--per-device-train-batch-size", micro, "--gradient-accumulation-steps", ROWS_PER_STEP // micro // size),
            *("--per-device-generation-batch-size", PROMPTS_PER_ROLLOUT // size // batches),
            *("--generation-batches", batches, "--ppo-epochs", 2, "--per-device-eval-batch-size", 3, "--max-steps", 8),
            *("--policy-clip", 0.05, "--value-clip", 0.05),
            *("--kl-target", 0.5, "--kl-horizon", 100, "--deepspeed-config", PARTITIONED_FILE),
            *words,
        ],
    )
    return make_loop(run, run.resolved.config)


def tensors_of(rows: Any) -> dict[str, torch.Tensor]:
    return {f.name: value for f in fields(rows) if (value := getattr(rows, f.name)) is not None}


def responses_of(responses: Responses) -> dict[str, torch.Tensor]:
    """The tensors of responses, and the lengths that follow from them."""
    lengths = {"prompt_lengths": responses.prompt_lengths, "response_lengths": responses.response_lengths}
    return tensors_of(responses) | lengths


def rollout_findings(loop: PPOLoop, collected: Collected) -> dict[str, Any]:
    return {
        "responses": responses_of(collected.responses),
        "scores": {name: tensor for name, tensor in tensors_of(loop.scores).items() if tensor is not None}
        | {"judged": loop.judged},
        "experience": collected.experience.tensors(""),
        "kl": collected.metrics["objective/kl"],
        "sampler_error": collected.metrics.get("policy/sampler_error"),
    }


def rollouts(
    inputs: Path, micro: int, words: Words = (), *, batches: int = 1, stage: int = 0, count: int = 2, first: int = 0
) -> dict[str, Any]:
    """Findings of `count` rollouts and all updates on them; gradients of the very first update."""
    loop = setup(inputs, micro, words, batches=batches, stage=stage)
    loop.state.rollout = first
    seen: list[Any] = []
    found = []
    with watched_steps(updater_module, seen):
        for _ in range(count):
            collected = loop.collect()
            found.append(rollout_findings(loop, collected))
            loop.update(collected)
    state = loop.state
    return {
        "rollouts": found,
        "metrics": {name: loop.control.column(name) for name in LOGGED},
        "first_ratio_error": loop.control.column("policy/first_ratio_error"),
        "actor": seen[0][0] if len(seen[0]) == 2 else {},
        "critic": seen[0][-1],
        "state": [state.step, state.rollout, state.kl_coef, state.num_tokens, state.skipped_updates],
    }


class GuessedLength:
    """A reward of plain Python, of a column of the prompt's row."""

    name, weight, scale, reads_columns = "guess", -0.25, Scale(30.0, 20.0), True

    def score(self, rows: ScoredRows) -> torch.Tensor:
        return torch.tensor([float(row.extra["guess"] * len(row.ids)) for row in rows])


def two_rewards(inputs: Path, stage: int) -> dict[str, Any]:
    """Two rollouts that a reward model and a function judge; the guesses of their prompts, as the file has them."""
    loop = setup(inputs, 2 // dist.world_size(), ("--data-path", inputs / "guesses.jsonl"), stage=stage)
    loop.ppo.models.rewards.append(GuessedLength())
    guesses = {row["prompt"]: row["guess"] for row in map(json.loads, (inputs / "guesses.jsonl").open())}
    found = []
    for _ in range(2):
        collected = loop.collect()
        rows = [loop.ppo.prompts.train[n] for n in collected.responses.row_index.tolist()]
        prompts = [json.loads(row["messages"])[0]["content"] for row in rows]
        found.append(rollout_findings(loop, collected) | {"guesses": [guesses[prompt] for prompt in prompts]})
        loop.update(collected)
    loop.evaluate()
    return {"rollouts": found, "eval": loop.control.evaluations[0]}


def plain_scores(inputs: Path) -> dict[str, Any]:
    """What transformers alone says about the first rollout, row by row without padding; the first policy gradient."""
    loop = setup(inputs, 2 // dist.world_size())
    collected = loop.collect()
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
        "scores": {
            "log_probs": log_probs,
            "ref_log_probs": log_probs,
            "values": values,
            "judged": torch.stack(scores).unsqueeze(1),
        },
        "gradients": gradients,
    }


def bad_gradient(inputs: Path, stage: int, engine: str, words: Words = ()) -> dict[str, Any]:
    """A NaN in one model's gradient on the last rank: neither model moves on any rank, and the next update is clean."""
    loop = setup(inputs, 2 // dist.world_size(), ("--enable-ema", *words), stage=stage)
    models, state = loop.ppo.models, loop.state
    collected = loop.collect()
    before = {"actor": weights(models.actor), "critic": weights(models.critic)}
    assert loop.ppo.models.average is not None
    average = {name: value.clone() for name, value in loop.ppo.models.average.averages.items()}

    def update() -> tuple[dict[str, float], bool]:
        update = training.step_objectives(loop.ppo, collected, state, loop.control)
        assert update is not None
        state.count_step(stepped=update.stepped, engines=loop.ppo.models.trained.values())
        return update.metrics, update.stepped

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
    drifted = max((loop.ppo.models.average.averages[name] - average[name]).abs().max().item() for name in average)
    seen: list[Any] = []
    with watched_steps(updater_module, seen):
        metrics, stepped_again = update()
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
    loop = setup(inputs, 2 // dist.world_size(), ("--enable-ema", "--ema-decay", 0.5, *words), stage=stage)
    loop.update(loop.collect())
    assert loop.ppo.models.average is not None
    with loop.ppo.models.average.swapped_in():
        swapped = weights(loop.ppo.models.actor)
    before = weights(loop.ppo.models.actor)
    training.save(loop.ppo, loop.state)
    after = weights(loop.ppo.models.actor)
    folder = Path(loop.ppo.config.run.output_dir)
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
    words = ("--enable-ema", "--unsupervised-data-path", inputs / "text.jsonl", *words)
    whole = setup(inputs, 2 // dist.world_size(), words, stage=stage)
    for _ in range(2):
        whole.iterate()
    first = setup(inputs, 2 // dist.world_size(), words, stage=stage)
    first.iterate()
    run, fingerprint = first.ppo.run, first.ppo.fingerprint
    saver = checkpoint.Saver(run, fingerprint, keep=1, background=True)
    saver.save(checkpoint_content(first.ppo, first.state, None), step=first.state.step)
    first.iterate()  # what is written is the state as it was
    saver.finish()
    second = make_loop(run, first.ppo.config)
    second.iterate()
    steps = len(second.control.steps)
    return {
        "uninterrupted": [[values.get(name, 0.0) for name in LOGGED] for _, values in whole.control.steps[-steps:]],
        "resumed": [[values.get(name, 0.0) for name in LOGGED] for _, values in second.control.steps],
        "states": [whole.state.kl_coef, second.state.kl_coef],
        "averages": [whole.ppo.models.average.averages, second.ppo.models.average.averages],
        "weights": [weights(whole.ppo.models.actor), weights(second.ppo.models.actor)],
    }


def uneven(inputs: Path, stage: int) -> dict[str, Any]:
    """Ranks decode different numbers of tokens (under ZeRO-3 a hook that is still on would wait for ever)."""
    loop = setup(inputs, 2 // dist.world_size(), stage=stage)
    hybrid, rows = loop.ppo.hybrid, loop.ppo.prompts.train
    prompts = [Prompt(rows[n]["prompt_ids"], rows[n]["prompt_id"]) for n in range(4)]
    length = 3 if current_world().rank else 12
    with hybrid.generation():
        found = hybrid.generate(prompts, num_samples=1, sampling=Sampling(length), key=RandomKey(1234, "rollout"))
    collected = loop.collect()
    loop.update(collected)
    return {
        "longest": max(len(response) for response in found.responses),
        "first": torch.stack([response[0] for response in found.responses]),
        "losses": loop.control.column("loss/policy"),
    }


def evaluated(inputs: Path, stage: int) -> dict[str, Any]:
    """The metrics of held-out prompts, whose number does not divide."""
    loop = setup(inputs, 2 // dist.world_size(), stage=stage)
    loop.evaluate()
    return loop.control.evaluations[0]


def some_held_out(inputs: Path) -> dict[str, Any]:
    """The metrics of an evaluation in one and in two batches of three prompts on each rank, and of all."""
    found = {}
    for limit in (1, 2, 0):
        loop = setup(inputs, 2 // dist.world_size(), ("--eval-iters", limit))
        loop.evaluate()
        (found[str(limit)],) = loop.control.evaluations
    return found


def with_functions(inputs: Path) -> dict[str, Any]:
    """Rollouts whose function fails, returns nonsense or values of tokens for some prompts; an evaluation of seven.

    The prompts that it does so for: none, the last three of the rollout's eight, which are the last rank's, or all.
    """
    words: Words = ("--reward-function", f"{inputs}/rewards.py:some", "--eval-data-path", inputs / "seven.jsonl")
    # So many that three prompts are enough to end a run, and those of one rank end it no earlier.
    words += ("--num-samples-per-prompt", 7, "--max-answer-seq-len", 4)
    loop = setup(inputs, 2 // dist.world_size(), words)
    rows, seed = loop.ppo.prompts.train, loop.ppo.config.run.seed
    _, order = loop.ppo.schedule.prompts(0, PROMPTS_PER_ROLLOUT, seed=seed, num_prompts=len(rows))
    texts = [json.loads(rows[n]["messages"])[0]["content"] for n in order if n is not None]
    held_out = [json.loads(row["messages"])[0]["content"] for row in loop.ppo.prompts.eval]
    found: dict[str, Any] = {"texts": texts, "order": order}
    with loop.ppo.calls:
        for does in ("raise", "nonsense", "tokens"):
            for which, prompts in (("last", texts[-3:]), ("all", texts)):
                dist.on_main(partial((inputs / "does.json").write_text, json.dumps([does, prompts])))
                try:
                    found[f"{does} {which}"] = loop.collect().experience.tensors("")
                except Interrupted as stop:
                    found[f"{does} {which}"] = str(stop.error)
        dist.on_main(partial((inputs / "does.json").write_text, json.dumps(["raise", held_out[-3:]])))
        loop.evaluate()
    dist.meet()
    samples = (loop.ppo.run.folder / "samples.jsonl").read_text().splitlines()
    return found | {"eval": loop.control.evaluations[0], "rows": loop.control.row_values[0], "samples": samples}


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
    size = num_ranks()
    found: dict[str, Any] = {
        "plain": plain_scores,
        "some held out": some_held_out,
        "functions": with_functions,
        **shape_cases(size),
    }
    micro = 2 // size
    lora = ("--actor-lora-dim", 4, "--critic-lora-dim", 4)
    recompute = ("--actor-gradient-checkpointing", "--critic-gradient-checkpointing")
    for name, words in {
        "recomputed": recompute,
        "two samples": ("--num-samples-per-prompt", 2),
        "kl in loss": ("--kl-in-loss", "--kl-estimator", "k3", "--entropy-coef", 0.1),
    }.items():
        found[f"z0 {name}"] = partial(rollouts, micro=micro, words=words)
    exact = ("--kl-in-loss", "--kl-estimator", "jsd", "--kl-coef", 5)
    one_step = ("--ppo-epochs", 1, "--gradient-accumulation-steps", PROMPTS_PER_ROLLOUT // micro // size)
    for stage in (0, 3):
        found[f"z{stage} sampler"] = partial(
            rollouts, micro=micro, stage=stage, words=("--old-log-probs", "sampler", *one_step)
        )
        found[f"z{stage} lora"] = partial(rollouts, micro=micro, stage=stage, words=lora)
        found[f"z{stage} exact kl"] = partial(rollouts, micro=micro, stage=stage, words=exact)
        found[f"z{stage} small batches"] = partial(rollouts, micro=micro, stage=stage, batches=2)
        found[f"z{stage} partial"] = partial(rollouts, micro=micro, stage=stage, first=2, count=1)
        found[f"z{stage} saved lora"] = partial(saved, stage=stage, words=lora)
        found[f"z{stage} uneven"] = partial(uneven, stage=stage)
        found[f"z{stage} eval"] = partial(evaluated, stage=stage)
        found[f"z{stage} two rewards"] = partial(two_rewards, stage=stage)
    for stage in range(4):
        found[f"z{stage} ptx"] = partial(ptx, micro=micro, stage=stage)
    whole = ("--deepspeed-config", "")
    found["z3 unpartitioned"] = partial(rollouts, micro=micro, stage=3, words=whole)
    found["z3 unpartitioned saved"] = partial(saved, stage=3, words=whole)
    found["z3 by layers"] = partial(rollouts, micro=micro, stage=3, words=("--zero3-gather", "layers"))
    found["z3 exact kl by layers"] = partial(rollouts, micro=micro, stage=3, words=("--zero3-gather", "layers", *exact))
    offload = ("--offload", "--offload-parameters", "--offload-reference-model", "--offload-reward-model")
    found["z3 offload"] = partial(rollouts, micro=micro, stage=3, words=offload)
    found["z3 offload bad actor"] = partial(bad_gradient, stage=3, engine="actor", words=("--offload",))
    found["z1 offload"] = partial(rollouts, micro=micro, stage=1, words=("--offload",))
    found["z2 offload"] = partial(rollouts, micro=micro, stage=2, words=("--offload",))
    found["z3 actor z0 critic"] = partial(rollouts, micro=micro, stage=3, words=("--critic-zero-stage", 0))
    return found


def ptx(inputs: Path, micro: int, stage: int) -> dict[str, Any]:
    words = ("--unsupervised-data-path", inputs / "text.jsonl", "--unsup-coef", 1.5)
    return rollouts(inputs, micro, words, stage=stage)
