"""What the reader of a stage sees, and what libraries print meanwhile: through the real command line."""

import errno
import fcntl
import logging
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import warnings
from pathlib import Path

import pyte
import pytest
from support import forks
from support.command_run import Ended, run_command
from support.messages import naming
from support.tiny_run import write_lines

FOLDER_SIZES = {"num_train": 24, "num_test": 4}
COLOUR = re.compile(r"\x1b\[(?:[0-9;]*;)?(?:3[0-8]|9[0-7])(?:;[0-9;]*)?m")
SFT = (
    *("--model-name-or-path", "base", "--data-path", "train.jsonl", "--eval-data-path", "test.jsonl"),
    *(
        "--max-seq-len",
        96,
        "--dtype",
        "fp32",
        "--max-steps",
        4,
        "--per-device-train-batch-size",
        4,
        "--monitors",
        "none",
    ),
)
# Text that steers a terminal, in the prompts that a table of samples shows.
STEERS = "[red]x[/red] <script>alert(1)</script> \x1b[31mred\r\x1b[2J"
SHOWN = r"[red]x[/red] <script>alert(1)</script> \x1b[31mred"
NOISE = (*("printed", "C on 1", "C on 2", "a warning", "a library's line", "DeepSpeed's line"),)


def be_noisy() -> None:
    """Let a stage's build print what libraries print, each line with the word noise."""
    from step1_sft import training

    build = training.build

    def noisy(*args):
        sft = build(*args)
        print("noise: printed")
        os.write(1, b"noise: C on 1\n")
        os.write(2, b"noise: C on 2\n")
        warnings.warn("noise: a warning", UserWarning, stacklevel=1)
        logging.getLogger("peft").warning("noise: a library's line")
        from deepspeed.utils import logger

        logger.warning("noise: DeepSpeed's line")
        logging.getLogger("peft").error("a library's error")
        return sft

    training.build = noisy


def heard(text: str) -> set[str]:
    return {noise for noise in NOISE if f"noise: {noise}" in text}


def test_a_pipe_gets_plain_complete_lines_and_libraries_are_heard_in_the_log_of_the_rank_alone(folder, tmp_path):
    done = run_command("step1_sft", [*SFT, "--output-dir", tmp_path / "sft"], folder=folder, first=be_noisy)
    run = tmp_path / "runs/sft"
    log, rank_log = ((run / name).read_text(encoding="utf-8") for name in ("log.txt", "log/rank-0.txt"))
    assert done.code == 0, done.stderr
    assert heard(done.stdout + done.stderr + log) == set() and heard(rank_log) == set(NOISE)
    assert "a library's error" in done.stderr and "a library's error" in log
    for text in (done.stdout, done.stderr, log):
        assert "\x1b" not in text and "\r" not in text and (not text or text.endswith("\n"))
        assert max(map(len, text.splitlines()), default=0) <= 200 + len(str(tmp_path)) * 2
    lines = done.stderr.splitlines()
    begin = lines.index("supervised fine-tuning, stage 1")
    assert [line.split()[0] for line in lines[begin + 1 : begin + 7]] == [
        "version", "models", "rows", "hardware", "batch", "output",
    ]  # fmt: skip
    assert "  batch     4 x 1 acc x 1 CPU = 4 rows a step, 4 steps" in lines
    assert re.search(r"models +model base: [1-9][\d,]+ parameters", done.stderr)
    steps = [line for line in lines if re.match(r"\[sft\] [14]/4  training loss [\d.]+  gradient norm [\d.]+ ", line)]
    assert len(steps) == 2, "beside no held-out loss of before training"
    assert re.search(r"held-out rows +held-out perplexity [\d.]+ -> [\d.]+ \(4 sequences\)", done.stderr)
    assert lines[-1].split() == ["model", str(tmp_path / "sft")]


@pytest.mark.slow
def test_verbose_shows_what_libraries_print(folder, tmp_path):
    words = [*SFT, "--output-dir", tmp_path / "sft", "--verbose"]
    done = run_command("step1_sft", words, folder=folder, first=be_noisy)
    assert done.code == 0 and heard(done.stdout + done.stderr) == set(NOISE)
    assert "Rank 0]" in done.stdout + done.stderr, "and what DeepSpeed logs of its engine"


def in_terminal(folder: Path, *command: object, columns: int = 80, **variables: str) -> tuple[int, str]:
    """Run a command in a pseudo-terminal so wide; return its exit code and all that it wrote there."""
    fd, inside = pty.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = {name: value for name, value in forks.environment().items() if name not in ("NO_COLOR", "COLUMNS")}
    process = subprocess.Popen(
        [sys.executable, *map(str, command)], cwd=folder, env=environment | {"TERM": "xterm-256color", **variables},
        stdin=subprocess.DEVNULL, stdout=inside, stderr=inside, start_new_session=True,
    )  # fmt: skip
    os.close(inside)
    seen = b""
    while True:
        try:
            part = os.read(fd, 65536)
        except OSError as error:
            assert error.errno == errno.EIO  # the other end is closed
            break
        if not part:
            break
        seen += part
    os.close(fd)
    return process.wait(), seen.decode()


