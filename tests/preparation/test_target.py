"""`--target`: described hardware, and plans that fit it or do not, by the real command line."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from support.in_process import look_in_process
from support.messages import naming
from support.tiny_run import make_folder, write_lines
from transformers import AutoTokenizer

from pipeline import hub, processes
from pipeline.device import DeviceConstants, store_constants
from pipeline.files import GIB
from pipeline.launching import target
from pipeline.launching.request import parse_request
from pipeline.launching.target import DEVICES, PRODUCTS
from pipeline.preparation.stage_job import run_job
from rlhf import train
from step1_sft.main import main
from step1_sft.stage import STAGE as SFT
from step3_ppo.main import main as ppo_main


class Done(NamedTuple):
    """How a command ended, and what it printed."""

    returncode: int
    stdout: str
    stderr: str


STAGE = "--model-name-or-path base --data-path train.jsonl --output-dir out/sft --max-seq-len 96".split()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and data, and two files that describe GPUs: one with little memory, one with hardly any."""
    folder = make_folder(tmp_path_factory.mktemp("target"), num_train=8, num_test=4, num_documents=2)
    for name, memory in (("small", 4.0), ("none", 0.4)):
        (folder / f"{name}.yaml").write_text(f"gpus: 2\nmemory_gib: {memory}\nhost_memory_gib: 64\n", encoding="utf-8")
    return folder


@pytest.mark.slow
def test_a_page_without_a_time_says_what_is_missing(planned, tmp_path):
    file = tmp_path / "target.yaml"

    def time_of(text: str) -> str:
        file.write_text(f"memory_gib: 8\n{text}", encoding="utf-8")
        short, whole = (one_line(planned("--target", str(file), *more).stdout) for more in ((), ("--explain",)))
        (said,) = re.findall(r" time +(.+?) disk ", whole)
        assert f" times: {said}" in short or " times are rough, " in short
        return said

    assert time_of("name: Mine") == naming("tb_per_s and tflops ... target file ... data sheet")
    assert time_of("tflops: 9") == naming("tb_per_s ... target file ... data sheet")
    assert time_of("name: CPU") == "not planned for a CPU"
    assert time_of("name: L4").startswith("train ")
    assert time_of("name: T4").startswith("not planned in fp32: ")


def one_line(page: str) -> str:
    """A page whose lines are not wrapped, with single spaces."""
    return " ".join(page.split())


