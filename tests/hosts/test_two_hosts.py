"""Runs on two hosts with a shared folder: they end as on one machine, however they are disturbed."""

import time

import pytest
from cluster import Cluster, Running
from host_runs import assert_same, flags, on_one_machine, one_stage
from support.messages import naming
from support.tiny_run import read_metrics

from pipeline.run.outcome import read_outcome

pytestmark = pytest.mark.hosts


def begun(two: Cluster, output: str, *more: object) -> Running:
    """A run of a stage that has written its first checkpoint."""
    run = two.train("node-a", *one_stage(two.disk, output, *more))
    run.wait_for(two.disk / output / "runs/sft/checkpoints/step-10/manifest.json")
    return run


def nobody_left(two: Cluster) -> None:
    end = time.monotonic() + 15
    while left := [(host, pid) for host in two.hosts for pid in two.hosts[host].pids("step1_sft.main")]:
        assert time.monotonic() < end, left
        time.sleep(0.5)


def test_three_stages_are_those_of_two_ranks_on_one_machine(two):
    words = ("--max-steps", 4, "--ppo.max-prompt-seq-len", 48, "--ppo.max-answer-seq-len", 12, "--sft.zero-stage", 2)
    run = two.train("node-a", *flags(two.disk, "three", *words))
    assert run.wait() == 0, run.text
    outcomes = [read_outcome(two.disk / "three/runs/ppo", rank) for rank in (0, 1)]
    assert [outcome.host for outcome in outcomes if outcome] == [host.name for host in two.hosts.values()]
    on_one_machine(two.disk, *flags(two.disk, "three-here", *words))
    assert_same(two.disk / "three", two.disk / "three-here", "sft", "reward", "actor", "critic")


def test_a_link_that_is_cut_ends_the_run_with_the_host_named_and_it_resumes(two, undisturbed):
    two.require_namespaces("a cut link")
    run = begun(two, "cut")
    two.hosts["node-b"].cut()
    cut = time.monotonic()
    try:
        assert run.wait(90) == 1, run.text
        took = time.monotonic() - cut
        assert "error: rank 1 on node-b, step " in run.text and "node-b is lost" in run.text
        nobody_left(two)
        print(f"ended {took:.1f} s after the link was cut")
    finally:
        two.hosts["node-b"].mend()
    assert two.train("node-a", *one_stage(two.disk, "cut")).wait() == 0
    assert_same(two.disk / "cut", undisturbed, "sft")
    assert [line["loss"] for line in read_metrics(two.disk / "cut/runs/sft") if "loss" in line] == [
        line["loss"] for line in read_metrics(undisturbed / "runs/sft") if "loss" in line
    ]


def test_a_stop_reaches_the_ranks_of_both_hosts_and_the_run_resumes(two, undisturbed):
    run = begun(two, "stopped")
    two.stop("node-a")
    assert run.wait(30) == 75, run.text
    nobody_left(two)
    assert two.train("node-a", *one_stage(two.disk, "stopped")).wait() == 0
    assert_same(two.disk / "stopped", undisturbed, "sft")


@pytest.mark.parametrize("host", ["node-a", "node-b"])
def test_a_rank_that_is_killed_is_named_with_its_host(two, host):
    run = begun(two, f"killed-{host}", "--max-steps", 10_000)
    two.hosts[host].run("kill", "-KILL", two.hosts[host].pids("-m step1_sft.main")[-1])
    assert run.wait(30) == 1, run.text
    cause = f"error: rank {int(host == 'node-b')} on {two.hosts[host].name}, step "
    assert cause in run.text and "killed by SIGKILL" in run.text, run.text[-900:]
    nobody_left(two)


def test_no_rank_outlives_its_supervisor(two):
    run = begun(two, "orphans", "--max-steps", 10_000)
    two.hosts["node-a"].run("kill", "-KILL", *two.hosts["node-a"].pids("rlhf.launch")[-1:])
    run.process.wait(60)
    nobody_left(two)


def test_a_second_run_in_the_folder_is_refused(two):
    run = begun(two, "locked", "--max-steps", 10_000)
    second = two.train("node-b", *one_stage(two.disk, "locked", "--max-steps", 10_000))
    assert second.wait() == 3 and naming(f"on {two.hosts['node-a'].name} runs") in second.text.splitlines()
    two.stop("node-a")
    assert run.wait(30) == 75
    nobody_left(two)


def test_a_host_that_cannot_be_reached_is_named_before_anything_starts(two):
    two.hosts["node-b"].cut()
    try:
        run = two.train("node-a", *one_stage(two.disk, "unreachable"))
        assert run.wait(60) == 3
        login = two.hosts["node-b"].login
        assert naming(f"error: {login} ... 255 ... `ssh {login} true`") in run.text.splitlines()
        assert not (two.disk / "unreachable/runs/sft/metrics.jsonl").exists()
    finally:
        two.hosts["node-b"].mend()
