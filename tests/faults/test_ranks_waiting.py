"""Two real ranks whose data take longer to prepare than any timeout of the run."""

import shutil
import time
from pathlib import Path

import pytest
from filelock import FileLock
from rank_run import START_S, start
from support.tiny_run import make_folder

PREPARATION_S = 9.0


@pytest.mark.faults
def test_ranks_wait_for_data_longer_than_both_timeouts(tmp_path: Path) -> None:
    """This process holds the lock of the cache, as another run that prepares the same data would."""
    data = make_folder(tmp_path)
    flags = {"max_steps": 2, "process_group_timeout_s": 4, "rank_timeout_s": 5}
    (prepared,) = prepare(tmp_path, data, **flags)
    shutil.rmtree(prepared)
    with FileLock(f"{prepared}.lock"):
        job = start(1, tmp_path, data, overwrite="true", **flags)
        job.wait(lambda: "waiting for another process" in job.stderr)
        time.sleep(PREPARATION_S)
        assert job.process.poll() is None, job.stderr
    assert job.ended(time.monotonic(), START_S).code == 0, job.stderr
    assert prepared.is_dir()


def prepare(folder: Path, data: Path, **flags: object) -> list[Path]:
    """Run to the end; return the folders of prepared rows."""
    job = start(1, folder, data, **flags)
    assert job.ended(time.monotonic(), START_S).code == 0, job.stderr
    return [path for path in (data / "cache").iterdir() if path.is_dir()]
