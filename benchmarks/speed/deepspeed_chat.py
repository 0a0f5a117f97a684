"""The baseline: DeepSpeed-Chat's PPO loop on today's libraries, written from its published description.

`python -m benchmarks.speed.deepspeed_chat --actor FOLDER --critic FOLDER ...`, alone or under DeepSpeed's launcher;
rank 0 prints one JSON line. Actor and critic are DeepSpeed engines with the ZeRO stage, dtype and rates of the run it
is compared with; transformers' `generate()` samples with a dynamic cache; then four scoring passes over
full-vocabulary logits, and one update of each. Where it differs, it gains: torch's fused AdamW instead of an operation
that is compiled first, no file is read between steps, and the score is added without a loop over rows.
"""

import argparse
import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from benchmarks.speed import dschat_math as formulas
from benchmarks.speed.jobs import free_port

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def config_without_dropout(folder: str) -> Any:
    """A model's configuration with every dropout at 0, as `--actor_dropout 0 --critic_dropout 0` makes it."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    for name in ("dropout", "attention_dropout", "hidden_dropout", "activation_dropout"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    return config


class TokenScores(nn.Module):
    """A transformer without its head, and one number for each token: critic and reward model."""

    def __init__(self, folder: str, dtype: torch.dtype) -> None:
        super().__init__()
        from transformers import AutoModel

        config = config_without_dropout(folder)
        self.transformer = AutoModel.from_pretrained(folder, config=config, dtype=dtype)
        self.v_head = nn.Linear(getattr(config, "word_embed_proj_dim", config.hidden_size), 1, bias=False, dtype=dtype)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """(B, S) ids and mask -> (B, S) values."""
        hidden = self.transformer(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        return self.v_head(hidden).squeeze(-1)


def engine_config(options: argparse.Namespace, *, trained: bool) -> dict[str, Any]:
    """DeepSpeed's settings as DeepSpeed-Chat makes them; frozen models are partitioned only at stage 3."""
    stage = options.zero_stage if trained or options.zero_stage == 3 else 0
    world = int(os.environ["WORLD_SIZE"])
    zero = {
        "stage": stage,
        "overlap_comm": True,
        "stage3_param_persistence_threshold": 10_000,
        "stage3_max_live_parameters": 30_000_000,
        "stage3_prefetch_bucket_size": 30_000_000,
        "memory_efficient_linear": False,
    }
    accumulation = options.batch // options.micro_batch if trained else 1
    return {
        "train_micro_batch_size_per_gpu": options.micro_batch,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": options.micro_batch * accumulation * world,
        "zero_optimization": zero,
        "bf16": {"enabled": options.dtype == "bf16"},
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }


@contextlib.contextmanager
def partitioned(config: dict[str, Any]) -> Iterator[None]:
    """At stage 3, weights are loaded straight into their partitions while this is open."""
    if config["zero_optimization"]["stage"] < 3:
        yield
        return
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

    keep_alive = HfDeepSpeedConfig(config)
    yield
    del keep_alive
    unset_hf_deepspeed_config()


def make_engine(make: Callable[[], nn.Module], options: argparse.Namespace, *, rate: float = 0.0) -> Any:
    """A model under DeepSpeed; with a rate it is trained by AdamW."""
    config = engine_config(options, trained=rate > 0)
    with partitioned(config):
        model = make()
    if not rate:
        model.requires_grad_(False)
        engine = deepspeed.initialize(model=model, config=config)[0]
        engine.eval()
        return engine
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


