"""Hosts of this machine, and data and models of a tiny run in a folder that they share."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import SSHD, Cluster
from host_runs import on_one_machine, one_stage
from loopback import loopback
from namespaces import namespaces, why_no_namespaces
from support.tiny_run import make_folder

PROGRAMS = ("ssh", "ssh-keygen", SSHD)


def pytest_report_collectionfinish(items: list[pytest.Item]) -> str:
    """Say it where hosts are to be loopback addresses; which tests are skipped then is said at the end."""
    reason = why_no_namespaces() if any(item.get_closest_marker("hosts") for item in items) else ""
    return f"{reason}: the hosts are loopback addresses" if reason else ""


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """node-a and node-b, with a shared folder that holds `data/` and the host file `hosts`."""
    yield from started(tmp_path_factory.mktemp("two"), ["node-a", "node-b"], shared=True)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The same with node-c, and every host has a disk of its own."""
    yield from started(tmp_path_factory.mktemp("three"), ["node-a", "node-b", "node-c"], shared=False)


def started(folder: Path, names: list[str], *, shared: bool) -> Iterator[Cluster]:
    if missing := [program for program in PROGRAMS if not shutil.which(program)]:
        pytest.skip(f"not installed: {', '.join(missing)} (apt-get install openssh-server)")
    disk, reason = folder / "disk", why_no_namespaces()
    if reason and not shared:
        pytest.skip(f"disks of their own: not on loopback addresses ({reason})")
    (disk / "data").mkdir(parents=True)
    make_folder(disk / "data")
    with loopback(folder, disk, names) if reason else namespaces(folder, disk, names, shared=shared) as hosts:
        yield Cluster(disk, hosts, reason)


@pytest.fixture(scope="module")
def undisturbed(two: Cluster) -> Path:
    """The output of a stage with two ranks on one machine."""
    on_one_machine(two.disk, *one_stage(two.disk, "one"))
    return two.disk / "one"
