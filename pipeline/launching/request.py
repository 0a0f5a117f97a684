"""The request to a launch script: one parser reads the flags of DeepSpeed's launcher into one object.

The module imports no torch.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.configuration.names import normalise
from pipeline.errors import InputError, dashed, say
from pipeline.redact import repeated

# Backends of DeepSpeed's launcher that start its own processes on other hosts.
BY_HAND = ("pdsh", "openmpi", "mpich", "impi", "mvapich", "slurm")
# Flags that users write after STAGE by mistake.
BEFORE_STAGE = (
    "--num-gpus", "--num-accelerators", "--num-nodes", "--include", "--exclude", "--hostfile", "--master-port",
    "--master-addr", "--node-rank", "--launcher", "--no-ssh",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """The request to a launch script: hosts, devices, and the arguments of the stage.

    deployment: single_gpu, single_node or multi_node.
    launcher: program that reaches other hosts; none: the user runs this command on each host, which starts its ranks.
    hostfile: path of the host file; empty: DeepSpeed's default path.
    include: hosts and GPUs to use, `name:0,1@name`.
    exclude: hosts and GPUs to leave out.
    num_nodes: number of hosts from the first on; 0: all.
    num_gpus: number of GPUs, or of processes on a CPU, of each host; 0: all.
    node_rank: index of this host in the host file, for launcher none.
    master_addr: address of the first host; empty: looked up.
    master_port: port of rank 0; 0: one that is free.
    ssh_port: port of ssh on other hosts; 0: as ssh is configured.
    venv_script: shell script that activates the Python environment on other hosts.
    enable_each_rank_log: folder for a file of what each rank prints; empty: the console.
    check: check the hosts or measure the device, and start no stage.
    step: the number or the section of the stage; empty if none was given.
    argv: the flags of the stage.
    """

    deployment: str
    launcher: str = "ssh"
    hostfile: str = ""
    include: str = ""
    exclude: str = ""
    num_nodes: int = 0
    num_gpus: int = 0
    node_rank: int = 0
    master_addr: str = ""
    master_port: int = 0
    ssh_port: int = 0
    venv_script: str = ""
    enable_each_rank_log: str = ""
    check: bool = False
    step: str = ""
    argv: tuple[str, ...] = ()

    @property
    def is_on_one_machine(self) -> bool:
        return self.deployment != "multi_node"

    @property
    def is_first_host(self) -> bool:
        """True unless another host is the first of several that are started by hand."""
        return self.launcher != "none" or self.node_rank == 0

    @property
    def has_agents(self) -> bool:
        """True if the ranks are started by an agent on each host."""
        return not self.is_on_one_machine and self.launcher != "none"


def parse_request(deployment: str, argv: Sequence[str]) -> LaunchRequest:
    """Read the arguments of a launch script; print a note on a flag that is given twice.

    Raises:
        InputError: an argument is wrong; names the flag, what it got and what it expects.
    """
    try:
        values, unknown = launcher_parser().parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        name, reason = (error.argument_name or "").partition("/")[0], error.message
        raise InputError(f"{name}: {'got no value' if reason == 'expected one argument' else reason}") from None
    if unknown:
        refuse_gone(unknown[0])
        raise InputError(f"{unknown[0]}: not a flag of the launcher; those of the stage follow STAGE")
    given = vars(values)
    step, *rest = given.pop("argv", None) or [""]
    for word in rest:
        refuse_gone(word)
        if dashed(word.partition("=")[0][2:]) in BEFORE_STAGE:
            raise InputError(f"{word}: got after STAGE, expected before it with the other flags of the launcher")
    fields = {name: value for name, value in given.items() if name in LaunchRequest.__dataclass_fields__}
    return LaunchRequest(deployment=deployment, step=step, argv=tuple(rest), **fields)


def refuse_gone(word: str) -> None:
    """Raise InputError for a flag of an earlier version, `--name` or `--name=value`, with what to use instead."""
    if (name := dashed(word.partition("=")[0].lstrip("-"))) in GONE and word.startswith("-"):
        raise InputError(f"{name}: removed after version 391375f4; {GONE[name]}")


class LastCounts(argparse.Action):
    """An action of the parser: a later value replaces an earlier one, and a note is printed."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: object = None
    ) -> None:
        """Keep the value; `--no_ssh` has its own, which stands for that of `--launcher`."""
        if self.dest in namespace:
            say(f"note: {repeated(dashed(self.dest), getattr(namespace, self.dest))}")
        setattr(namespace, self.dest, self.const or values)


