"""From the ranks' ends to one exit code and the lines that name the first cause."""

import io
from pathlib import Path

import pyte
import pytest
from support.messages import naming

from pipeline.errors import say
from pipeline.heartbeat import Beat
from pipeline.launching.rank_watch import RankState
from pipeline.launching.verdict import JobStatus, hang_verdict, verdict_on
from pipeline.processes import Process
from pipeline.run.outcome import Outcome

MIB = 2**20
RUN = Path("out/runs/sft")


def rank(number, code=None, message="stub", *, at=0.0, secondary=False, died=None, exit_code=None, halved=None):
    """A rank at step 7 of training that ended with `code` at time `at`, or was seen dead at `died`."""
    said = Outcome(number, code, message, secondary, 100 + number, f"node-{number}", "s", at, halved or {})
    return RankState(said, 0.0, Beat("train", 7, 0.0), Process(1, "sleeping", 1.0, 300 * MIB), died, exit_code)


def status(silent_code=None, *, asked=False, memory="1.0 of 23.0 GiB were free", oom_kills=0):
    return JobStatus(RUN, silent_code, asked, memory, oom_kills)


@pytest.mark.parametrize(
    ("ranks", "asked", "code"),
    [
        ([rank(0, 0), rank(1, 0)], False, 0),
        ([rank(0, 1), rank(1, 3)], False, 3),
        ([rank(0, 75), rank(1, 4)], True, 4),
        ([rank(0, 139), rank(1, 0)], False, 1),
        ([rank(0, 75), rank(1, 75)], True, 75),
        ([rank(0, 75), rank(1, 75)], False, 75),  # somebody signalled the ranks themselves
        ([rank(0, 75), rank(1, 1, secondary=True)], True, 75),  # it lost the rank that had stopped already
        ([rank(0, 75), rank(1, died=1.0)], True, 1),
        ([rank(0, 75), rank(1)], True, 75),  # the other one is being killed: it could not hear us
        ([rank(0), rank(1)], True, 75),
        ([rank(0, 0), rank(1)], False, 1),
        ([rank(0, 0), rank(1)], True, 1),
        ([rank(0, 0), rank(1, died=1.0)], False, 1),
        ([rank(0, 1, secondary=True)], False, 1),
    ],
)
def test_codes(ranks, asked, code):
    assert verdict_on(ranks, status(asked=asked)).code == code


@pytest.mark.parametrize(
    ("ranks", "first"),
    [
        ([rank(0, 1, "Late: b", at=2.0), rank(1, 1, "Early: a", at=1.0)], "rank 1 on node-1, step 7, phase train: E"),
        ([rank(0, 1, "gloo", at=1.0, secondary=True), rank(1, 1, "Real: a", at=2.0)], "rank 1 on node-1, step 7"),
        ([rank(0, 1, "gloo", at=1.0, secondary=True), rank(1, died=5.0)], "rank 1 on node-1, step 7, phase train: its"),
        ([rank(0, died=2.0), rank(1, died=1.0)], "rank 1 on node-1"),
        ([rank(0, 1, "Real: a", at=2.0), rank(1, died=1.0)], "rank 0 on node-0, step 7, phase train: Real: a"),
        ([rank(0, 1, "b", at=2.0, secondary=True), rank(1, 1, "a", at=1.0, secondary=True)], "rank 1 on node-1"),
    ],
)  # fmt: skip
def test_the_first_cause_is_named_once(ranks, first):
    lines = verdict_on(ranks, status()).lines
    assert lines[0].startswith(f"error: {first}") and len(lines) == 2
    number = first.split()[1]
    assert lines[1] == f"error: its log: {RUN}/log/rank-{number}.txt"


def test_out_of_memory_starts_the_job_again_unless_it_was_to_stop():
    ranks = [rank(0), rank(1, 3, "out of memory", halved={"train": (8, 4)})]
    assert verdict_on(ranks, status()).halved == {"train": (8, 4)}
    assert verdict_on(ranks, status(asked=True)).halved == {}


def test_an_error_that_all_meet_is_not_one_ranks():
    both = [rank(0, 2, "--a: x\n--b: y", at=1.0), rank(1, 2, "--a: x\n--b: y", at=2.0)]
    assert verdict_on(both, status()).lines == ["error: --a: x", "error: --b: y"]
    alone = verdict_on([rank(0), rank(1, 3, "no device")], status())
    assert alone.code == 3
    assert alone.lines == [
        "error: no device",
        naming("error: rank 1 on node-1, step 7 ... this rank only"),
        f"error: its log: {RUN}/log/rank-1.txt",
    ]


def test_the_verdict_replaces_the_progress_bar_of_a_killed_rank(monkeypatch):
    screen = pyte.Screen(60, 4)
    terminal, stream = pyte.Stream(screen), io.StringIO()
    terminal.feed("\x1b[?25lstep 3 of 9, 27 s left")  # the bar hides the cursor
    stream.isatty = lambda: True
    monkeypatch.setattr("sys.stderr", stream)
    say("error: rank 0", "error: its log")
    terminal.feed(stream.getvalue().replace("\n", "\r\n"))
    assert [line.rstrip() for line in screen.display[:2]] == ["error: rank 0", "error: its log"]
    assert not screen.cursor.hidden


def test_a_file_gets_no_control_characters(capsys):
    say("error: rank 0", "error: its log")
    assert capsys.readouterr().err == "error: rank 0\nerror: its log\n"


def test_what_killed_a_rank():
    def line(exit_code, **changes):
        ranks = [rank(0), rank(1, died=1.0, exit_code=exit_code)]
        return (
            verdict_on(ranks, status(**changes)).lines[0].removeprefix("error: rank 1 on node-1, step 7, phase train: ")
        )

    assert line(-9) == naming("SIGKILL ... out of memory? ... 300 MiB, 1.0 of 23.0 GiB")
    assert line(-9, memory="", oom_kills=1) == naming("SIGKILL ... the kernel ... lack of memory ... 300 MiB")
    assert line(-11) == "killed by SIGSEGV" and line(-50) == "killed by signal 50"
    assert line(3) == "its process ended with 3"
    assert line(None, memory="") == naming("gone ... out of memory? ... 300 MiB")


def test_a_rank_that_ends_before_it_can_write_how():
    """An input error has been printed by the rank; the others may run, and have met nothing."""
    for ranks in ([], [rank(0)]):
        assert (verdict_on(ranks, status(3)).code, verdict_on(ranks, status(3)).lines) == (3, [])
        killed = verdict_on(ranks, status(-11))
        assert killed.code == 1
        assert killed.lines == [naming("error: ... SIGSEGV ... before it had started")]
        assert verdict_on(ranks, status(1, asked=True)).code == 75
    assert verdict_on([], status()).lines == [naming("error: ... ended with 0 ... before it had started")]
    assert verdict_on([rank(0, 4)], status(1)).code == 4, "an error that was written explains more"


def test_a_hang():
    verdict = hang_verdict(rank(1), status())
    assert verdict.code == 1 and "no sign of life for" in verdict.lines[0] and "in phase train" in verdict.lines[0]
    assert "rank 1 on node-1, step 7" in verdict.lines[0]
