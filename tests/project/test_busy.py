"""`python -m benchmarks.busy`: the commands that it times, and how it counts processor seconds."""

import sys

import pytest

from benchmarks.busy import METHODS, commands, spinning, timed
from pipeline.configuration.flags import parse
from step3_ppo.config import PPOConfig

BUSY = "import time; end = time.process_time() + 0.5\nwhile time.process_time() < end: pass"


@pytest.mark.parametrize("method", METHODS)
def test_each_way_starts_the_same_steps(method):
    found = commands(method, 40)
    words = {way: command[command.index("step3_ppo.main") + 1 :] for way, command in found.items() if way != "train.py"}
    assert len({tuple(one) for one in words.values()}) == 1
    config = parse(PPOConfig, words["python -m"], section="ppo").config
    assert (config.ppo.method, config.run.max_steps, config.reward_path) == (method, 40, "output/reward")
    assert {"--max-steps", "40", "--method", method} <= {*found["train.py"]}


def test_processor_seconds_are_those_of_the_command_and_of_its_children():
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BUSY!r}])"
    with spinning(1):
        found = timed([sys.executable, "-c", child])
    assert 0.4 <= found["processor_s"] < 2.5 and found["wall_s"] >= 0.4
    with pytest.raises(SystemExit, match="exit code 3"):
        timed([sys.executable, "-c", "raise SystemExit(3)"])
