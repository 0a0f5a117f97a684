"""`--gpu-memory-gib`: plans of a GPU of which a run may take a part, by the real command line."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.in_process import look_in_process
from support.messages import naming
from support.tiny_run import make_folder

from benchmarks.speed.planned import OPT, planner_of, ppo
from pipeline import hub
from pipeline.configuration.flags import parse
from pipeline.device import DeviceConstants
from pipeline.errors import EnvironmentFault
from pipeline.files import GIB
from pipeline.launching import target
from pipeline.launching.target import Target, parse_target, with_limit
from pipeline.planning.page import StagePlan, stage_page
from pipeline.preparation.plans import choose_at_start, stage_planner
from pipeline.preparation.preflight import look_before_start
from rlhf import train
from rlhf.stages import stage_of
from step1_sft.config import SFTConfig
from step1_sft.main import main as sft_main
from step1_sft.stage import STAGE as SFT
from step2_reward.main import main as reward_main
from step3_ppo.main import main as ppo_main

COMMON = ["--data-path", "train.jsonl", "--data-split", "none"]
MAINS: dict[str, tuple[Callable[[list[str]], int], str]] = {
    "sft": (sft_main, "--model-name-or-path base --max-seq-len 96"),
    "reward": (reward_main, "--model-name-or-path base --max-seq-len 96"),
    "ppo": (
        ppo_main,
        "--actor-model-name-or-path base --critic-model-name-or-path scorer "
        "--max-prompt-seq-len 64 --max-answer-seq-len 32",
    ),
}


class Done(NamedTuple):
    """How a command ended, what it printed without line breaks, and its errors."""

    code: int
    page: str
    errors: list[str]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and data, and a file that describes an H100 with 24 GiB."""
    folder = make_folder(tmp_path_factory.mktemp("limit"), num_train=8, num_test=4, num_documents=2)
    (folder / "24.yaml").write_text("name: H100-80GB\nmemory_gib: 24", encoding="utf-8")
    return folder


@pytest.fixture
def planned(inputs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """A stage's dry run in this process, in the folder of the inputs."""
    monkeypatch.chdir(inputs)
    monkeypatch.setattr(hub, "is_reachable", lambda: False)

    def run(section: str, *words: str) -> Done:
        main, models = MAINS[section]
        code = main([*models.split(), *COMMON, *words])
        printed = capsys.readouterr()
        return Done(code, " ".join(printed.out.split()), printed.err.splitlines())

    return run


@pytest.mark.parametrize("section", MAINS)
def test_a_plan_is_that_of_a_gpu_of_so_many_gib(planned, section):
    limited, small = (planned(section, *words) for words in (
        ["--target", "1xH100-80GB", "--gpu-memory-gib", "24"], ["--target", "24.yaml"]
    ))  # fmt: skip
    assert limited.code == small.code == 0
    assert limited.page == naming(f"plan of {section} ... 1 x H100-80GB, 24.0 GiB (--gpu-memory-gib)")
    assert limited.page.replace(" (--gpu-memory-gib)", "") == small.page


def test_the_parts_of_a_plan_name_the_flag_beside_the_size(planned):
    page = planned("sft", "--target", "1xH100-80GB", "--gpu-memory-gib", "24", "--explain").page
    assert page == naming("fits", "of 24.00 GiB (--gpu-memory-gib)", "phase")
    whole = planned("sft", "--target", "1xH100-80GB", "--gpu-memory-gib", "0", "--explain").page
    assert " of 78.80 GiB in phase " in whole and "(--gpu-memory-gib)" not in whole


@pytest.mark.slow
def test_rows_of_the_cache_and_whether_it_stays_follow_the_limit():
    """OPT-1.3B with a critic, on an H200 of which a run has 41 GiB."""
    planner, resolved = planner_of("ppo", ppo(OPT, 16, 4, 2), "1xH200")
    run = resolved.config.run.model_copy(update={"gpu_memory_gib": 41.0})
    limited = replace(resolved, config=resolved.config.model_copy(update={"run": run}))
    found, _ = stage_planner(stage_of("ppo"), limited, parse_target("1xH200"), {})
    small = replace(planner, target=replace(planner.target, memory=41 * GIB))
    plans = [one.memory(limited) for one in (found, small, planner)]
    assert plans[0] == plans[1] and plans[0].keeps_buffers != plans[2].keeps_buffers
    page, other = (stage_page(StagePlan.of(one, limited, 0)) for one in (found, small))
    assert [line.replace(" (--gpu-memory-gib)", "") for line in page] == other


def test_what_does_not_fit_within_the_limit_is_changed_until_it_does(planned):
    little = ["--target", "1xH100-80GB", "--gpu-memory-gib", "0.7", "--per-device-train-batch-size", "4096"]
    lacking = planned("sft", *little)
    (line,) = lacking.errors
    assert lacking.code == 3 and line == naming("of 0.70 GiB (--gpu-memory-gib) ... phase train (1 x H100-80GB,")
    fitted = planned("sft", *little, "--auto", "fit")
    assert fitted.code == 0 and " --auto fit makes it fit " in fitted.page


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        ("--gpu-memory-gib 79", 3, "--gpu-memory-gib 79 ... 78.80 GiB ... less, or 0"),
        ("--gpu-memory-gib -1", 2, "--gpu-memory-gib: got '-1'"),
        ("--gpu-memory-gib nan", 2, "--gpu-memory-gib: got 'nan'"),
        ("--gpu-memory-gib inf", 2, "--gpu-memory-gib: got 'inf'"),
        ("--gpu-memory-gib 24G", 2, "--gpu-memory-gib: got '24G'"),
    ],
)
def test_what_no_gpu_can_give_is_refused_in_one_line(planned, words, code, line):
    done = planned("sft", "--target", "1xH100-80GB", *words.split())
    (error,) = done.errors
    assert done.code == code and error == naming(f"error: {line}")