def lines_of(seen: str) -> list[str]:
    """What a terminal that is wider than all lines shows of a text at its end, and whatever was above."""
    screen = pyte.HistoryScreen(400, 50, history=5000, ratio=1)
    pyte.Stream(screen).feed(seen)
    above = ["".join(line[x].data for x in range(400)).rstrip() for line in screen.history.top]
    return above + [line.rstrip() for line in screen.display]


@pytest.mark.slow
@pytest.mark.parametrize("columns", [40, 80, 120])
def test_no_line_is_wider_than_the_terminal(folder, tmp_path, columns):
    """The bar, too: each state of it is a line of what was written."""
    words = [*SFT, "--output-dir", os.path.relpath(tmp_path / "sft", folder), "--print-steps", 1]
    code, seen = in_terminal(folder, "-m", "step1_sft.main", *words, columns=columns)
    assert code == 0
    shown = lines_of(seen)
    states = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", state) for state in re.split(r"[\r\n]", seen)]
    paths = tmp_path.name  # no word of a path is cut
    assert [line for line in [*shown, *states] if len(line) > columns and paths not in line] == []
    first = "training loss" if columns > 40 else r"\d+s left"
    assert any(re.match(rf"\[sft\] #+-+ 2/4  {first}", state) for state in states)
    assert any(line.startswith("╭") for line in shown) and COLOUR.search(seen)
    numbers = " ".join(" ".join(shown).split())
    assert re.search(r"\[sft\] 4/4 training loss [\d.]+ gradient norm [\d.]+ tokens per", numbers)
    assert not any(line.startswith("[sft] #") for line in shown), "the bar goes at the end"


@pytest.mark.slow
def test_no_color_and_force_color(folder, tmp_path):
    words = [*SFT, "--output-dir", tmp_path / "sft", "--overwrite"]
    code, seen = in_terminal(folder, "-m", "step1_sft.main", *words, NO_COLOR="1")
    assert code == 0 and "╭" in seen and not COLOUR.search(seen)
    piped = run_command("step1_sft", words, folder=folder, FORCE_COLOR="1")
    assert piped.code == 0 and COLOUR.search(piped.stderr)
    assert "\r" not in piped.stderr and "\x1b[2K" not in piped.stderr, "no bar: nobody watches"
    assert "\x1b" not in (tmp_path / "runs/sft/log.txt").read_text(encoding="utf-8")


PPO = (
    *("--actor-model-name-or-path", "base", "--critic-model-name-or-path", "scorer", "--data-path", "train.jsonl"),
    *("--eval-data-path", "steers.jsonl", "--max-prompt-seq-len", 96, "--max-answer-seq-len", 8, "--dtype", "fp32"),
    *("--per-device-train-batch-size", 4, "--per-device-generation-batch-size", 4, "--monitors", "none"),
    *("--max-steps", 1),
)


@pytest.mark.slow
def test_samples_are_shown_and_steer_no_terminal(folder, tmp_path):
    write_lines(folder / "steers.jsonl", [{"prompt": STEERS, "chosen": "a", "rejected": "b"}])
    words = [*PPO, "--output-dir", tmp_path / "out"]
    code, seen = in_terminal(folder, "-m", "step3_ppo.main", *words, columns=200)
    log = (tmp_path / "out/runs/ppo/log.txt").read_text(encoding="utf-8")
    assert code == 0
    shown = [line for line in lines_of(seen) if line.startswith("│")]
    heads = [re.findall(r"\w+", line) for line in shown if re.match(r"\W+prompt\b", line)]
    assert heads == [["prompt", "answer", "score", "KL"]] * 2
    assert sum(SHOWN in line for line in shown) == 2, "of the evaluations before and after"
    assert "\x1b[31m" not in seen and "\x1b[2J" not in seen
    assert log.count(f"prompt: Human: {SHOWN}") == 2 and "\x1b" not in log and "\r" not in log


@pytest.mark.slow
def test_of_two_ranks_one_speaks(folder, tmp_path):
    words = [*SFT, "--output-dir", tmp_path / "sft", "--print-steps", 1]
    done: Ended = run_command("step1_sft", words, folder=folder, ranks=2)
    assert done.code == 0, done.stderr
    lines = done.stderr.splitlines()
    assert [line for line in lines if lines.count(line) > 1] == []
    assert "  batch     4 x 1 acc x 2 CPU = 8 rows a step, 4 steps" in lines
    assert [line.split()[1] for line in lines if re.match(r"\[sft\] \d/", line)] == ["1/4", "2/4", "3/4", "4/4"]
    assert (tmp_path / "runs/sft/log/rank-1.txt").is_file()


@pytest.mark.slow
def test_a_run_that_learns_nothing_is_told_of(folder, tmp_path):
    words = [*SFT, "--output-dir", tmp_path / "sft", "--max-steps", 124, "--num-train-epochs", 40]
    done = run_command("step1_sft", [*words, "--learning-rate", "1e-12"], folder=folder)
    said = [line for line in done.stderr.splitlines() if line.startswith("health: ")]
    assert done.code == 0 and len(said) == 1
    assert said[0] == naming("a quarter of the run ... --learning-rate")
    assert naming("an audit ... not a verdict") in done.stderr.splitlines()
    assert f"WARNING pipeline.training.health {said[0]}" in (tmp_path / "runs/sft/log.txt").read_text(encoding="utf-8")
