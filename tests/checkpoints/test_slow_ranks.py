"""A checkpoint whose files one rank writes for longer than collectives may take."""

import json

import pytest
from support.two_ranks import run_two_ranks

SAVING = """
from types import SimpleNamespace
from pipeline.checkpoints import checkpoint
from pipeline.checkpoints.fingerprint import RunFingerprint
from pipeline.engine.fragments import Fragment
from step1_sft.config import SFTConfig

write = checkpoint.write_rank_files

def slow(*arguments):
    time.sleep(3.0 * rank)
    return write(*arguments)

checkpoint.write_rank_files = slow
resolved = SimpleNamespace(config=SFTConfig(deepspeed={"dtype": "fp32"}))
run = SimpleNamespace(folder=pathlib.Path("run"), world=world, resolved=resolved)
saver = checkpoint.Saver(run, RunFingerprint({}, {}, {}, {}), keep=1, background=False)
parts = {"numbers": [Fragment("a", 2 * rank, torch.ones(2))]}
saver.save(checkpoint.Content({"step": 1}, {}, parts), step=1)
print(time.time() - heartbeat.read_beat(pathlib.Path(f"beat-{rank}.json")).time < 1.5, flush=True)
dist.finish()
os._exit(0)
"""


@pytest.mark.slow
def test_a_rank_may_write_longer_than_collectives_may_take(tmp_path):
    """Both beat meanwhile: the one that writes and the one that waits."""
    assert run_two_ranks(SAVING, tmp_path) == [["True"], ["True"]]
    manifest = json.loads((tmp_path / "run/checkpoints/step-1/manifest.json").read_text())
    assert {"numbers.rank-0.safetensors", "numbers.rank-1.safetensors"} <= set(manifest["files"])
