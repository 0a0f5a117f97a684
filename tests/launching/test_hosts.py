"""Host files and choices of hosts: what is wrong is named with file, line, what was found and what is right."""

import subprocess

import pytest
from support.launch_stub import ROOT, TINY, notes, started, stub_environment, train, write_program
from support.marks import slow_but
from support.messages import naming

from pipeline.errors import InputError
from pipeline.launching.hosts import chosen_gpus, chosen_hosts, read_hostfile
from pipeline.launching.request import parse_request

NAMELESS = "`name slots=GPUS` ... a letter or digit"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a slots=8\nb slot=8\n", ":2: ... 'b slot=8' ... `b slots=8`"),
        ("a slots=8\nb slots 4\n", ":2: ... 'b slots 4' ... `b slots=4`"),
        ("a slots=8\n\n# c\na slots=1\n", ":4: ... a again ... `a slots=9`"),
        ("a slots=0\n", ":1: ... 'a slots=0' ... `a slots=GPUS`"),
        ("# nothing\n\n", ": ... no host ... `name slots=GPUS`"),
        ("slots=8\n", f":1: ... 'slots=8' ... {NAMELESS}"),
        ("a\n", ":1: got 'a', expected `a slots=GPUS`"),
        ("a slots=\n", ":1: ... 'a slots=' ... `a slots=GPUS`"),
        ("a slots=-1\n", ":1: ... 'a slots=-1' ... `a slots=GPUS`"),
        ("a slots=two\n", ":1: ... 'a slots=two' ... `a slots=GPUS`"),
        ("a slots=8 b slots=8\n", ":1: ... 'a slots=8 b slots=8' ... one host ... `a slots=8`"),
        ("a slots=2.5\n", ":1: ... 'a slots=2.5' ... `a slots=GPUS`"),
        ("a slots=\u0663\n", ":1: ... 'a slots=\u0663' ... `a slots=GPUS`"),
        ("a slots=999999999\n", ":1: ... 'a slots=999999999' ... `a slots=GPUS`"),
        ("a slots=2 max_slots=4\n", ":1: ... 'a slots=2 max_slots=4' ... `a slots=2` ... max_slots"),
        (
            "2001:db8::1 slots=8\n",
            ":1: ... '2001:db8::1 slots=8' ... IPv4 ... IPv6",
        ),
        ("a:8\n", ":1: got 'a:8', expected `a slots=8`"),
        ("b slots=1\nnode-1.x,slots=8\n", ":2: ... 'node-1.x,slots=8' ... `node-1.x slots=8`"),
        ("\x00 slots=8", f":1: ... '\\x00 slots=8' ... {NAMELESS}"),
        ("-oProxyCommand=x slots=8\n", f":1: ... '-oProxyCommand=x slots=8' ... {NAMELESS}"),
        ("$(touch-X) slots=8\n", f":1: ... '$(touch-X) slots=8' ... {NAMELESS}"),
        (None, ": ... No such file ... `name slots=GPUS`"),
        (b"\xff\xfe", ": ... not text ... `name slots=GPUS`"),
    ],
)
def test_wrong_hostfile(tmp_path, text, message):
    file = tmp_path / "hosts"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError) as error:
        read_hostfile(file)
    assert str(error.value) == naming(f"--hostfile: {file}{message}")


def test_a_hostfile_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "hosts").write_bytes(b"\xef\xbb\xbfworker-0 slots=8\r\nworker-1 slots=4\r\n")
    assert read_hostfile(tmp_path / "hosts") == {"worker-0": 8, "worker-1": 4}


def test_example_hostfile():
    assert read_hostfile(ROOT / "launch" / "hostfile.example") == {"worker-0": 8, "worker-1": 8}


@pytest.mark.parametrize(
    ("choice", "count"),
    [
        ({"included": "a:0,2@b"}, 4),
        ({"included": "b@a"}, 5),
        ({"excluded": "a:1"}, 4),
        ({"excluded": "b"}, 3),
        ({"included": "a:1,1"}, 1),
        ({"num_nodes": 1, "num_gpus": 2}, 2),
        ({}, 5),
    ],
)
def test_hosts_are_chosen_as_deepspeeds_launcher_does(choice, count):
    from deepspeed.launcher.runner import apply_num_nodes_and_gpus, parse_inclusion_exclusion

    hosts = {"a": 3, "b": 2}
    theirs = parse_inclusion_exclusion(hosts, choice.get("included", ""), choice.get("excluded", ""))
    theirs = apply_num_nodes_and_gpus(theirs, choice.get("num_nodes", -1), choice.get("num_gpus", -1))
    ours = chosen_gpus(hosts, **choice)
    assert list(ours.items()) == list(theirs.items()) and sum(map(len, ours.values())) == count


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--include worker-0@worker-2:0",
            "worker-2 ... worker-1? ... worker-0, worker-1",
        ),
        ("-e worker-1:7,8", "--exclude ... worker-1:8 ... worker-1 has 0 to 7"),
        ("--include worker-1:x", "--include ... worker-1:x ... 'x' ... worker-1:0,1"),
        ("--exclude worker-0@worker-1", "--exclude: worker-0@worker-1: leaves no GPU"),
        ("--num-gpus 9", "--num-gpus ... 9 ... worker-0 has slots=8 ... 8"),
        ("--num-nodes 3", "--num-nodes ... 3 ... 2 hosts ... worker-0, worker-1"),
        ("--num-nodes x", "--num-nodes ... 'x' ... from 1 on"),
        ("--num-gpus 1 -i worker-0", "--include, --exclude"),
    ],
)
def test_wrong_choices_of_hosts(words, message):
    with pytest.raises(InputError) as error:
        file = str(ROOT / "launch" / "hostfile.example")
        chosen_hosts(parse_request("multi_node", ["--hostfile", file, *words.split()]))
    assert str(error.value) == naming(message) and "\n" not in str(error.value)


