"""Two hosts that are started by hand, of which one comes late or never: the other says so, and stops when asked to."""

import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rank_run import ROOT, START_S, RankRun, launch
from support.messages import naming
from support.ports import free_port
from support.tiny_run import make_folder

HOSTS = ("127.0.0.1", "127.0.0.2")
WAITS_FOR = ("1 of 2 ranks", "rank 0")
Host = Callable[..., RankRun]


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    """Starts `train.py --launcher none` as one of HOSTS, in a folder of its own, and leaves none."""
    hosts: list[RankRun] = []
    data, port = make_folder(tmp_path), free_port()
    (tmp_path / "hosts").write_text("".join(f"{name} slots=1\n" for name in HOSTS))

    def begin(number: int, *, waits: bool = True) -> RankRun:
        words = ["--launcher", "none", "--node-rank", number, "--master-addr", HOSTS[0], "--master-port", port]
        words += ["--deployment-type", "multi_node", "--hostfile", tmp_path / "hosts", "--step", 1, "--max-steps", 2]
        words += ["--actor-model", data / "base", "--output-dir", "out", "--data-path", data / "train.jsonl"]
        words += [
            "--data-split",
            "none",
            "--data-output-path",
            data / "cache",
            "--dtype",
            "fp32",
            "--sft.max-seq-len",
            96,
        ]
        command = [sys.executable, str(ROOT / "train.py"), *map(str, words), "--enable-tensorboard", "false"]
        own = tmp_path / HOSTS[number]
        own.mkdir()
        hosts.append(launch(own, command, own / "out/runs/sft"))
        if waits:
            line = f"waiting for {WAITS_FOR[number]} at 127.0.0.1:{port} ("
            hosts[-1].wait(lambda: line in hosts[-1].stderr)
        return hosts[-1]

    yield begin
    for each in hosts:
        each.clean_up()


@pytest.mark.faults
@pytest.mark.parametrize(("number", "word"), [(0, signal.SIGTERM), (1, signal.SIGINT)])
def test_a_host_that_waits_says_so_and_stops_at_once(host: Host, number: int, word: int) -> None:
    job = host(number)
    assert f"waiting for {WAITS_FOR[number]} at " in (job.run_dir / "log" / f"rank-{number}.txt").read_text()
    since = time.monotonic()
    job.process.send_signal(word)
    ended = job.ended(since)
    assert ended.code == 75 and ended.took_s < 15.0 and job.left() == [], ended.stderr
    assert naming("stopped before the first step ... nothing to save") in ended.stderr.splitlines()


@pytest.mark.faults
def test_a_host_that_comes_late_is_waited_for(host: Host) -> None:
    jobs = [host(0), host(1, waits=False)]
    assert [job.ended(time.monotonic(), START_S).code for job in jobs] == [0, 0], "".join(job.stderr for job in jobs)
