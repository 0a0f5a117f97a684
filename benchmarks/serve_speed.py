"""`rlhf serve` beside vLLM's server: tokens per second at several numbers of clients, and pauses of their streams.

    python -m benchmarks.speed.random_models --output models --actor 1.3b --prompts 8
    python -m benchmarks.serve_speed models/actor --clients 8 32 --vllm FOLDER --json serve_speed.jsonl

Each client requests one streamed completion after the other, of random token ids; clients share a few processes. With
`--burst N`, another client sends N prompts of `--burst-tokens` each two seconds, all at once, for one token each.
Servers run one after the other. `--vllm` is the PYTHONPATH of vLLM's modules. Prints a line of JSON for each server and
number of clients.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from benchmarks.load import serving
from benchmarks.speed.vllm_rollouts import SETTINGS
from pipeline.launching.machine import free_port

SMALLEST_ID = 4  # those below are special tokens of the random models
BURST_EVERY_S = 2.0
LONG_GAP_S = 0.1
STARTS_WITHIN_S = 300
Json = dict[str, Any]


@dataclass(slots=True)
class Counted:
    """What all clients of a measurement read.

    num_tokens: tokens of streams.
    first_s: seconds from a request to its first piece.
    gaps_s: seconds between two pieces of a stream.
    burst_s: seconds of a burst.
    """

    num_tokens: float = 0.0
    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    burst_s: list[float] = field(default_factory=list)

    def add(self, other: "Counted") -> None:
        """Add what the clients of another process read."""
        self.num_tokens += other.num_tokens
        self.first_s += other.first_s
        self.gaps_s += other.gaps_s
        self.burst_s += other.burst_s

    def figures(self, seconds: float) -> Json:
        """Return tokens per second; of each list the median, the 99th and 99.9th percentile and the largest value."""
        lists = {"first_s": self.first_s, "gap_s": self.gaps_s, "burst_s": self.burst_s}
        named = {
            name: [
                statistics.median(values),
                *(statistics.quantiles(values, n=1000)[n] for n in (989, 998)),
                max(values),
            ]
            for name, values in lists.items()
            if len(values) > 1
        }
        rounded = {name: [round(one, 4) for one in values] for name, values in named.items()}
        num_long = sum(gap > LONG_GAP_S for gap in self.gaps_s)
        return {"tokens_per_s": round(self.num_tokens / seconds, 1), "long_gaps": num_long, **rounded}


@contextmanager
def vllm_serving(model: str, site: str, *words: str) -> Iterator[tuple[str, str]]:
    """Run vLLM's server while a block runs; yield its address and its key, which is empty."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", str(port)]
    own = SETTINGS | {"PYTHONPATH": site, "HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", *words], env=os.environ | own, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            end = time.monotonic() + STARTS_WITHIN_S
            while process.poll() is None and time.monotonic() < end:
                with suppress(httpx.TransportError):
                    if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                        break
                time.sleep(0.5)
            else:
                log.seek(0)
                raise SystemExit(log.read()[-8000:])
            yield f"http://127.0.0.1:{port}", ""
        finally:
            process.terminate()
            process.wait(60)


def drawn_ids(rng: random.Random, count: int, vocabulary: int) -> list[int]:
    """Return a prompt."""
    return [rng.randrange(SMALLEST_ID, vocabulary) for _ in range(count)]


async def run_client(http: httpx.AsyncClient, body: Json, rng: random.Random, options: argparse.Namespace,
                     counted: Counted, ends: tuple[float, float]) -> None:  # fmt: skip
    """Request completions until the second of `ends`; tokens whose pieces come between both count."""
    begins_at, end = ends
    while time.monotonic() < end:
        times, num_tokens = [time.monotonic()], 0
        prompt = drawn_ids(rng, options.prompt_tokens, options.vocabulary)
        whole = body | {"prompt": prompt, "max_tokens": options.answer_tokens, "temperature": 1, "stream": True}
        whole |= {"seed": rng.randrange(2**31), "stream_options": {"include_usage": True}}
        async with http.stream("POST", "/v1/completions", json=whole) as response:
            if response.status_code != 200:
                raise SystemExit(f"{response.status_code}: {(await response.aread())[:500]!r}")
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                content = json.loads(line.removeprefix("data: "))
                num_tokens = (content.get("usage") or {}).get("completion_tokens", num_tokens)
                if any(choice["text"] for choice in content["choices"]):
                    times.append(time.monotonic())
        within = [begins_at <= one < end for one in times]
        counted.num_tokens += num_tokens * sum(within[1:]) / max(1, len(times) - 1)
        gaps = [later - earlier for earlier, later in pairwise(times)]
        counted.first_s += [gap for gap, counts in zip(gaps[:1], within[1:2], strict=True) if counts]
        counted.gaps_s += [gap for gap, counts in zip(gaps[1:], within[2:], strict=True) if counts]