class Loop:
    """Four engines and the three phases of a step; B sequences a step and rank in micro-batches."""

    def __init__(self, options: argparse.Namespace) -> None:
        from transformers import AutoModelForCausalLM

        dtype = DTYPES[options.dtype]

        def language_model() -> nn.Module:
            config = config_without_dropout(options.actor)
            return AutoModelForCausalLM.from_pretrained(options.actor, config=config, dtype=dtype)

        def token_scores() -> nn.Module:
            return TokenScores(options.critic, dtype)

        self.options = options
        self.actor = make_engine(language_model, options, rate=1e-6)
        self.reference = make_engine(language_model, options)
        self.critic = make_engine(token_scores, options, rate=1e-6)
        self.reward = make_engine(token_scores, options)
        self.pad = self.actor.module.config.pad_token_id
        self.device = torch.device(get_accelerator().current_device_name())
        self.vocabulary = self.actor.module.config.vocab_size

    def prompts(self, step: int) -> Tensor:
        """(B, P) random tokens without padding: every prompt has the full length."""
        generator = torch.Generator().manual_seed(1000 * step + int(os.environ["RANK"]))
        size = (self.options.batch, self.options.prompt)
        return torch.randint(4, self.vocabulary, size, generator=generator).to(self.device)

    @torch.no_grad()
    def generate(self, prompts: Tensor) -> Tensor:
        """(B, P) -> (B, S): sampled at temperature 1, exactly S - P tokens."""
        self.actor.eval(), self.critic.eval()
        length = self.options.prompt + self.options.answer
        ids = self.actor.module.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            min_length=0 if self.options.early_stop else length,
            max_length=length,
            pad_token_id=self.pad,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            synced_gpus=self.options.zero_stage == 3,
        )
        self.actor.train(), self.critic.train()
        return ids

    @torch.no_grad()
    def score(self, ids: Tensor) -> list[tuple[Tensor, ...]]:
        """Score micro-batches: ids, mask, log-probs (m, L), reference log-probs (m, L), scores (m,), values (m, L)."""
        found = []
        for part in ids.split(self.options.micro_batch):
            mask = part != self.pad
            ends = mask.sum(1) - 1
            policy = formulas.token_log_probs(self.actor(part, attention_mask=mask, use_cache=False).logits, part)
            ref = formulas.token_log_probs(self.reference(part, attention_mask=mask, use_cache=False).logits, part)
            scores = self.reward(part, mask).gather(1, ends.unsqueeze(1)).squeeze(1)
            found.append((part, mask, policy, ref, scores, self.critic(part, mask)[:, :-1]))
        return found

    def train(self, experience: list[tuple[Tensor, ...]]) -> tuple[float, float]:
        """One update of the actor and one of the critic; their losses."""
        start, losses = self.options.prompt - 1, (0.0, 0.0)
        for ids, mask, log_probs, ref, scores, values in experience:
            with torch.no_grad():
                rewards = formulas.token_rewards(log_probs, ref, scores, mask, prompt=self.options.prompt)
                advantages, returns = formulas.gae(rewards, values, prompt=self.options.prompt)
            answer = mask[:, start + 1 :]
            logits = self.actor(ids, attention_mask=mask, use_cache=False).logits
            new = formulas.token_log_probs(logits, ids)[:, start:]
            del logits
            policy = formulas.actor_loss(new, log_probs[:, start:], advantages, answer)
            self.actor.backward(policy)
            self.actor.step()
            new_values = self.critic(ids, mask)[:, start:-1]
            value = formulas.critic_loss(new_values, values[:, start:], returns, answer)
            self.critic.backward(value)
            self.critic.step()
            losses = (policy.item(), value.item())
        return losses

    def step(self, number: int) -> dict[str, float]:
        """One PPO step; seconds of its phases, peak GiB of each, tokens and losses."""
        prompts, line = self.prompts(number), {}
        started = now()
        ids = timed("generate", line, lambda: self.generate(prompts))
        experience = timed("score", line, lambda: self.score(ids))
        policy, value = timed("train", line, lambda: self.train(experience))
        line["step_s"] = now() - started
        line["response_tokens"] = float((ids[:, self.options.prompt :] != self.pad).sum())
        return line | {"loss_policy": policy, "loss_value": value}


def now() -> float:
    """Seconds, when the device has done all it was given."""
    get_accelerator().synchronize()
    return time.perf_counter()


def timed(name: str, line: dict[str, float], phase: Callable[[], Any]) -> Any:
    """Run a phase, and note its seconds and its peak memory in GiB."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    started = now()
    found = phase()
    line[f"{name}_s"] = now() - started
    line[f"{name}_peak_gib"] = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    return found


def summary(lines: list[dict[str, float]], options: argparse.Namespace) -> dict[str, Any]:
    """Medians of the measured steps; rates over all ranks."""
    world = int(os.environ["WORLD_SIZE"])
    found: dict[str, Any] = {name: median(line[name] for line in lines) for name in lines[0]}
    found["peak_gib"] = max(found[f"{phase}_peak_gib"] for phase in ("generate", "score", "train"))
    found["mean_length"] = found["response_tokens"] / options.batch
    found["samples_per_s"] = median(options.batch * world / line["step_s"] for line in lines)
    found["generate_tokens_per_s"] = median(world * line["response_tokens"] / line["generate_s"] for line in lines)
    return found | {"steps": len(lines), "micro_batch": options.micro_batch, "gpus": world}


def start() -> None:
    """Join the launcher's process group, or make one of this process alone."""
    alone = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in alone.items():
        os.environ.setdefault(name, str(value))
    if get_accelerator().device_name() == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # building it takes a compiler and 50 s
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed(dist_backend=get_accelerator().communication_backend_name(), verbose=False)


def main() -> None:
    """Make the steps, and print their medians on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--actor", required=True, help="folder of a causal language model")
    parser.add_argument("--critic", required=True, help="folder of a sequence classifier")
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    parser.add_argument("--early_stop", type=int, default=0, help="1: an EOS ends a response")
    parser.add_argument("--local_rank", type=int, default=0, help="given by launchers")
    for name, value in {"batch": 64, "micro_batch": 64, "prompt": 256, "answer": 256, "zero_stage": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--warm_up", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="measured steps, after those of warm-up")
    options = parser.parse_args()
    start()
    torch.manual_seed(0)
    loop = Loop(options)
    lines = [loop.step(number) for number in range(options.warm_up + options.steps)]
    if os.environ["RANK"] == "0":
        print(json.dumps(summary(lines[options.warm_up :], options)), flush=True)
    # Teardown of process groups aborts now and then.
    os._exit(0)


if __name__ == "__main__":
    main()