def test_the_launch_script_refuses_wrong_hosts_before_anything_starts(tmp_path):
    (tmp_path / "hosts").write_text("a slots=8\na slots=1\n")
    done = subprocess.run(
        ["bash", str(ROOT / "launch/multi_node.sh"), "--hostfile", "hosts", "1"],
        env=stub_environment(tmp_path), cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and not (tmp_path / "log.jsonl").exists()
    assert done.stderr == naming("error: --hostfile: hosts:2 ... a again") and done.stderr.count("\n") == 1


def test_the_dry_run_names_unknown_hosts_of_a_host_file(tmp_path):
    (tmp_path / "hosts").write_text("worker-0 slots=8\nworker-1 slots=8\n")
    words = (*TINY, "--deployment-type", "multi_node", "--hostfile", "hosts", "--explain", "--include")
    good = train(tmp_path, *words, "worker-0:0,1@worker-1")
    assert good.returncode == 0 and '"train_micro_batch_size_per_gpu": 32' in good.stdout, good.stderr
    bad = train(tmp_path, *words, "worker-0@worker-2:0")
    assert bad.returncode == 2
    assert bad.stderr == naming("error: --include ... worker-2 ... worker-1? ... worker-0, worker-1")


@pytest.mark.parametrize("file", slow_but([""], ["", "nowhere"]))
def test_hosts_that_are_described_need_no_host_file(tmp_path, file):
    words = (*TINY, "--step", "1", "--deployment-type", "multi_node", "--target", "2x8xA100-40GB", "--explain")
    done = train(tmp_path, *words, *(("--hostfile", file) if file else ("--include", "worker-0")))
    assert done.returncode == 0, done.stderr
    command = " ".join(done.stdout.replace("\\\n", "").split())
    assert f"/multi_node.sh --hostfile {file or 'HOSTFILE'} --num-gpus 8 1 --preset " in command
    note = naming("HOSTFILE ... 2 lines `name slots=8`")
    dropped = naming("--include worker-0 ... --target 2x8xA100-40GB")
    assert [done.stdout == one for one in (note, dropped)] == [not file] * 2
    assert ["gradient_accumulation_steps", "1"] in [line.split()[:2] for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_the_check_of_hosts_is_of_every_stage_and_starts_none(tmp_path):
    write_program(
        tmp_path / "bin/ssh",
        f'#!/bin/sh\nfor word; do host="$last"; last="$word"; done\necho "$host" >>{tmp_path}/asked\nexit 255\n',
    )
    (tmp_path / "hosts").write_text("a slots=2\n")
    done = train(tmp_path, *TINY, "--deployment-type", "multi_node", "--hostfile", "hosts", "--check")
    assert done.returncode == 3 and (tmp_path / "asked").read_text() == "a\n" * 3, done.stderr


def test_the_check_of_one_machine_measures_its_device_once_and_starts_no_stage(tmp_path):
    done = train(tmp_path, *TINY, "--check")
    assert done.returncode == 0, done.stderr
    assert started(tmp_path) == [["pipeline.run.measure_device"]]


@pytest.mark.slow
def test_without_ssh_each_host_is_started_by_itself(tmp_path):
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2\n")
    words = (*TINY, "--step", "1", "--deployment-type", "multi_node", "--hostfile", "hosts", "--launcher", "none")
    words += ("--master-addr", "localhost")
    assert train(tmp_path, *words, "--node-rank", "1", STUB_OUTCOMES="0").returncode == 0
    ranks = [{name: note["environment"][name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")}
             for note in notes(tmp_path)]  # fmt: skip
    common = {"WORLD_SIZE": "4", "MASTER_PORT": "29500"}
    assert sorted(ranks, key=str) == [{"RANK": str(2 + place), "LOCAL_RANK": str(place), **common} for place in (0, 1)]
    wrong = train(tmp_path, *words, "--node-rank", "2").stderr
    assert wrong == naming("error: --node-rank ... 2 ... 0 to 1 ... hosts")
