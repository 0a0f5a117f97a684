"""Every way to start the ranks of two hosts gives the run of two ranks on one machine; a check starts none."""

import sys

import pytest
from cluster import ROOT
from host_runs import STEPS, assert_same, flags, one_stage
from support.launch_stub import write_program
from support.messages import naming

pytestmark = pytest.mark.hosts

# Plays srun: a step on one node is a command over ssh, with Slurm's variables.
SRUN_STUB = """#!/bin/bash
while [[ $1 == -* ]]; do [[ $1 != --nodelist=* ]] || node="${1#*=}"; shift; done
[[ $node == FIRST ]] && number=0 || number=1
variables=(PYTHONPATH="$PYTHONPATH" SLURM_NODEID="$number" SLURM_NTASKS=1 SLURM_PROCID=0)
exec ssh "$node" "$(printf '%q ' env "${variables[@]}" "$@")"
"""
SCONTROL_STUB = "#!/bin/bash\nprintf '%s\\n' FIRST SECOND\n"


def test_each_host_by_hand(two, undisturbed):
    words = one_stage(two.disk, "none", "--launcher", "none")
    runs = [two.train(host, *words, "--node-rank", rank) for rank, host in enumerate(two.hosts)]
    assert [run.wait() for run in runs] == [0, 0], "\n".join(run.text for run in runs)
    assert_same(two.disk / "none", undisturbed, "sft")


def test_torchrun_on_each_host(two, undisturbed):
    data = two.disk / "data"
    torchrun = ["torch.distributed.run", "--nnodes", 2, "--nproc_per_node", 1, "--rdzv_backend", "c10d"]
    torchrun += ["--rdzv_endpoint", f"{two.hosts['node-a'].address}:29511", "-m", "step1_sft.main"]
    torchrun += ["--model-name-or-path", data / "base"]
    words = flags(two.disk, "torchrun/sft", "--max-steps", STEPS, "--save-steps", 10, "--num-train-epochs", 1000)
    place = words.index("--output-dir")
    words = [*words[place : words.index("--sft.max-seq-len")], "--max-seq-len", "96", "--enable-tensorboard", "false",
             *words[words.index("--max-steps") :]]  # fmt: skip
    runs = [two.start(host, sys.executable, "-m", *torchrun, *words, PYTHONPATH=str(ROOT)) for host in two.hosts]
    assert [run.wait() for run in runs] == [0, 0], "\n".join(run.text for run in runs)
    assert_same(two.disk / "torchrun", undisturbed, "sft")


def test_slurm(two, undisturbed):
    logins = [host.login for host in two.hosts.values()]
    for name, text in (("srun", SRUN_STUB), ("scontrol", SCONTROL_STUB)):
        write_program(two.disk / "bin" / name, text.replace("FIRST", logins[0]).replace("SECOND", logins[1]))
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_GPUS_ON_NODE": "1", "SLURM_NTASKS": "2"}
    python = {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "PATH": f"{two.disk}/bin:/usr/bin:/bin"}
    words = one_stage(two.disk, "slurm")
    run = two.start("node-a", "bash", ROOT / "launch/slurm.sbatch", *words, **slurm, **python)
    assert run.wait() == 0, run.text
    assert_same(two.disk / "slurm", undisturbed, "sft")


def test_the_check_starts_nothing(two):
    run = two.train("node-a", *one_stage(two.disk, "checked", "--check"))
    assert run.wait() == 0 and naming("2 hosts ... step1_sft.main ... nothing was started") in run.text.splitlines(), (
        run.text
    )
    assert f"{two.hosts['node-b'].login}: 0 GPUs, 1 rank, python 3." in run.text
    assert "sft: shared with the first host" in run.text
    assert not (two.disk / "checked/sft").exists()
