"""The file of `rlhf sample`: what is written, cut off, refused and left as it is."""

import json
import threading
from pathlib import Path

import pytest
from support.messages import naming

from pipeline.errors import EnvironmentFault, InputError
from rlhf.rewards import sample_file
from rlhf.rewards.sample_file import SampleFile, join_parts, open_samples, output_held, part_of

SETTINGS = {"seed": 1, "functions": [("f", 1.0)]}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The folder of the file."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(*numbers: int, overwrite: bool = False) -> SampleFile:
    """Write rows of these prompts into a.jsonl."""
    file = open_samples(Path("a.jsonl"), SETTINGS, overwrite=overwrite)
    for number in numbers:
        file.write(number, {"text": f"é\u2028{number}"})
    return file


def test_rows_are_one_line_each_and_counted():
    assert written(1, 4) == SampleFile(Path("a.jsonl"), num_rows=2, last=4)
    assert written(5) == SampleFile(Path("a.jsonl"), num_rows=3, last=5)
    text = Path("a.jsonl").read_text(encoding="utf-8")
    assert [json.loads(line) for line in text.split("\n")[:-1]] == [
        {"number": number, "text": f"é\u2028{number}"} for number in (1, 4, 5)
    ]
    assert sorted(path.name for path in Path().iterdir()) == ["a.jsonl", "a.jsonl.settings.json"]
    assert written(2, overwrite=True) == SampleFile(Path("a.jsonl"), num_rows=1, last=2)


def test_a_torn_row_is_cut_off_at_any_byte():
    written(1, 2)
    whole = Path("a.jsonl").read_bytes()
    first = whole.index(b"\n") + 1
    for cut in range(len(whole) + 1):
        Path("a.jsonl").write_bytes(whole[:cut])
        rows = (cut >= first) + (cut == len(whole))
        assert written() == SampleFile(Path("a.jsonl"), num_rows=rows, last=rows)
        assert Path("a.jsonl").read_bytes() == (b"", whole[:first], whole)[rows]


def test_without_a_file_rows_go_to_standard_output(capsys, folder):
    open_samples(None, SETTINGS, overwrite=False).write(3, {"a": "é"})
    assert capsys.readouterr().out == '{"number": 3, "a": "é"}\n' and not list(folder.iterdir())


@pytest.mark.parametrize(
    "foreign", [b'{"prompt": "x"}\n', b"text\n", b"[1]\n", b"\xff\n", b'{"number": 2}\n', b'{"number": "9"}\n']
)
def test_a_line_that_is_no_next_row_is_refused_and_left(foreign):
    written(1, 2)
    whole = Path("a.jsonl").read_bytes() + foreign + b'{"number": 3}\n{"torn'
    Path("a.jsonl").write_bytes(whole)
    with pytest.raises(InputError, match=naming("--output: a.jsonl:3 ... the next row ... `rlhf sample`")):
        written(3)
    assert Path("a.jsonl").read_bytes() == whole


def test_a_file_without_its_settings_or_with_others_is_refused():
    Path("a.jsonl").write_text("mine")
    with pytest.raises(InputError, match=naming("--output: a.jsonl exists ... a.jsonl.settings.json")):
        written(1)
    assert Path("a.jsonl").read_text() == "mine" and written(1, overwrite=True).num_rows == 1
    others = SETTINGS | {"seed": 2, "more": None}
    with pytest.raises(InputError, match=naming("a.jsonl ... seed 1, now 2 ... another --output")):
        open_samples(Path("a.jsonl"), others, overwrite=False)
    Path("a.jsonl").write_bytes(b"")
    assert open_samples(Path("a.jsonl"), others, overwrite=False).last == 0
    assert json.loads(Path("a.jsonl.settings.json").read_text()) == json.loads(json.dumps(others))


def test_a_disk_that_refuses():
    Path("full.jsonl").symlink_to("/dev/full")
    file = open_samples(Path("full.jsonl"), SETTINGS, overwrite=False)
    with pytest.raises(EnvironmentFault, match=naming("full.jsonl ... cannot be written ... No space left")):
        file.write(1, {})
    Path("folder").mkdir()
    with pytest.raises(EnvironmentFault, match=naming("folder ... cannot be written ... a directory")):
        open_samples(Path("folder"), SETTINGS, overwrite=True)


def test_of_ranks_that_end_together_one_joins_the_parts(tmp_path):
    """The first one has seen that the second part is not whole, and still holds the file as the second one ends."""
    file, settings = tmp_path / "a.jsonl", {"seed": 1}
    for rank in range(2):
        open_samples(part_of(file, rank, 2), settings, overwrite=False).write(rank + 1, {"text": str(rank)})
    assert join_parts(file, settings, rank=0, size=2) == 0
    holds, ended = threading.Event(), threading.Event()

    def hold() -> None:
        with output_held(file):
            holds.set()
            ended.wait(0.2)

    first = threading.Thread(target=hold)
    first.start()
    holds.wait()
    assert join_parts(file, settings, rank=1, size=2) == 2
    first.join()
    assert [json.loads(line)["number"] for line in file.read_text().splitlines()] == [1, 2]
    assert not list(tmp_path.glob("*part-*"))


def test_a_rank_looks_for_the_others_after_its_own_part_is_whole(tmp_path, monkeypatch):
    """The other rank ends while this one flushes its part: one of the two has to see both."""
    file, settings = tmp_path / "a.jsonl", {"seed": 1}
    for rank in range(2):
        open_samples(part_of(file, rank, 2), settings, overwrite=False).write(rank + 1, {"text": str(rank)})
    flush, joined = sample_file.flush, []

    def ended_meanwhile(path: Path) -> None:
        flush(path)
        if path == part_of(file, 1, 2) and not joined:
            joined.append(join_parts(file, settings, rank=0, size=2))

    monkeypatch.setattr(sample_file, "flush", ended_meanwhile)
    joined.append(join_parts(file, settings, rank=1, size=2))
    assert joined == [0, 2] and len(file.read_text().splitlines()) == 2