def launcher_parser() -> argparse.ArgumentParser:
    """Return the parser of DeepSpeed's launcher flags, of this project's, and of the arguments from STAGE on."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, add_help=False, exit_on_error=False, argument_default=argparse.SUPPRESS
    )
    parser.add_argument("--no-ssh", "--no_ssh", dest="launcher", action=LastCounts, nargs=0, const="none")
    for names, kind in FLAGS.items():
        parser.add_argument(*in_both_spellings(names), action=LastCounts, type=kind)
    for names in (*SWITCHES, *IDLE_SWITCHES):
        parser.add_argument(*in_both_spellings(names), action="store_true")
    parser.add_argument("argv", nargs=argparse.REMAINDER)
    return parser


def in_both_spellings(names: str) -> Iterable[str]:
    """Return the names of a flag with `-` between their words, as they are shown, and with `_`."""
    return dict.fromkeys([*names.split(), *(f"--{normalise(name[2:])}" for name in names.split() if name[:2] == "--")])


def backend(text: str) -> str:
    """Return the name of a launcher in lower case."""
    if text.lower() in BY_HAND:
        raise refused(f"start {text} {BY_DEEPSPEED.format(f'--launcher {text.lower()}')}")
    return one_of("ssh", "srun", "none")(text.lower())


def launcher_args(text: str) -> str:
    raise refused(BY_DEEPSPEED.format("--launcher LAUNCHER --launcher_args ARGS"))


def count(text: str) -> int:
    return whole(text, 1, sys.maxsize, "a number from 1 on")


def number(text: str) -> int:
    return whole(text, 0, sys.maxsize, "a number from 0 on")


def port(text: str) -> int:
    return whole(text, 0, 65535, "0 to 65535")


def whole(text: str, least: int, most: int, expected: str) -> int:
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII) or not least <= int(text) <= most:
        raise refused(f"got {text!r}, expected {expected}")
    return int(text)


def one_of(*choices: str) -> Callable[[str], str]:
    """Return a function that returns its text if it is one of `choices`, and else raises."""

    def chosen(text: str) -> str:
        if text not in choices:
            raise refused(f"got {text!r}, expected {', '.join(choices[:-1])} or {choices[-1]}")
        return text

    return chosen


refused = argparse.ArgumentTypeError
# Names of a flag with a value -> reader of the value.
FLAGS: dict[str, Callable[[str], object]] = {
    "--launcher": backend,
    "--launcher-args": launcher_args,
    "--hostfile -H": str,
    "--include -i": str,
    "--exclude -e": str,
    "--num-nodes": count,
    "--num-gpus --num-accelerators": count,
    "--node-rank": number,
    "--master-addr": str,
    "--master-port": port,
    "--ssh-port": port,
    "--venv-script": str,
    "--enable-each-rank-log": str,
    "--log-level": one_of("debug", "info", "warning", "error", "critical"),
}
SWITCHES = ("--check",)
BY_DEEPSPEED = "by hand: deepspeed {} --module step1_sft.main FLAGS"
# Removed flags of DeepSpeed's launcher -> what to use instead.
GONE = {
    "--bind-cores-to-rank": BY_DEEPSPEED.format("--bind_cores_to_rank"),
    "--bind-core-list": BY_DEEPSPEED.format("--bind_cores_to_rank --bind_core_list CORES"),
    "--save-pid": BY_DEEPSPEED.format("--save_pid"),
    "--autotuning": "--auto measure searches too; by hand, in the project's folder: "
    "PYTHONPATH=$PWD deepspeed --autotuning run step1_sft/main.py FLAGS",
}
# Switches of DeepSpeed's launcher that have no effect here: they ask for the default, or set its own verbosity.
IDLE_SWITCHES = ("--module", "--no-python", "--no-local-rank", "--no-ssh-check", "--force-multi", "--quiet -q")
