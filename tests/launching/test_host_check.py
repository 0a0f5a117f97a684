"""The check of all hosts before a run: what differs is named with the host and what to do. ssh is a stand-in."""

import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
from support.launch_stub import ROOT, stub_environment, write_program
from support.messages import naming

from pipeline.launching.remote_ranks import differences

# Plays ssh: runs the last word here; host b has a copy of the project.
SSH_STUB = """#!/bin/bash
line="${@: -1}"
[[ ${@: -2:1} != b ]] || line="${line/#PYTHONPATH=*PYTHONSAFEPATH/PYTHONPATH='COPY' PYTHONSAFEPATH}"
exec bash -c "$line"
"""


@pytest.fixture
def check(tmp_path):
    """The finished process of a check of hosts a and b, b of which runs `tmp_path`/copy."""
    write_program(tmp_path / "bin/ssh", SSH_STUB.replace("COPY", str(tmp_path / "copy")))
    for package in ("pipeline", "step1_sft", "step2_reward", "step3_ppo", "launch", "rlhf"):
        shutil.copytree(ROOT / package, tmp_path / "copy" / package, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    real = {"PYTHON": sys.executable, "PYTHONPATH": "", "DS_ACCELERATOR": "cpu"}  # ranks that measure
    environment = stub_environment(tmp_path, **real)
    words = [
        "--hostfile",
        "hosts",
        "--check",
        "--master-addr",
        "127.0.0.1",
        "1",
        "--data-path",
        "data.jsonl",
        "--output-dir",
        "out/sft",
    ]
    command = ["bash", str(ROOT / "launch/multi_node.sh"), *words]
    return lambda **more: subprocess.run(
        command, cwd=tmp_path, env=environment | more, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.slow
def test_a_host_with_other_code_is_named(tmp_path, check):
    with (tmp_path / "copy/pipeline/errors.py").open("a") as file:
        file.write("# changed\n")
    done = check()
    assert done.returncode == 3 and done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert naming("error: b: code of the project ... the same on both") in done.stderr.splitlines()


@pytest.mark.slow
def test_hosts_that_are_alike_pass_and_their_network_is_measured(check):
    done = check()
    assert done.returncode == 0, done.stderr
    first, second, last = done.stdout.splitlines()
    assert first.startswith("a: 0 GPUs, 1 rank, python 3.") and second.startswith("b: 0 GPUs, 1 rank, python 3.")
    assert last == naming("2 hosts ... step1_sft.main")
    line = r"^all-reduce of (.+) GiB over 2 ranks: (.+) ms, each sends (.+) GB/s$"
    size, ms, sent = map(float, re.findall(line, done.stderr, re.MULTILINE)[0])
    assert sent == pytest.approx(size * 2**30 / ms / 1e6, rel=0.02)  # of two ranks each sends all bytes once


@pytest.mark.slow
def test_ranks_that_do_not_reach_each_other_are_told_what_to_do(check):
    done = check(GLOO_SOCKET_IFNAME="none0")
    assert done.returncode == 3 and "hosts can run" not in done.stdout
    assert "error: all-reduce: " in done.stderr
    assert done.stderr.splitlines()[-1] == naming(
        "NCCL_SOCKET_IFNAME ... GLOO_SOCKET_IFNAME ... --master-addr ... ports"
    )


def said(*, torch="2.13.0", gpus=8, chosen=8, data="x"):
    return {
        "facts": {"same": {"torch": torch}, "gpus": gpus, "chosen": chosen},
        "contents": {"--data-path a.jsonl": data},
    }


@pytest.mark.parametrize(
    ("second", "line"),
    [
        (said(), None),
        (said(torch="2.12.0"), "torch ... 2.12.0 ... a has 2.13.0"),
        (said(gpus=4), "GPU 7 ... 4 ... slots ... --exclude"),
        (said(data="y"), "--data-path a.jsonl ... a has ... copy"),
        (said(data=""), "--data-path a.jsonl ... not there ... copy"),
    ],
)
def test_each_difference_is_one_line_that_says_what_to_do(second, line):
    hosts = [SimpleNamespace(name="a", greeting=said()), SimpleNamespace(name="b", greeting=second)]
    assert differences(hosts) == ([naming(f"b: {line}")] if line else [])
