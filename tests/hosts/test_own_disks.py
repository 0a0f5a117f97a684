"""Three hosts without a shared folder: each keeps every checkpoint and model, and any of them can lose its disk."""

import shutil
from pathlib import Path

import pytest
from cluster import Cluster, Running
from host_runs import assert_same, flags, one_stage
from support.messages import naming

pytestmark = pytest.mark.hosts

ON_ONE = ("--hostfile", "one-host")


@pytest.fixture(scope="module")
def disks(three: Cluster) -> list[Path]:
    """The hosts' disks, as this machine sees them."""
    folders = [three.disk.parent / name for name in three.hosts]
    (folders[0] / "one-host").write_text("node-a slots=3\n")
    return folders


def begun(three: Cluster, output: str, folder: Path) -> Running:
    run = three.train("node-a", *one_stage(three.disk, output))
    run.wait_for(folder / output / "runs/sft/checkpoints/step-10/manifest.json")
    return run


def test_three_stages_leave_their_models_on_every_disk(three, disks):
    words = ("--max-steps", 4, "--ppo.max-prompt-seq-len", 48, "--ppo.max-answer-seq-len", 12, "--sft.zero-stage", 3)
    run = three.train("node-a", *flags(three.disk, "three", *words))
    assert run.wait() == 0, run.text
    assert "the hosts share no storage here" in run.text
    alone = three.train("node-a", *flags(three.disk, "alone", *words), *ON_ONE)
    assert alone.wait() == 0, alone.text
    for disk in disks:
        assert_same(disk / "three", disks[0] / "alone", "sft", "reward", "actor", "critic")
        for section in ("sft", "reward", "ppo"):
            files = {path.name for path in (disk / f"three/runs/{section}/checkpoints/step-4").iterdir()}
            assert {"manifest.json", "state.json"} < files


def test_a_run_resumes_exactly_after_a_link_was_cut_and_a_disk_was_lost(three, disks):
    alone = three.train("node-a", *one_stage(three.disk, "alone-sft"), *ON_ONE)
    assert alone.wait() == 0, alone.text
    run = begun(three, "cut", disks[0])
    three.hosts["node-c"].cut()
    try:
        assert run.wait(90) == 1 and "node-c is lost" in run.text, run.text
    finally:
        three.hosts["node-c"].mend()
    shutil.rmtree(disks[0] / "cut")
    again = three.train("node-a", *one_stage(three.disk, "cut"))
    assert again.wait() == 0 and "resuming from" in again.text, again.text
    for disk in disks:
        assert_same(disk / "cut", disks[0] / "alone-sft", "sft")


def test_a_stop_and_a_killed_rank_are_seen_across_disks(three, disks):
    run = begun(three, "stopped", disks[0])
    three.stop("node-a")
    assert run.wait(40) == 75, run.text
    run = three.train("node-a", *one_stage(three.disk, "killed", "--max-steps", 10_000))
    run.wait_for(disks[0] / "killed/runs/sft/checkpoints/step-10/manifest.json")
    three.hosts["node-b"].run("kill", "-KILL", three.hosts["node-b"].pids("-m step1_sft.main")[-1])
    assert run.wait(40) == 1
    assert "error: rank 1 on node-b, step " in run.text and "killed by SIGKILL" in run.text, run.text[-900:]


def test_the_check_names_the_hosts_whose_data_differ(three, disks):
    with (disks[1] / "data/train.jsonl").open("a") as file:
        file.write("\n")
    (disks[2] / "data/test.jsonl").unlink()
    run = three.train("node-a", *one_stage(three.disk, "checked", "--check"))
    assert run.wait() == 3
    data = three.disk / "data"
    assert naming(f"error: node-b: --data-path {data}/train.jsonl ... node-a") in run.text.splitlines(), run.text
    assert naming(f"error: node-c: --eval-data-path {data}/test.jsonl ... not there") in run.text.splitlines()