async def run_bursts(http: httpx.AsyncClient, body: Json, options: argparse.Namespace, counted: Counted,
                     ends: tuple[float, float]) -> None:  # fmt: skip
    """Send bursts of long prompts until the second of `ends`; those before the first one let buffers grow."""
    rng = random.Random(1)
    while time.monotonic() < ends[1]:
        began = time.monotonic()
        prompts = [drawn_ids(rng, options.burst_tokens, options.vocabulary) for _ in range(options.burst)]
        posts = [http.post("/v1/completions", json=body | {"prompt": one, "max_tokens": 1}) for one in prompts]
        for response in await asyncio.gather(*posts):
            if response.status_code != 200:
                raise SystemExit(f"{response.status_code}: {response.text[:500]}")
        seconds = time.monotonic() - began
        counted.burst_s += [seconds] if began >= ends[0] else []
        await asyncio.sleep(max(0.0, BURST_EVERY_S - seconds))


async def counted_by(url: str, key: str, model: str, numbers: Sequence[int], options: argparse.Namespace) -> Counted:
    """Run the clients with these numbers, and the bursts beside number 0."""
    limits = httpx.Limits(max_connections=None)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=300, limits=limits) as http:
        counted, now = Counted(), time.monotonic()
        ends = now + options.warm_up, now + options.warm_up + options.seconds
        body: Json = {"model": model}
        runs = [run_client(http, body, random.Random(f"{model} {n}"), options, counted, ends) for n in numbers]
        bursts = [run_bursts(http, body, options, counted, ends)] if options.burst and 0 in numbers else []
        await asyncio.gather(*runs, *bursts)
    return counted


def count(url: str, key: str, model: str, numbers: Sequence[int], options: argparse.Namespace) -> Counted:
    """Do the same, in a process."""
    return asyncio.run(counted_by(url, key, model, numbers, options))


def measured(url: str, key: str, model: str, clients: int, options: argparse.Namespace) -> Json:
    """Return the figures of a server under so many clients."""
    found, count_here = Counted(), min(options.processes, clients)
    with ProcessPoolExecutor(count_here, mp_context=multiprocessing.get_context("spawn")) as pool:
        shares = [range(n, clients, count_here) for n in range(count_here)]
        for part in [pool.submit(count, url, key, model, share, options) for share in shares]:
            found.add(part.result())
    return found.figures(options.seconds)


def sides(options: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """Yield each server's name and the context in which it runs."""
    slots = str(max(options.clients) + options.burst)
    length = options.burst_tokens + 16 if options.burst else 0
    longest = str(max(options.prompt_tokens + options.answer_tokens, length))
    own = ("--max-requests", slots, "--max-length", longest)
    yield "rlhf serve", serving(options.model, *own)
    if options.vllm:
        words = ("--max-num-seqs", slots, "--max-model-len", longest, "--dtype", "bfloat16")
        yield "vllm", vllm_serving(options.model[0], options.vllm, *words, "--gpu-memory-utilization", "0.6")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the servers one after the other, and print their figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve_speed", description=__doc__)
    parser.add_argument("model", nargs="+", help="folders; the first one answers all requests unless --ask names one")
    parser.add_argument("--ask", help="name of the model that answers, in rlhf serve")
    parser.add_argument("--clients", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--answer-tokens", type=int, default=256)
    parser.add_argument("--burst", type=int, default=0)
    parser.add_argument("--burst-tokens", type=int, default=1900)
    parser.add_argument("--warm-up", type=float, default=5.0, help="seconds that are not counted")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--vllm", default="", help="PYTHONPATH of vLLM; empty: rlhf serve alone")
    parser.add_argument("--label", default="", help="written into each line")
    parser.add_argument("--json", type=Path, help="file to which the lines are added")
    options = parser.parse_args(argv)
    options.vocabulary = json.loads((Path(options.model[0]) / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    for side, context in sides(options):
        with context as server:
            own = side == "rlhf serve"
            url, key = (server.url, server.token) if own else server
            name = (options.ask or Path(options.model[0]).name) if own else options.model[0]
            for clients in options.clients:
                figures = measured(url, key, name, clients, options)
                settings = {"prompt": options.prompt_tokens, "answer": options.answer_tokens, "burst": options.burst}
                line = json.dumps({"server": side, "label": options.label, "clients": clients, **settings, **figures})
                print(line, flush=True)
                if options.json:
                    with options.json.open("a", encoding="utf-8") as file:
                        file.write(line + "\n")


if __name__ == "__main__":
    main()
