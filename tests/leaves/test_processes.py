"""The memory of a machine as the cgroups of this process limit it, in made folders, and time limits of calls."""

import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from pipeline import processes

MIB = 2**20


def in_cgroup(monkeypatch: pytest.MonkeyPatch, folder: Path, own: str, limits: dict[str, object]) -> None:
    """Put this process into cgroups below `folder`; own: what the kernel says of it, limits: the content of files."""
    for name, limit in limits.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{limit}\n", encoding="utf-8")
    (folder / "own").write_text(f"{own}\n", encoding="utf-8")
    monkeypatch.setattr(processes, "CGROUPS", folder)
    monkeypatch.setattr(processes, "OWN_CGROUPS", folder / "own")


V1 = "memory/{}memory.limit_in_bytes"
HYBRID = "5:cpu,cpuacct:/job\n4:memory:/job/task\n0::/session"


@pytest.mark.parametrize(
    ("own", "limits", "mib"),
    [
        pytest.param("0::/", {"memory.max": 64 * MIB}, 64, id="version 2, of a container"),
        pytest.param("0::/a/b", {"a/b/memory.max": "max", "a/memory.max": 32 * MIB}, 32, id="of a cgroup above"),
        pytest.param("0::/a/b", {"a/b/memory.max": 16 * MIB, "a/memory.max": 32 * MIB}, 16, id="the smallest"),
        pytest.param("0::/a", {"memory.max": "max", "other/memory.max": MIB}, 0, id="another's"),
        pytest.param(HYBRID, {V1.format("job/task/"): 8 * MIB, "session/memory.max": "max"}, 8, id="version 1"),
        pytest.param(HYBRID, {V1.format("job/task/"): 2**63 - 4096, V1.format("job/"): 9 * MIB}, 9, id="1, above"),
        pytest.param(HYBRID, {V1.format(""): 7 * MIB}, 7, id="1, in a container with the host's path"),
        pytest.param(HYBRID, {V1.format(""): 2**63 - 4096, "cpu,cpuacct/job/memory.max": MIB}, 0, id="no limit"),
    ],
)
def test_the_memory_of_a_machine_is_limited_by_its_cgroups(monkeypatch, tmp_path, own, limits, mib):
    in_cgroup(monkeypatch, tmp_path, own, limits)
    assert processes.memory_of_machine() == (mib * MIB or psutil.virtual_memory().total)


def test_without_cgroups_the_memory_is_the_machines(monkeypatch, tmp_path):
    monkeypatch.setattr(processes, "OWN_CGROUPS", tmp_path / "none")
    assert processes.memory_of_machine() == psutil.virtual_memory().total


def test_a_time_limit_holds_in_a_thread_whose_next_call_is_not_ended() -> None:
    ended = list[str]()

    def limited() -> None:
        for _ in range(2):
            try:
                with processes.time_limit(0.05):
                    while True:
                        pass
            except processes.TimeLimitError:
                ended.append("limit")
        with processes.time_limit(0.2):
            ended.append("in time")
        time.sleep(0.4)
        ended.append("later")

    thread = threading.Thread(target=limited, daemon=True)
    thread.start()
    thread.join(10)
    assert ended == ["limit", "limit", "in time", "later"]


def test_a_time_limit_comes_again_where_its_error_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "REPEAT_LIMIT_S", 0.05)
    handler, start = signal.getsignal(signal.SIGALRM), time.monotonic()
    with pytest.raises(processes.TimeLimitError), processes.time_limit(0.05):
        with suppress(BaseException):
            time.sleep(5)
        time.sleep(5)
    assert time.monotonic() - start < 4
    assert signal.getsignal(signal.SIGALRM) is handler and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