@pytest.fixture
def planned(inputs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Stage 1's command in this process, in the folder of the inputs."""
    monkeypatch.chdir(inputs)
    monkeypatch.setattr(hub, "is_reachable", lambda: False)

    def run(*words: str) -> Done:
        code = main([*STAGE, *words])
        return Done(code, *capsys.readouterr())

    return run


def test_a_plan_that_fits_is_a_short_page_and_starts_nothing(planned, inputs):
    before = sorted(inputs.rglob("*"))
    done = planned("--target", "small.yaml", "--data-split", "2,4,4")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == naming("plan of sft ... 2 x small, 4.0 GiB ... bf16") and len(lines) <= 9
    assert re.fullmatch(r"  sft      fits +\d\.\d to \d\.\d of 4\.0 +\d\.\d", lines[2])
    assert done.stdout.endswith("dry run: nothing was started\n") and sorted(inputs.rglob("*")) == before


def test_the_parts_of_a_plan_are_told_by_explain_above_the_flags(planned):
    lines = planned("--target", "small.yaml", "--explain", "--data-split", "2,4,4").stdout.splitlines()
    flags = lines.index(next(line for line in lines if line.startswith("  data_path ")))
    page = " ".join(" ".join(lines[:flags]).split())
    assert all(len(line) <= 80 for line in lines[:flags])
    assert page == naming("1.1 to 2.2 GiB of CUDA's ... 4% to 9%")
    assert page == naming("micro-batch 16 x 1 ... x 2 ranks = 32 rows of 96 tokens")
    assert " verdict fits: " in page and page.count(" data of sft: train.jsonl: 8 rows of ") == 1
    assert page == naming("all 8 records, 0 dropped") and page == naming("20% of the prompts")


def test_a_launcher_of_several_hosts_plans_for_those_that_are_described(planned, inputs, capsys):
    """Its command has no host file; the plan of a stage by itself is the same."""
    words = [*STAGE, "--target", "small.yaml"]
    assert run_job(SFT, parse_request("multi_node", ["1", *words]), None) == 0
    by_launcher = capsys.readouterr().out
    assert by_launcher == planned("--target", "small.yaml").stdout and "plan of sft, on 2 x small" in by_launcher


@pytest.mark.parametrize("more", [(), ("--explain",)])
def test_a_dry_run_says_rows_kept_and_dropped_and_their_tokens(planned, inputs, more):
    """A z is a token of its own: no text of the tokenizer's had two of them."""
    write_lines(inputs / "lengths.jsonl", [{"prompt": "q", "response": "z" * count} for count in (40, 2, 1, 8, 4, 0)])
    tokenizer = AutoTokenizer.from_pretrained(inputs / "base")
    shortest = len(tokenizer("\n\nHuman: q\n\nAssistant: z").input_ids) + 1  # and the EOS
    lengths = f"5 rows of {shortest} to {shortest + 39} tokens ... up to {shortest + 3}"
    words = ("--target", "small.yaml", "--data-path", "lengths.jsonl", "--data-split", "none")
    page = one_line(planned(*words, *more).stdout)
    assert page == naming(f"data of sft: lengths.jsonl: {lengths} ... all 5 records, 1 dropped; 1 dropped:")
    assert page.count(" data of sft: ") == 1


@pytest.mark.parametrize(
    ("include", "hardware", "batch", "largest"),
    [
        (
            "",
            "(4 + 1) x CPU, 4.0 GiB",
            "micro-batch 3 x 1 ... x 5 ranks = 15 rows",
            "largest machine's 16.00: 4 processes",
        ),
        ("a:0,2@b", "(2 + 1) x CPU, 8.0 GiB", "x 3 ranks = 9 rows", "largest machine's 16.00: 2 processes"),
        ("a:0@b", "2 x 1 x CPU, 16.0 GiB", "x 2 ranks = 6 rows", "each machine's 16.00: 1 process"),
    ],
)
def test_hosts_with_different_numbers_of_gpus_are_planned_as_they_are(
    planned, inputs, monkeypatch, capsys, include, hardware, batch, largest
):
    """By a launch script and by train.py; the processes of the largest host share its memory."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(target, "memory_of_machine", lambda: 16 * GIB)
    (inputs / "hosts").write_text("a slots=4\nb slots=1\n", encoding="utf-8")
    hosts = ["--hostfile", "hosts", *(["--include", include] if include else [])]
    words = [*STAGE, "--per-device-train-batch-size", "3", "--explain"]
    assert run_job(SFT, parse_request("multi_node", [*hosts, "1", *words]), None) == 0
    by_launcher = capsys.readouterr().out
    assert by_launcher == naming(f"plan of sft ... {hardware} ... fp32")
    assert one_line(by_launcher) == naming(batch) and one_line(by_launcher) == naming(largest)
    look_in_process(monkeypatch)
    words = ["--actor-model", "base", "--data-path", "train.jsonl", "--output-dir", "out", "--sft.max-seq-len", "96"]
    words += ["--step", "1", "--deployment-type", "multi_node", *hosts, "--per-device-train-batch-size", "3"]
    assert train.main([*words, "--dry-run"]) == 0
    plan = by_launcher[by_launcher.index("plan of sft") :]
    assert plan.split("\n  steps")[0].split("\nparts of ")[0] in capsys.readouterr().out


def test_the_steps_of_a_run_are_told_from_its_rows(planned):
    """Of 8 records without a split, 0.8 are held out: 7.2 rows are 4 steps of 2 ranks x 1 row, in each epoch."""
    words = ("--explain", "--target", "small.yaml", "--per-device-train-batch-size", "1", "--num-train-epochs", "2")
    whole, shared = planned(*words).stdout, planned(*words, "--data-split", "2,4,4").stdout
    assert whole == naming("8 optimizer steps ... --num-train-epochs 2")
    assert shared == naming("2 optimizer steps ... --num-train-epochs 2"), "20 % are for this stage"
    assert "  steps    3 optimizer steps (--max-steps)\n" in planned(*words, "--max-steps", "3").stdout
    assert "  steps    1 optimizer step (--max-steps)\n" in planned(*words, "--max-steps", "1").stdout
    assert "  steps " not in planned(*words, "--packing", "true").stdout


def test_peaks_of_the_last_run_stand_beside_the_plan_of_its_like(planned, inputs):
    """The highest of all steps; those of another model, another kind of device or another folder are not told."""
    lines = [{"step": 1, "memory/train_gib": 1.5, "host_memory_gib": 2.5}, {"step": 2, "memory/train_gib": 1.25},
             {"step": 2, "eval_loss": 1.0}]  # fmt: skip
    (inputs / "earlier").mkdir()
    (inputs / "earlier/metrics.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")

    def told(model: str, device: str, **saved: object) -> str:
        content = {name: {"value": value} for name, value in {"model_name_or_path": model, **saved}.items()}
        (inputs / "earlier/config.json").write_text(json.dumps(content), encoding="utf-8")
        record = {"stage": "sft", "versions": {}, "device": device}
        (inputs / "earlier/env.json").write_text(json.dumps(record), encoding="utf-8")
        page = planned("--target", "1xRTX4090", "--run-dir", "earlier", "--overwrite", "--explain").stdout
        return next((line for line in page.splitlines() if line.startswith("  last run ")), "")

    same = "  last run train 1.5, host 2.5 GiB"
    assert told("base", "NVIDIA GeForce RTX 4090") == same
    other = told("base", "NVIDIA GeForce RTX 4090", per_device_train_batch_size=4, learning_rate=1.0)
    assert other == f"{same}, other flags"
    assert told("base", "NVIDIA GeForce RTX 4090", learning_rate=1.0) == same, "a rate needs no memory"
    assert told("base", "cpu") == told("base", "NVIDIA H200") == told("other", "NVIDIA GeForce RTX 4090") == ""
    assert "  last run" not in planned("--target", "1xRTX4090", "--explain").stdout


@pytest.mark.slow
def test_a_plan_that_does_not_fit_ends_with_3_and_what_to_change(planned):
    done = planned("--target", "none.yaml")
    assert done.returncode == 3 and done.stdout.endswith("dry run: nothing was started\n")
    assert done.stderr.startswith("error: sft: does not fit: ") and done.stderr.count("\n") == 1
    lines = done.stdout.splitlines()
    assert re.fullmatch(r"  sft      does not fit +\d\.\d to \d\.\d of 0\.4 +\d\.\d", lines[2]), "and no time"
    # The context alone is more than this device has: what a tiny model can give back is next to nothing.
    assert lines[3].startswith("  chosen for sft: ") and "--per-device-train-batch-size 1" in "".join(lines[3:6])
    told = lines.index(next(line for line in lines if line.startswith("sft does not fit: ")))
    assert lines[told + 1] == naming("no change of flags ... use")
    assert planned("--target", "none.yaml", "--auto", "fit").returncode == 3


@pytest.mark.slow
def test_a_preset_for_more_gpus_is_planned_on_fewer(planned, inputs, tmp_path, capsys):
    """Its rollouts are shared by fewer of them; as a word of the command the same size is a mistake."""
    preset = tmp_path / "preset.yaml"
    preset.write_text("inference_tp_size: 8\nper_device_generation_batch_size: 1\n", encoding="utf-8")
    words = (
        "--actor-model-name-or-path base --critic-model-name-or-path scorer --data-path train.jsonl --output-dir out"
    )
    words += " --target none.yaml --per-device-train-batch-size 1 --max-prompt-seq-len 96 --max-answer-seq-len 8"
    words += f" --preset {preset}"
    assert ppo_main(words.split()) == 3
    done = capsys.readouterr()
    assert one_line(done.out) == naming(f"--inference-tp-size 2 ... 8 ({preset}) ... 2 ranks")
    assert naming("ppo: answers ... at most 8 tokens") in done.out.splitlines()
    assert "\nppo does not fit: " in done.out and "\n  no change of flags is enough: " in done.out
    assert done.err.startswith("error: ppo: does not fit: ") and done.err.count("\n") == 1
    assert ppo_main([*words.split(), "--inference-tp-size", "8"]) == 2
    assert naming("error: --inference-tp-size 8 ... 2 ranks ... 2") in capsys.readouterr().err.splitlines()


def test_a_plan_that_fits_with_the_changes_of_auto_fit_ends_with_0(planned):
    words = ("--target", "small.yaml", "--per-device-train-batch-size", "32768")
    lacking, changed = planned(*words), planned(*words, "--auto", "fit")
    assert (lacking.returncode, changed.returncode) == (3, 0) and changed.stderr == ""
    page = one_line(changed.stdout)
    assert page == naming("fits with these changes ... --per-device-train-batch-size 16384")
    assert page == naming("4.0 to 9.0 of the host, of its 64.0 ... --auto fit")
    assert "makes it fit" not in lacking.stdout


@pytest.mark.parametrize(
    "name, mib, sheet",
    [
        ("NVIDIA GeForce RTX 4090", 24564, "RTX4090-24GB"),
        ("NVIDIA L40S", 46068, "L40S-48GB"),
        ("Tesla T4", 15360, "T4-16GB"),
        ("NVIDIA A100-SXM4-40GB", 40960, "A100-40GB"),
    ],
)
def test_this_machine_has_the_data_sheet_of_its_gpu(monkeypatch, name, mib, sheet):
    """Under the name that nvidia-smi gives it."""
    monkeypatch.setattr(target, "count_gpus", lambda: 1)
    monkeypatch.setattr(target, "query_gpu", lambda *fields: [name, str(mib)])
    found = target.this_machine(1)
    assert (found.tb_per_s, found.tflops) == DEVICES[sheet][1:3]
    described = target.parse_target(f"1x{sheet}")
    monkeypatch.setattr(
        target, "stored_constants", lambda: DeviceConstants(name, "2026-11-22", described.memory, 1, 1, 1)
    )
    assert target.with_constants(described).measured, "of the same kind"
    for speeds in ({"tflops": 7.0}, {"tb_per_s": 0.1}):
        own = replace(described, **speeds)
        assert target.with_constants(own) == own, "a file's own speeds are kept"


def test_constants_measured_on_this_kind_of_device_take_the_place_of_its_data_sheet(planned, tmp_path, monkeypatch):
    """The context replaces 0.6 GiB in the expected figure, half the speeds double the time; an A100 keeps its sheet."""
    for constant in ("LAUNCH_S", "CHECK_S"):  # of the host, for which so small a model waits
        monkeypatch.setattr(f"pipeline.planning.duration.{constant}", 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("pipeline.device.query_gpu", lambda *fields: ["NVIDIA H200", "570.1"])

    def page(target: str) -> dict[str, str]:
        lines = planned("--target", target, "--explain").stdout.replace("\n           ", " ").splitlines()
        return {line.split()[0]: line for line in reversed(lines) if line.strip()}

    def seconds(lines: dict[str, str]) -> float:
        return float(re.search(r"train ([\d.e-]+) s", lines["time"])[1])

    sheet = page("1xH200")
    assert sheet["device"] == "  device   data sheet, not measured"
    assert page("2xH200")["time"] == naming("s: estimated from the device's speeds ... exchange between GPUs is not")
    assert "exchange" not in sheet["time"], "one GPU has none"
    speed = DEVICES["H200-141GB"][2] * PRODUCTS / 2
    store_constants(DeviceConstants("NVIDIA H200", "2026-11-22", 139 * GIB, speed, 2.14, 55.0, GIB))
    found = page("1xH200")
    assert found["device"] == "  device   measured here on 2026-11-22"
    assert seconds(found) == pytest.approx(2 * seconds(sheet), rel=0.06)
    low, expected, high = (float(found[name].split()[1]) for name in ("low", "expected", "high"))
    assert expected == pytest.approx(1.04 * low + 1, abs=0.02) and high == pytest.approx(1.09 * low + 1.6, abs=0.02)
    assert " of 139.00 GiB " in found["verdict"] and "data sheet" in page("1xA100-80GB")["device"]


@pytest.fixture
def on_cpu(planned, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Done]:
    """The same on this machine's CPU, in a container of so many GiB."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")

    def run(limit_gib: float, *words: str) -> Done:
        (tmp_path / "memory.max").write_text(f"{int(limit_gib * GIB)}\n", encoding="utf-8")
        (tmp_path / "own").write_text("0::/\n", encoding="utf-8")
        monkeypatch.setattr(processes, "CGROUPS", tmp_path)
        monkeypatch.setattr(processes, "OWN_CGROUPS", tmp_path / "own")
        return planned("--explain", *words)

    return run


@pytest.mark.slow
def test_a_plan_on_a_cpu_is_judged_by_the_memory_of_the_host(on_cpu):
    """Python, libraries and heap are 1.1 to 1.9 GiB; the model has hardly any."""
    small, tight, large = (on_cpu(limit) for limit in (1.0, 1.5, 3.0))
    assert (small.returncode, tight.returncode, large.returncode) == (3, 0, 0)
    assert small.stderr.startswith("error: sft: does not fit: 1.1") and "of 1.00 GiB in phase train" in small.stderr
    assert naming("--target, as 8xH100-80GB") in small.stderr.splitlines()
    assert "\n  verdict  tight: 1.1" in tight.stdout and "of 1.50 GiB in phase train\n" in tight.stdout
    assert "\nsft is tight: 1.1" in tight.stdout and "\n  sft      tight " in tight.stdout
    assert "plan of sft, on 1 x CPU, 3.0 GiB each, fp32\n" in large.stdout
    assert re.search(r"\n  host     1.1\d to 1.9\d GiB of each machine's 3.00: 1 process\n", large.stdout)
    assert re.search(
        r"\n  verdict  fits: 1.1\d to 1.9\d of 3.00 GiB in phase train, 1.0\d GiB to spare\n", large.stdout
    )


def test_a_described_cpu_is_planned_as_one(planned, tmp_path):
    """Of a process, as of a GPU: two of them have twice as much."""
    file = tmp_path / "laptop.yaml"
    file.write_text("name: CPU\ngpus: 2\nmemory_gib: 1.0\n", encoding="utf-8")
    done = planned("--target", str(file), "--explain")
    assert done.returncode == 3 and "(2 x CPU, 1.0 GiB each)" in done.stderr
    assert "plan of sft, on 2 x CPU, 1.0 GiB each (described), fp32\n" in done.stdout
    assert re.search(r"\n  host     2.2\d to 3.8\d GiB of each machine: 2 processes\n", done.stdout)
