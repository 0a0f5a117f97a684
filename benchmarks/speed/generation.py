"""Generation by itself: `HybridEngine` on full prompts at several batch sizes. A worker: prints one JSON line.

`python -m benchmarks.speed.generation --batches 64,128 --repeats 5 -- STEP-3 FLAGS`: the actor is made as step 3 makes
it.
"""

import argparse
import json
import os
import sys
import time
from dataclasses import replace
from statistics import median
from typing import Any

BATCHES: dict[str, Any] = {}
FOUND: dict[str, dict[str, Any]] = {}


def measure(run: Any, config: Any) -> None:
    """Replace the loop of PPO: sample `repeats` rollouts per batch size, and note their seconds in FOUND.

    What is printed here goes to the run's log, as in every stage.
    """
    import torch

    from pipeline.engine.build import language_model_engine
    from pipeline.engine.start import start_deepspeed
    from pipeline.generation.rollouts import Prompt, RandomKey, Sampling, Vocabulary
    from pipeline.models.source import ModelSource
    from pipeline.models.tokenizers import eos_ids
    from step3_ppo.models.engines import make_sources
    from step3_ppo.models.hybrid_engine import HybridEngine

    start_deepspeed()
    tokenizer = make_sources(run, config).tokenizer
    engine = language_model_engine(run, ModelSource(config.actor.model_name_or_path), config.actor, name="actor")
    ends = eos_ids(tokenizer, engine.module.model.generation_config)
    hybrid = HybridEngine(engine, Vocabulary(ends, tokenizer.pad_token_id))
    sampling = Sampling(config.sampling.max_answer_seq_len)
    vocabulary = engine.module.config.vocab_size
    on_gpu = run.world.device.type == "cuda"

    def sample(batch: int, number: int, sampling: Sampling) -> tuple[float, list[int]]:
        """Seconds of a rollout of `batch` responses at a time, and the lengths of its responses."""
        count = batch * BATCHES["fill"]
        ids = torch.randint(4, vocabulary, (count, config.data.max_prompt_seq_len), generator=generator)
        prompts = [Prompt(row.tolist(), index) for index, row in enumerate(ids)]
        if on_gpu:
            torch.cuda.synchronize()
        started = time.perf_counter()
        with hybrid.generation():
            rollout = hybrid.generate(
                prompts, num_samples=1, sampling=sampling, key=RandomKey(number, "bench"), batch_size=batch
            )
        lengths = [len(response) for response in rollout.responses]
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - started, lengths

    for batch in BATCHES["sizes"]:
        generator = torch.Generator().manual_seed(batch)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        numbers, warm_up = range(BATCHES["warm_up"] + BATCHES["repeats"]), BATCHES["warm_up"]
        rollouts = [sample(batch, number, sampling) for number in numbers][warm_up:]
        peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
        # Prompts and the first token alone: what is left of a rollout is the time of its decode steps.
        first = median([sample(batch, number, Sampling(1))[0] for number in numbers][warm_up:])
        decoding = median(seconds for seconds, _ in rollouts) - first
        FOUND[str(batch)] = {
            "generate_s": median(seconds for seconds, _ in rollouts),
            "generate_tokens_per_s": median(sum(lengths) / seconds for seconds, lengths in rollouts),
            "seconds": [seconds for seconds, _ in rollouts],
            "lengths": [lengths for _, lengths in rollouts],
            "backend": str(hybrid.backend),
            "first_token_s": first,
            "decode_tokens_per_s": median(sum(lengths) - len(lengths) for _, lengths in rollouts) / decoding,
            "peak_gib": peak,
        }


def main() -> None:
    """Measure in the surroundings that the stage makes: process group, run folder, configuration."""
    cut = sys.argv.index("--")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", default="64", help="prompts generated at once, by commas")
    parser.add_argument("--fill", type=int, default=1, help="responses of a rollout for each that fits at once")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warm_up", type=int, default=2)
    options = parser.parse_args(sys.argv[1:cut])
    BATCHES.update(sizes=[int(size) for size in options.batches.split(",")], **vars(options))

    from pipeline.preparation.stage_entry import enter
    from step3_ppo.stage import STAGE

    code = enter(replace(STAGE, loop=lambda: measure), [*sys.argv[cut + 1 :], "--report", "false"])
    if code == 0:
        print(json.dumps(FOUND), flush=True)
    os._exit(code)


if __name__ == "__main__":
    main()
