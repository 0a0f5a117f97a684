"""The words of a launch script as one object, and what is refused in one line."""

import re
from pathlib import Path

import pytest
from support.messages import naming

from pipeline.errors import InputError
from pipeline.launching.request import LaunchRequest, parse_request

HARD_WORDS = ("--a", "two\nlines", 'say "yes"', "$HOME `id` \\", "", "*", "--data-output-path=x y", "--", "-ex", "-1")


def test_the_flags_of_deepspeeds_launcher_are_read_as_one_object():
    words = "--hostfile h -e a:1 --num-nodes 2 --num-gpus=3 --master-addr x --master-port 0 --ssh-port 22"
    words += " --venv-script v --enable-each-rank-log l"
    idle = "--module --no-python --no_local_rank --no-ssh-check --force-multi -q --log-level info --check"
    assert parse_request("multi_node", [*words.split(), *idle.split(), "sft", *HARD_WORDS]) == LaunchRequest(
        deployment="multi_node", hostfile="h", exclude="a:1", num_nodes=2, num_gpus=3, master_addr="x", ssh_port=22,
        venv_script="v", enable_each_rank_log="l", check=True, step="sft", argv=HARD_WORDS,
    )  # fmt: skip


def test_the_way_to_other_hosts():
    ways = (("--launcher=SRUN", "srun"), ("--launcher ssh", "ssh"), ("--no-ssh --node-rank 1", "none"), ("", "ssh"))
    for words, launcher in ways:
        request = parse_request("multi_node", [*words.split(), "1"])
        assert request.launcher == launcher and request.has_agents == (launcher != "none")
        assert request.is_first_host == (launcher != "none") and not request.is_on_one_machine


def test_the_last_of_a_repeated_flag_counts_and_a_note_says_so(capsys):
    words = "--num-gpus 2 --launcher srun --include a:1 --num-accelerators=3 --no-ssh -i b:2 --check --check 1 --seed 1"
    request = parse_request("multi_node", words.split())
    assert (request.num_gpus, request.launcher, request.include, request.check) == (3, "none", "b:2", True)
    assert capsys.readouterr().err.splitlines() == [
        naming(f"note: {flag} ... more than once ... {value}")
        for flag, value in (("--num-gpus", 2), ("--launcher", "srun"), ("--include", "a:1"))
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--num-gpus", "--num-gpus: got no value"),
        ("--num-gpus 0 1", "--num-gpus ... '0' ... from 1 on"),
        ("--num-nodes x 1", "--num-nodes ... 'x' ... from 1 on"),
        ("--ssh-port x 1", "--ssh-port ... 'x' ... 0 to 65535"),
        ("--node-rank x 1", "--node-rank ... 'x' ... from 0 on"),
        ("--launcher pdhs 1", "--launcher ... 'pdhs' ... ssh, srun or none"),
        ("--master-port abc 1", "--master-port ... 'abc' ... 0 to 65535"),
        ("--master-port 65536 1", "--master-port ... '65536' ... 0 to 65535"),
        ("1 --seed 1 --num-gpus 2", "--num-gpus ... after STAGE ... before it"),
        ("1 --include=a:0", "--include=a:0: got after STAGE"),
        ("--zero-stage 2 1", "--zero-stage ... the launcher ... STAGE"),
        ("--num-gpu 2 1", "--num-gpu ... the launcher"),
        ("--log-level loud 1", "--log-level ... 'loud' ... debug, info, warning, error or critical"),
        ("--save_pid 1", "--save-pid ... 391375f4 ... deepspeed --save_pid --module"),
        ("--bind-core-list=0-3 1", "--bind-core-list ... 391375f4 ... deepspeed"),
        ("--bind-cores-to-rank 1", "--bind-cores-to-rank ... 391375f4 ... deepspeed"),
        ("--autotuning run 1", "--autotuning ... 391375f4 ... --auto measure ... PYTHONPATH=$PWD deepspeed"),
        ("1 --autotuning run", "--autotuning ... 391375f4 ... --auto measure"),
        ("1 --seed 1 --save_pid", "--save-pid ... 391375f4 ... deepspeed --save_pid --module"),
        ("--launcher-args -x 1", "--launcher-args: got no value"),
        (
            "--launcher-args x 1",
            "--launcher-args ... deepspeed --launcher LAUNCHER --launcher_args ARGS --module",
        ),
    ],
)
def test_wrong_words_are_named(words, message):
    with pytest.raises(InputError) as error:
        parse_request("single_node", words.split())
    assert str(error.value) == naming(message)


@pytest.mark.parametrize("launcher", ["pdsh", "openmpi", "mpich", "impi", "mvapich", "slurm"])
def test_deepspeeds_other_launchers_are_started_by_hand(launcher):
    with pytest.raises(InputError) as error:
        parse_request("multi_node", ["--launcher", launcher, "1"])
    way = f"deepspeed --launcher {launcher} --module step1_sft.main FLAGS"
    assert str(error.value) == naming(f"--launcher ... {launcher} ... {way}")


def test_every_flag_of_the_installed_launcher_is_known():
    from deepspeed.launcher import runner

    source = Path(runner.__file__).read_text()
    parser = source[source.index("def parse_args") : source.index("def fetch_hostfile")]
    for block in parser.split("add_argument(")[1:]:
        for name in re.findall(r'"(-[-\w]+)"', block):
            words = [name] if "store_true" in block else [name, "1"]
            try:
                parse_request("multi_node", [*words, "1"])
            except InputError as error:  # the value is wrong, or it is done by hand
                assert "not a flag" not in str(error) and "no value" not in str(error)
