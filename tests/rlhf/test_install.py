"""The installed project: what its wheel holds, and a tiny step 1 by its command from another folder."""

import sys
import zipfile
from pathlib import Path

import pytest
from support.installed import build_wheel, call, pip, tiny_step
from support.source_tree import PACKAGES, ROOT, relative, source_files


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.mark.slow
def test_the_wheel_holds_all_packages_their_data_and_nothing_else(wheel):
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    data = [*(ROOT / "launch").rglob("*.sh"), *(ROOT / "launch").rglob("*.yaml"), ROOT / "launch" / "hostfile.example"]
    data += [ROOT / "launch" / "slurm.sbatch", ROOT / "pipeline" / "inference" / "prompts.json"]
    data += [ROOT / "pipeline" / "inference" / "serving" / "page.html"]
    data += [*(ROOT / "pipeline").glob("*/templates/*")]
    assert held == {relative(path) for path in [*source_files(*PACKAGES), *data]}


@pytest.mark.slow
def test_a_step_runs_from_a_folder_far_from_the_checkout(wheel, tmp_path):
    """Beside the environment's libraries; both ways to call it."""
    target, work = tmp_path / "installed", tmp_path / "my work"
    pip(sys.executable, "install", "--quiet", "--no-deps", "--no-index", "--target", target, wheel)
    work.mkdir()
    where = {"PYTHONPATH": str(target)}
    assert "usage: rlhf SUBCOMMAND" in call([target / "bin" / "rlhf", "--help"], work, **where)
    plan = call([target / "bin" / "rlhf", "train", "--actor-model", "125m", "--target", "1xH100-80GB"], work, **where)
    assert f"--preset {target / 'launch' / 'presets' / '125m.yaml'}" in plan
    tiny_step([sys.executable, "-m", "rlhf"], work, **where)


@pytest.mark.faults
def test_an_empty_environment(wheel, tmp_path):
    """pip brings all that a step needs, at the tested versions."""
    folder, work = tmp_path / "venv", tmp_path / "work"
    work.mkdir()
    python = folder / "bin" / "python"
    call([sys.executable, "-m", "venv", folder], tmp_path)
    try:
        pip(python, "download", "--no-deps", "--dest", tmp_path, "filelock")
    except AssertionError as error:
        pytest.skip(f"pip reaches no package index: {error}")
    pip(python, "install", "--quiet", "--upgrade", "pip>=26.3")
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pip(python, "install", "--quiet", *(line for line in constraints.splitlines() if line.startswith("torch==")))
    pip(python, "install", "--quiet", "-c", ROOT / "constraints.txt", "-r", ROOT / "requirements.txt")
    pip(python, "install", "--quiet", "--no-deps", wheel)
    assert "usage: rlhf SUBCOMMAND" in call([folder / "bin" / "rlhf", "--help"], work)
    tiny_step([folder / "bin" / "rlhf"], work)
    installed = Path(call([python, "-c", "import pipeline; print(pipeline.__file__)"], work).strip())
    assert installed.is_relative_to(folder)
