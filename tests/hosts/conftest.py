"""Hosts that are network namespaces, and data and models of a tiny run in a folder that they share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from host_runs import on_one_machine, one_stage
from network import Cluster, network, why_impossible
from support.tiny_run import make_folder


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """node-a and node-b, with a shared folder that holds `data/` and the host file `hosts`."""
    yield from started(tmp_path_factory.mktemp("two"), ["node-a", "node-b"], shared=True)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The same with node-c, and every host has a disk of its own."""
    yield from started(tmp_path_factory.mktemp("three"), ["node-a", "node-b", "node-c"], shared=False)


def started(folder: Path, names: list[str], *, shared: bool) -> Iterator[Cluster]:
    if reason := why_impossible():
        pytest.skip(reason)
    disk = folder / "disk"
    (disk / "data").mkdir(parents=True)
    make_folder(disk / "data")
    (disk / "hosts").write_text("".join(f"{name} slots=1\n" for name in names))
    with network(folder, disk, names, shared=shared) as hosts:
        yield Cluster(disk, hosts)


@pytest.fixture(scope="module")
def undisturbed(two: Cluster) -> Path:
    """The output of a stage with two ranks on one machine."""
    on_one_machine(two.disk, *one_stage(two.disk, "one"))
    return two.disk / "one"