def test_the_whole_of_a_gpu_may_be_named(planned):
    assert planned("sft", "--target", "1xH100-80GB", "--gpu-memory-gib", "78.8").code == 0
    assert with_limit(Target("GPU", 0), 24.0).memory == 24 * GIB, "where its memory is not known"


def test_a_plan_for_a_cpu_has_its_memory(planned):
    assert planned("sft", "--dry-run", "--gpu-memory-gib", "0.1") == planned("sft", "--dry-run")


def test_train_gives_it_to_each_stage(inputs, monkeypatch, capsys):
    monkeypatch.chdir(inputs)
    monkeypatch.setattr(hub, "is_reachable", lambda: False)
    look_in_process(monkeypatch)
    words = "--actor-model base --reward-model base --data-path train.jsonl --target 1xH100-80GB --sft.max-seq-len 96"
    words += " --reward.max-seq-len 96 --ppo.max-prompt-seq-len 64 --ppo.max-answer-seq-len 32"
    words += " --gpu-memory-gib 24 --ppo.gpu-memory-gib 30"
    assert train.main(words.split()) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert page == naming("plan of sft, reward ... 1 x H100-80GB, 24.0 GiB (--gpu-memory-gib)")
    assert page == naming("plan of ppo ... 1 x H100-80GB, 30.0 GiB (--gpu-memory-gib)")


@pytest.mark.parametrize("kind", ["preset", "config"])
def test_a_file_of_flags_gives_it(planned, inputs, kind):
    (inputs / "flags.yaml").write_text("gpu_memory_gib: 24\n", encoding="utf-8")
    page = planned("reward", "--target", "1xH100-80GB", f"--{kind}", "flags.yaml").page
    assert "24.0 GiB (--gpu-memory-gib) each" in page


def settings(folder: Path, *words: str) -> Any:
    own = f"--model-name-or-path {folder}/base --max-seq-len 96 --auto fit"
    return parse(SFTConfig, [*own.split(), *words], section="sft")


@pytest.mark.slow
def test_a_job_is_fitted_to_the_limit_of_this_machines_measured_gpu(inputs, monkeypatch):
    kept = DeviceConstants("NVIDIA H100", "2026-11-22", 79 * GIB, 700.0, 3.0, 50.0)
    monkeypatch.setattr(target, "stored_constants", lambda: kept)
    here, rows = Target("NVIDIA H100", 78 * GIB, described=False), ("--per-device-train-batch-size", "4096")

    def fitted(*words: str) -> Any:
        planner, resolved = stage_planner(SFT, settings(inputs, *words), here, {})
        return choose_at_start(SFT, planner, resolved).of(resolved, 1)

    assert fitted(*rows).config.optimizer.per_device_train_batch_size == 4096
    assert fitted(*rows, "--gpu-memory-gib", "0.7").config.optimizer.per_device_train_batch_size < 4096
    with pytest.raises(EnvironmentFault, match=r"--gpu-memory-gib 80: NVIDIA H100 has 79\.00 GiB"):
        fitted("--gpu-memory-gib", "80")


def settings_of(section: str, gib: str) -> Any:
    words = [*MAINS[section][1].split(), *COMMON, "--gpu-memory-gib", gib, "--output-dir", f"out/{section}"]
    return parse(stage_of(section).config, words, section=section)


def test_a_limit_of_a_later_stage_is_looked_at_before_the_first_one_starts(inputs, monkeypatch):
    monkeypatch.chdir(inputs)
    monkeypatch.setattr("pipeline.preparation.preflight.this_machine", lambda *slots: Target("X", 24 * GIB))
    configs = {stage_of(name): settings_of(name, gib).config for name, gib in (("sft", "24"), ("reward", "25"))}
    with pytest.raises(EnvironmentFault) as refused:
        look_before_start(configs, dry_run=False, named_by_section=True)
    line = naming("--reward.gpu-memory-gib 25 ... 24.00 GiB ... less, or 0")
    assert str(refused.value) == line
    monkeypatch.setattr("pipeline.preparation.preflight.this_machine", lambda *slots: Target("CPU", GIB))
    assert look_before_start(configs, dry_run=False, named_by_section=True) == []


@pytest.mark.parametrize(
    ("other", "same"),
    [
        ({}, True),
        ({"memory": int(79.1 * GIB)}, True),  # measured: 81,559 MiB by the driver are 78.5 GiB for a process
        ({"memory": int(80.6 * GIB)}, False),
        ({"slots": (1, 1)}, False),
        ({"name": "NVIDIA H100 NVL"}, False),
        ({"memory": 0}, False),
        ({"memory": int(78.4 * GIB), "is_limited": True}, False),
    ],
    ids=str,
)
def test_hardware_is_the_same_before_and_after_it_was_measured(other, same):
    here = Target("NVIDIA H100 80GB HBM3", int(78.45 * GIB), described=False)
    assert here.is_same(str(replace(here, **other))) == replace(here, **other).is_same(str(here)) == same


def test_hardware_with_another_limit_is_not_the_same():
    limited = Target("NVIDIA H100 80GB HBM3", 40 * GIB, described=False, is_limited=True)
    other = replace(limited, memory=int(40.2 * GIB))
    assert limited.is_same(str(limited)) and not limited.is_same(str(other))
