"""Load `rlhf serve` with clients that stream, stop, request several answers, and go: does each request get its answer?

    python -m demo.run
    python -m benchmarks.load output/sft output/actor output/reward --seconds 600 --json load.jsonl

It starts the server by its command line and prints figures as JSON. The exit code is 1 if a request was lost, an answer
was wrong, or a slot is not free at the end; each such fault is printed.
"""

import argparse
import asyncio
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.speed.jobs import environment

WORDS = "the heron waits by the river and the small boat is on its way home again with bread milk or a letter".split()
STOPS = (None, None, None, ".", ["and", " the"], "river boat")
MAX_TOKENS = (1, 4, 16, 32, 64, None)
NUM_REQUESTS = 300  # different ones; each occurs again and again, so that its answers can be compared
CLEAR_429 = re.compile(r"\d+ answers run or wait, of at most \d+")
PAUSE_S = 0.1  # after a request that is refused. Chosen by hand.
SETTLE_S = 10.0  # seconds after which a server without clients has no answers. Chosen by hand.
SLOT_TOKENS = 4  # tokens of the shortest answer in the request that shows whether all slots are free
Json = dict[str, Any]


class Fault(Exception):
    """An answer that must not be."""


class CutOff(Exception):
    """The client has gone on purpose."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server that runs: its address, its token and its process."""

    url: str
    token: str
    process: subprocess.Popen[str]

    def client(self) -> httpx.AsyncClient:
        """Return a client whose requests fail after two minutes."""
        return httpx.AsyncClient(base_url=self.url, headers={"Authorization": f"Bearer {self.token}"}, timeout=120)


@dataclass(slots=True)
class Whole:
    """The answers to one request: their texts and finish reasons by number, and their tokens together."""

    texts: dict[int, str] = field(default_factory=dict)
    finish: dict[int, str] = field(default_factory=dict)
    num_tokens: int = 0

    def add(self, content: Json) -> None:
        """Add a whole body, or a line of a stream."""
        for choice in content["choices"]:
            number, part = choice["index"], choice.get("message") or choice.get("delta") or choice
            self.texts[number] = self.texts.get(number, "") + (part.get("content") or part.get("text") or "")
            if choice["finish_reason"]:
                self.finish[number] = choice["finish_reason"]
        self.num_tokens = content.get("usage", {}).get("completion_tokens", self.num_tokens)


