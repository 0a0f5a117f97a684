"""Local files of every kind give the same rows; what is broken or missing is named with file, line and remedy."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
from support.forks import ROOT
from support.messages import naming

from pipeline.data import readers
from pipeline.data.sources import fingerprint, looks_local, parse_path, read_rows, split_of
from pipeline.errors import EnvironmentFault, InputError

ROWS = [{"prompt": "p1", "chosen": "c1"}, {"prompt": "p, 2\nzwei", "chosen": "é"}]


def write(path: Path, content: bytes) -> str:
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return str(path)


def contents(suffix: str, tmp_path: Path) -> bytes:
    if suffix == ".jsonl":
        return "\n".join(json.dumps(row) for row in ROWS).encode()
    if suffix == ".json":
        return json.dumps(ROWS, indent=2).encode()
    if suffix == ".csv":
        return 'prompt,chosen\np1,c1\n"p, 2\nzwei",é\n'.encode()
    datasets.Dataset.from_list(ROWS).to_parquet(tmp_path / "made.parquet")
    return (tmp_path / "made.parquet").read_bytes()


@pytest.mark.parametrize("packed", ["", ".gz"])
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_every_file_kind_gives_the_same_rows(tmp_path, suffix, packed):
    path = write(tmp_path / f"data{suffix}{packed}", contents(suffix, tmp_path))
    rows = list(read_rows(path))
    assert [row.values for row in rows] == ROWS
    assert all(row.split is None and row.origin.file == path for row in rows)


def test_text_file_gives_one_document_per_block(tmp_path):
    path = write(tmp_path / "a.txt", b"\n\none\ntwo\n  \n\nthree\r\n")
    rows = list(read_rows(path))
    assert [(row.values["text"], row.origin.row) for row in rows] == [("one\ntwo", 3), ("three", 7)]


def test_bom_crlf_and_blank_lines_are_tolerated(tmp_path):
    path = write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"prompt": "b"}\r\n')
    assert [(row.values["prompt"], row.origin.row) for row in read_rows(path)] == [("a", 1), ("b", 3)]


@pytest.mark.parametrize(
    ("name", "content", "where", "what"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a": 2\n', ":2", "broken JSON"),
        ("a.jsonl", b'{"a": 1}\n{"a": 1, "b": }\n', ":2", "broken JSON (Expecting value ... column 15)"),
        ("a.jsonl", b'{"a": 1}\n[1]\n', ":2", "JSON list"),
        ("a.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', ":2", "not UTF-8"),
        ("a.jsonl", b"", "a.jsonl", "no rows"),
        ("a.jsonl", b"\n \n", "a.jsonl", "no rows"),
        ("a.json", b'[{"a": 1}, 2]', "row 2", "JSON int"),
        ("a.json", b'[{"a": 1}', "a.json", "broken JSON"),
        ("a.json", b"[]", "a.json", "no rows"),
        ("a.csv", b"a,b\n1,2\n3\n", ":3", "2 columns"),
        ("a.csv", b"a,b\n1,2,3\n", ":2", "2 columns"),
        ("a.csv", b"prompt;chosen\nq;a, b\n", ":1", "one column ... 'prompt;chosen' ... commas"),
        ("a.csv", b"a\n\xff\n", "a.csv", "UTF-8"),
        ("a.parquet", b"PAR1 nonsense", "a.parquet", "broken parquet"),
    ],
)
def test_broken_files_are_named_with_their_line(tmp_path, name, content, where, what):
    path = write(tmp_path / name, content)
    with pytest.raises(InputError) as error:
        list(read_rows(path))
    message = str(error.value)
    assert where in message and message == naming(what) and path in message
    assert "\n" not in message


def test_damaged_gzip_is_named(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"a": 1}\n' * 1000)[:-20])
    with pytest.raises(InputError, match="damaged gzip"):
        list(read_rows(str(tmp_path / "a.jsonl.gz")))


LONG = [
    (
        "a.jsonl.gz",
        b'{"a": 1}\n{"a": "' + b"x" * 900 + b'"}\n',
        ":2: ... more than 900 bytes ... .jsonl",
    ),
    ("a.json", b'[{"a": "' + b"x" * 900 + b'"}]', ":1: ... more than 900 bytes ... .jsonl"),
    ("a.csv", b"a,b\n1," + b"x" * 900 + b"\n", ":2: ... more than 900 bytes ... .jsonl"),
    ("a.csv.gz", b'a,b\n1,"' + b"x\n" * 500 + b'"\n', ":2: ... field limit (900)"),
    ("a.txt", b"one\n\n" + b"x" * 901, ":3: ... more than 900 bytes ... .jsonl"),
]


@pytest.mark.parametrize(("name", "content", "says"), LONG)
def test_a_line_beyond_the_limit_is_refused(tmp_path, monkeypatch, name, content, says):
    monkeypatch.setattr(readers, "MAX_LINE_BYTES", 900)
    path = write(tmp_path / name, content)
    with pytest.raises(InputError) as error:
        list(read_rows(path))
    assert str(error.value) == naming(f"{path}{says}")


def test_a_line_at_the_limit_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "MAX_LINE_BYTES", 900)
    line = b'{"a": "' + b"x" * 890 + b'"}\n'
    assert len(line) == 900
    assert len(list(read_rows(write(tmp_path / "a.jsonl.gz", line * 3)))) == 3


@pytest.mark.slow
def test_a_line_without_end_in_a_small_file_takes_no_more_memory_than_the_limit(tmp_path):
    """4 GiB of one letter are 4 MiB packed. A process of its own: memory that was used once counts for ever."""
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b"x" * 2**24) * 2**8)
    code = (
        f"import resource as r\nfrom pathlib import Path\nfrom pipeline.data.readers import read_file\n"
        f"try:\n    list(read_file(Path({str(path)!r})))\nfinally:\n    print(r.getrusage(r.RUSAGE_SELF).ru_maxrss)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert "more than 1,073,741,824 bytes" in ended.stderr
    assert int(ended.stdout) < 2.5 * 2**20


def test_of_a_block_of_text_that_is_dropped_few_lines_are_kept(tmp_path, monkeypatch):
    """It is still longer than a row may be."""
    monkeypatch.setattr(readers, "MAX_ROW_CHARS", 999)
    path = write(tmp_path / "a.txt.gz", b"four\n" * 200 + b"\n" + b"four\n" * 5000 + b"\nnext\n")
    whole, cut, after = read_rows(path)
    assert whole.values["text"] == "four\n" * 199 + "four"  # 999 characters
    assert len(cut.values["text"]) == 1004
    assert (after.values["text"], after.origin.row) == ("next", 5203)


def test_missing_file_is_named_with_the_nearest_name_and_never_sought_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: pytest.fail("the hub was asked"))
    write(tmp_path / "prefs.jsonl", b"{}")
    with pytest.raises(InputError, match="did you mean prefs.jsonl"):
        list(read_rows(str(tmp_path / "pref.jsonl")))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for path in ("pref.jsonl", "./x", "~/no/such", "data/missing", "a/b/c"):
        assert looks_local(path)
        with pytest.raises(InputError, match="no such file or folder"):
            list(read_rows(path))
    assert not looks_local("Dahoas/rm-static")
    assert not looks_local("imdb")


def test_folder_of_files_gives_splits_by_name(tmp_path):
    for name in ("train.jsonl", "test-00000-of-00001.jsonl", "eval.csv", "other.json", ".hidden.jsonl", "README.md"):
        content = b"prompt\nx\n" if name.endswith("csv") else b'{"prompt": "x"}'
        write(tmp_path / name, content)
    found = {Path(row.origin.file).name: row.split for row in read_rows(str(tmp_path))}
    expected = {"train.jsonl": "train", "test-00000-of-00001.jsonl": "test", "eval.csv": "test", "other.json": None}
    assert found == expected


def test_folders_that_a_run_wrote_are_no_data(tmp_path, caplog):
    """Neither as rows nor in the hash; folders that only look like them are data."""
    for place in ("files", "saved"):
        folder = tmp_path / place
        folder.mkdir()
        write(folder / "train.jsonl", b'{"prompt": "x"}')
        if place == "saved":
            datasets.Dataset.from_list(ROWS).save_to_disk(folder)
        rows, before = list(read_rows(str(folder))), fingerprint(str(folder))
        for mark in ("training_config.json", "run.lock", "CACHEDIR.TAG"):
            (folder / f"out/{mark}/log").mkdir(parents=True)
            for name in (mark, "config.json", "log/rank-0.txt", "samples.jsonl"):
                write(folder / f"out/{mark}/{name}", b'{"prompt": "y"}')
        assert list(read_rows(str(folder))) == rows and fingerprint(str(folder)) == before
        said = {record.getMessage() for record in caplog.records if place in record.getMessage()}
        assert len(said) == 3 and naming(f"{folder}/out/run.lock ... a run wrote it") in list(said)
    write(tmp_path / "files/out/config.json", b'{"prompt": "z"}')
    assert [row.values["prompt"] for row in read_rows(str(tmp_path / "files"))] == ["z", "x"]


def test_links_that_lead_out_of_a_folder_are_named_but_those_of_a_hub_cache(tmp_path, caplog):
    folder, line = tmp_path / "snapshots" / "main", json.dumps(ROWS[0]).encode()
    for place in (folder, tmp_path / "blobs"):
        place.mkdir(parents=True)
    write(tmp_path / "blobs" / "1", line)
    write(tmp_path / "secret.jsonl", line)
    for name, target in (("a", "../../blobs/1"), ("b", "a.jsonl"), ("c", "../../secret.jsonl")):
        (folder / f"{name}.jsonl").symlink_to(target)
    for _ in range(2):
        assert len(list(read_rows(str(folder)))) == 3
    assert caplog.messages == [naming(f"{folder}/c.jsonl ... a link ... {tmp_path}/secret.jsonl")]


def test_folder_without_data_is_refused(tmp_path):
    (tmp_path / "README.md").write_text("x")
    with pytest.raises(InputError, match=r"no data file; .jsonl"):
        list(read_rows(str(tmp_path)))


def test_saved_dataset_folder_gives_its_splits(tmp_path):
    parts = {"train": datasets.Dataset.from_list(ROWS), "validation": datasets.Dataset.from_list(ROWS[:1])}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "both")
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "one")
    assert [row.split for row in read_rows(str(tmp_path / "both"))] == ["train", "train", "test"]
    assert [row.values for row in read_rows(str(tmp_path / "one"))] == ROWS


@pytest.mark.parametrize(
    ("raised", "expected", "text"),
    [
        (ConnectionError("offline"), EnvironmentFault, "datasets.load_dataset('some/set') once"),
        (datasets.exceptions.DatasetNotFoundError("x"), InputError, "neither a local path nor"),
        (RuntimeError("Dataset scripts are no longer supported"), InputError, "no longer supported"),
    ],
)
def test_hub_failures_end_in_one_line(monkeypatch, raised, expected, text):
    def fail(path):
        raise raised

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(expected) as error:
        list(read_rows("some/set"))
    assert text in str(error.value) and "\n" not in str(error.value)


def test_weights(tmp_path, monkeypatch):
    assert parse_path("a.jsonl:0.7") == ("a.jsonl", 0.7)
    assert parse_path("Dahoas/rm-static") == ("Dahoas/rm-static", 1.0)
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "odd:0.5", b"")
    assert parse_path("odd:0.5") == ("odd:0.5", 1.0)
    for text in ("a.jsonl:0", "a.jsonl:1.5", "a.jsonl:-1", "a.jsonl:nan", "a.jsonl:x", ":0.5"):
        with pytest.raises(InputError, match="got the weight"):
            parse_path(text)


def test_fingerprint_follows_the_content(tmp_path):
    first = write(tmp_path / "a.jsonl", b'{"a": 1}')
    before = fingerprint(first)
    assert fingerprint(first) == before
    write(tmp_path / "a.jsonl", b'{"a": 2}')
    assert fingerprint(first) != before
    before = fingerprint(str(tmp_path))
    write(tmp_path / "b.jsonl", b'{"a": 2}')
    assert fingerprint(str(tmp_path)) != before


def test_split_names():
    assert [split_of(n) for n in ("train", "test", "validation", "dev", "test_sft", "eval.jsonl")] == ["train"] + [
        "test"
    ] * 5
    assert [split_of(n) for n in ("testimony", "other", "", None)] == [None] * 4
