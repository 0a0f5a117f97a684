"""vLLM's sampling of full prompts by one batch size, for the row vllm. A worker: prints one JSON line.

It runs in vLLM's own environment (`--vllm FOLDER` of the row) and imports nothing of this project.
"""

import argparse
import json
import os
import random
import time
from pathlib import Path
from statistics import median

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process: the faster of the two for a batch that waits
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}
MEMORY = 0.6  # share of the device that the engine may take


def main() -> None:
    """Sample as many rollouts as asked for, with log-probabilities and without."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    for name in ("batch", "prompt", "answer", "repeats", "warm_up"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    os.environ.update(SETTINGS)
    import vllm

    config = json.loads((Path(options.model) / "config.json").read_text(encoding="utf-8"))
    engine = vllm.LLM(
        model=options.model,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=options.prompt + options.answer,
        gpu_memory_utilization=MEMORY,
        enable_prefix_caching=False,
        max_num_seqs=options.batch,
        seed=0,
    )
    draw = random.Random(1)
    found = {"version": vllm.__version__}
    for name, log_probs in (("generate", None), ("with_log_probs", 0)):
        settings = vllm.SamplingParams(
            temperature=1.0, max_tokens=options.answer, ignore_eos=True, detokenize=False, logprobs=log_probs
        )
        seconds = []
        for _ in range(options.warm_up + options.repeats):
            prompts = [
                {"prompt_token_ids": [draw.randrange(4, config["vocab_size"]) for _ in range(options.prompt)]}
                for _ in range(options.batch)
            ]
            started = time.perf_counter()
            outputs = engine.generate(prompts, settings, use_tqdm=False)
            seconds.append(time.perf_counter() - started)
            lengths = {len(output.outputs[0].token_ids) for output in outputs}
            assert lengths == {options.answer}, f"responses of {lengths} tokens"
        taken = median(seconds[options.warm_up :])
        found[f"{name}_s"], found[f"{name}_tokens_per_s"] = taken, options.batch * options.answer / taken
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