@dataclass(slots=True)
class Tally:
    """Counts of all clients.

    outcomes: requests by how they ended: "answered", "refused" (429), "cut off" (by the client).
    faults: descriptions of what must not be.
    num_tokens: tokens of whole answers.
    first_s: seconds from a request for a stream to the first piece of each of its answers, with the wait for a slot.
    gaps_s: seconds between two pieces of a streamed answer.
    answers: texts of each request, by its body; requests with equal bodies have equal answers up to rounding.
    num_repeated: requests that occurred before.
    num_differing: those of them with other texts than then.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    num_tokens: int = 0
    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    answers: dict[str, dict[int, str]] = field(default_factory=dict)
    num_repeated: int = 0
    num_differing: int = 0

    def compare(self, body: Json, texts: dict[int, str]) -> None:
        """Compare the texts with those of an earlier request with this body."""
        name = json.dumps({key: value for key, value in body.items() if not key.startswith("stream")})
        if (earlier := self.answers.setdefault(name, texts)) is not texts:
            self.num_repeated += 1
            self.num_differing += earlier != texts


@contextmanager
def serving(models: Sequence[str], *words: str) -> Iterator[Server]:
    """Serve models while a block runs."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "rlhf.serve", *models, "--port", "0", "--votes", f"{folder}/votes.jsonl"]
        process = subprocess.Popen(
            [*command, *words], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert process.stdout is not None
        try:
            printed = ""
            for line in process.stdout:
                printed += line
                if address := re.match(r"(http://\S+)/#token=(\S+) ", line):
                    break
            else:
                raise SystemExit(f"{' '.join(command)}: {printed}")
            yield Server(address[1], address[2], process)
        finally:
            process.terminate()
            process.wait(30)


# --- requests --------------------------------------------------------------------------------------------------------


def drawn(rng: random.Random, models: Sequence[Json]) -> tuple[str, Json]:
    """Draw a request: its path and its body."""
    model = rng.choice(models)
    text = " ".join(rng.choices(WORDS, k=rng.choice((1, 3, 8, 20))))
    turns = [{"role": "user", "content": text}]
    if model["kind"] == "reward":
        answers = ({"role": "assistant", "content": word} for word in rng.sample(WORDS, k=rng.randint(1, 12)))
        return "/v1/score", {"model": model["id"], "conversations": [[*turns, answer] for answer in answers]}
    body: Json = {"model": model["id"], "temperature": rng.choice((0, 0.7, 1)), "seed": rng.randrange(9)}
    body |= {"n": rng.choice((1, 1, 1, 2, 4)), "max_tokens": rng.choice(MAX_TOKENS), "stop": rng.choice(STOPS)}
    if stream := rng.random() < 0.5:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if rng.random() < 0.5:
        return "/v1/chat/completions", body | {"messages": turns}
    body |= {"prompt": text if rng.random() < 0.7 else [text, text[: len(text) // 2 + 1]]}
    echo = {"echo": True, "logprobs": 1, "temperature": 1} if not stream and rng.random() < 0.3 else {}
    return "/v1/completions", body | {"max_tokens": body["max_tokens"] or 16} | echo


def faults_of(body: Json, whole: Whole) -> list[str]:
    """Return what is wrong with the answers to a request."""
    count = body["n"] * (len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1)
    stops = [body["stop"]] if isinstance(body["stop"], str) else body["stop"] or []
    has_stop = "echo" not in body and any(stop in text for stop in stops for text in whole.texts.values())
    checks = {
        f"{len(whole.texts)} answers, expected {count}": len(whole.texts) == count,
        f"finish reasons {whole.finish}": len(whole.finish) == count and {*whole.finish.values()} <= {"stop", "length"},
        f"{whole.num_tokens} tokens": count <= whole.num_tokens <= count * (body["max_tokens"] or whole.num_tokens),
        "a stop text is in an answer": not has_stop,
    }
    return [fault for fault, is_right in checks.items() if not is_right]


async def read_stream(response: httpx.Response, tally: Tally, *, began: float, num_pieces: float) -> Whole:
    """Read a stream. Raises CutOff after `num_pieces`, and Fault for an error in it or a missing end."""
    whole, last, content = Whole(), dict[int, float](), ""
    async for line in response.aiter_lines():
        if not line:
            continue
        content, num_pieces = line.removeprefix("data: "), num_pieces - 1
        if num_pieces < 0:
            raise CutOff
        if content == "[DONE]":
            continue
        if "error" in (event := json.loads(content)):
            raise Fault(f"an error in a stream: {event['error']['message']}")
        whole.add(event)
        now = time.perf_counter()
        for number in [one["index"] for one in event["choices"] if whole.texts[one["index"]]]:
            (tally.gaps_s if number in last else tally.first_s).append(now - last.get(number, began))
            last[number] = now
    if content != "[DONE]":
        raise Fault("a stream without its end")
    return whole


async def ask(client: httpx.AsyncClient, tally: Tally, path: str, body: Json, *, num_pieces: float) -> None:
    """Send a request and check its answer. Raises CutOff or Fault."""
    began = time.perf_counter()
    async with client.stream("POST", path, json=body) as response:
        if response.status_code == 200 and body.get("stream"):
            whole = await read_stream(response, tally, began=began, num_pieces=num_pieces)
        else:
            content = json.loads(await response.aread())
            if response.status_code == 429 and CLEAR_429.search(content["error"]["message"]):
                tally.outcomes["refused"] += 1
                await asyncio.sleep(PAUSE_S)
                return
            if response.status_code != 200:
                raise Fault(f"status {response.status_code}: {content}")
            whole = Whole()
            if path == "/v1/score":
                whole.texts = {one["index"]: f"{one['score']:.3f}" for one in content["data"]}
            else:
                whole.add(content)
    if path != "/v1/score" and (found := faults_of(body, whole)):
        raise Fault("; ".join(found))
    tally.outcomes["answered"] += 1
    tally.num_tokens += whole.num_tokens
    tally.compare(body, whole.texts)


async def send_half(server: Server, body: Json) -> None:
    """Send the head of a request and half of its body, and close the connection."""
    host, port = server.url.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nAuthorization: Bearer {server.token}\r\n"
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content[: len(content) // 2])
    await writer.drain()
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


async def run_client(server: Server, tally: Tally, models: Sequence[Json], rng: random.Random, end: float) -> None:
    """Send requests one after the other until `end`; a fifth of them is cut off on purpose."""
    async with server.client() as client:
        while time.monotonic() < end:
            path, body = drawn(random.Random(rng.randrange(NUM_REQUESTS)), models)
            way = rng.choice(("stream", "whole", "half")) if rng.random() < 0.2 else ""
            pieces = rng.randrange(12) if way == "stream" else float("inf")
            try:
                if way == "half":
                    await send_half(server, body)
                    raise CutOff
                async with asyncio.timeout(rng.random() * 0.3 if way == "whole" else None):
                    await ask(client, tally, path, body, num_pieces=pieces)
            except (CutOff, TimeoutError):
                tally.outcomes["cut off"] += 1
            except (Fault, httpx.HTTPError, ValueError, KeyError) as error:
                tally.faults.append(f"{path} {json.dumps(body)}: {type(error).__name__}: {error}")


# --- the server ------------------------------------------------------------------------------------------------------


async def read_metrics(client: httpx.AsyncClient) -> dict[str, float]:
    """Return the server's counts by their names with labels."""
    lines = (await client.get("/metrics")).text.splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


async def watch(process: psutil.Process, seconds: float) -> list[tuple[float, int]]:
    """Return MiB of the server's memory and its open files, each second until shortly before the clients end."""
    found = list[tuple[float, int]]()
    for _ in range(int(0.95 * seconds)):
        await asyncio.sleep(1)
        found.append((process.memory_info().rss / 2**20, process.num_fds()))
    return found


async def slots_at_once(client: httpx.AsyncClient, model: str, count: int) -> int | None:
    """Return how many of `count` answers run before the first one ends; None if each try had short answers."""
    for seed in range(50):
        begun, first = set[int](), None
        body = {"model": model, "prompt": "the", "n": count, "seed": seed, "max_tokens": 64, "stream": True}
        lengths = Counter[int]()
        async with client.stream("POST", "/v1/completions", json=body | {"logprobs": 0}) as response:
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                lengths[choice["index"]] += len((choice["logprobs"] or {}).get("tokens", ()))
                begun.add(choice["index"])
                first = len(begun) if first is None and choice["finish_reason"] else first
        if not lengths:  # the request was refused
            return 0
        if min(lengths.values()) >= SLOT_TOKENS:
            return first
    return None


async def load(server: Server, *, seconds: float, clients: int, seed: int, slots: int) -> Json:
    """Load a server whose models have `slots` slots each; return the figures, with all faults."""
    tally, process = Tally(), psutil.Process(server.process.pid)
    async with server.client() as client:
        models = (await client.get("/v1/models")).json()["data"]
        end = time.monotonic() + seconds
        runs = [run_client(server, tally, models, random.Random(f"{seed} {n}"), end) for n in range(clients)]
        watched, *_ = await asyncio.gather(watch(process, seconds), *runs)
        late_s = time.monotonic() - end
        until = time.monotonic() + SETTLE_S
        while (metrics := await read_metrics(client))["rlhf_answers"] and time.monotonic() < until:
            await asyncio.sleep(0.1)
        languages = [one["id"] for one in models if one["kind"] == "language"]
        free = {name: await slots_at_once(client, name, slots) for name in languages}
    if metrics["rlhf_answers"]:
        tally.faults.append(f"{metrics['rlhf_answers']:g} answers run without a client")
    tally.faults += [f"{name}: {count} of {slots} slots are free" for name, count in free.items() if count != slots]
    settled = watched[len(watched) // 5 :]
    return {
        "seconds": seconds, "clients": clients, **tally.outcomes, "faults": tally.faults,
        "last_answer_s": round(late_s, 1), "tokens_per_s": round(tally.num_tokens / seconds, 1),
        "first_piece_s": percentiles(tally.first_s), "gap_s": percentiles(tally.gaps_s),
        "repeated": tally.num_repeated, "differing": tally.num_differing,
        "rss_mib": [round(settled[0][0], 1), round(settled[-1][0], 1)], "files": [settled[0][1], settled[-1][1]],
        "statuses": {name: count for name, count in metrics.items() if name.startswith("rlhf_responses")},
    }  # fmt: skip


def percentiles(values: Sequence[float]) -> list[float]:
    """Return the median, the 99th percentile and the largest value."""
    return [round(one, 4) for one in (statistics.median(values), statistics.quantiles(values, n=100)[98], max(values))]


def main() -> int:
    """Serve the models, load the server, and print the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load", description=__doc__)
    parser.add_argument("model", nargs="+", help="folders of language and reward models")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--slots", type=int, default=8, help="--max-requests of the server, at most 16")
    parser.add_argument("--waiting", type=int, default=32, help="--max-waiting of the server")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file to which the figures are added")
    config = parser.parse_args()
    words = ("--max-requests", str(config.slots), "--max-waiting", str(config.waiting))
    with serving(config.model, *words) as server:
        found = asyncio.run(
            load(server, seconds=config.seconds, clients=config.clients, seed=config.seed, slots=config.slots)
        )
    print(json.dumps(found, indent=1))
    if config.json:
        with config.json.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")
    return int(bool(found["faults"]))


if __name__ == "__main__":
    sys.exit(main())
