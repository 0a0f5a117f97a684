"""Names that a shell, a terminal or a file system might take for something else: used as they are, or refused."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from input_calls import MAINS, call, flags, stage_words, stopped_at_the_models
from support.launch_stub import ROOT, stub_environment
from support.marks import slow_but
from support.messages import naming

FOLDER_SIZES = {"num_train": 12, "num_test": 2}
USED = [
    "a; touch X", "$(touch X)", "`touch X`", "a && touch X", "a | touch X", "a > X", "a & touch X", "${HOME}", "$IFS",
    'a"b', "a'b", "a b", " a", "a\\b", "*", "?", "[x]", "{x,y}", "#x", "%s%n", "{0}", "-dash", "--flag", ".hidden",
    "ünïcödé", "日本語", "a=b", "a,b", "a@b", "CON", "null", "true", "1e5", "../up", "a/../../up", "x:y",
]  # fmt: skip
QUICK = [
    "a; touch X",
    "$(touch X)",
    "`touch X`",
    'a"b',
    " a",
    "a\\b",
    "*",
    "%s%n",
    "-dash",
    ".hidden",
    "日本語",
    "../up",
]
REFUSED = [
    "a\nb",
    "a\r\nb",
    "a\0b",
    "\x1b[31m",
    "a\tb",
    "\u202eabc",
    "\ud800",
    "a" * 300,
    "é" * 200,
    "~nobody/x",
    "/proc/1/x",
]
FLAGS = ("output_dir", "data_path", "model_name_or_path")


@pytest.fixture
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, two levels down, so that `..` stays in the test's own."""
    where = tmp_path / "one" / "two"
    where.mkdir(parents=True)
    monkeypatch.chdir(where)
    return where


def stage_flags(folder: Path, out: Path, **changes: object) -> list[str]:
    """Each flag as one word, since a value may start with dashes."""
    words = stage_words("sft", folder, out, **changes)
    return [f"{name}={value}" for name, value in zip(words[::2], words[1::2], strict=True)]


def made_below(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*")]


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that could be a hub id is not looked up: a network without answers takes its time."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)


def test_there_are_forty() -> None:
    assert len(USED) + len(REFUSED) >= 40


@pytest.mark.parametrize("name", slow_but(QUICK, USED), ids=ascii)
def test_a_strange_name_is_used_as_it_is(
    name: str, folder: Path, inside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As output folder the run comes to its model; as path of data or model, where there is nothing, it is named."""
    with stopped_at_the_models(monkeypatch):
        ending = call("sft", stage_flags(folder, inside, output_dir=name))
        assert ending.loaded, ending.stderr
        assert (Path(name).parent / "runs" / Path(name).name / "log.txt").is_file()
        for flag in FLAGS[1:]:
            ending = call("sft", stage_flags(folder, inside, **{flag: name}))
            assert ending.code in (2, 3) and len(ending.errors) == 1 and not ending.loaded, ending.stderr
    assert "X" not in made_below(inside.parent)


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("name", REFUSED, ids=ascii)
def test_a_name_that_no_file_can_have_is_refused(name: str, flag: str, folder: Path, inside: Path) -> None:
    before = made_below(inside)
    ending = call("sft", stage_flags(folder, inside, **{flag: name}))
    assert ending.code in (2, 3) and len(ending.errors) == 1, ending.stderr
    assert all(character.isprintable() for character in ending.errors[0])
    assert flag != "output_dir" or made_below(inside) == before


@pytest.mark.parametrize("command", [name for name in MAINS if name != "train"])
def test_control_characters_are_refused_by_every_command(command: str, folder: Path, inside: Path) -> None:
    flag = {"chat": "path", "prompt_eval": "prompts", "ppo": "actor_model_name_or_path"}.get(command, "data_path")
    ending = call(command, stage_words(command, folder, inside, **{flag: "a\x1b[2Jb"}))
    assert ending.code == 2 and len(ending.errors) == 1
    assert "a control character" in ending.errors[0] and "\x1b" not in ending.stderr


def test_bytes_that_the_locale_does_not_read_are_not_called_control_characters(folder: Path, inside: Path) -> None:
    """As Python has `modèle` in a C locale without its UTF-8 mode."""
    name = "mod\u00e8le".encode().decode("ascii", "surrogateescape")
    ending = call("sft", stage_words("sft", folder, inside, data_path=inside / name))
    assert ending.code == 2 and len(ending.errors) == 1
    assert ending.errors[0] == naming("text ... locale ... LC_ALL=C.UTF-8 ... ASCII")


@pytest.mark.parametrize("flag", ["output_dir", "run_dir", "data_output_path"])
def test_a_file_in_the_place_of_a_folder_and_a_tilde_are_refused(flag: str, folder: Path, inside: Path) -> None:
    (inside / "file").write_text("precious")
    for value, says in ((inside / "file", "a file, expected a folder"), ("~/out", "only a shell replaces the ~")):
        ending = call("sft", stage_flags(folder, inside, **{flag: value}))
        assert ending.code == 2 and says in ending.errors[0]
    assert (inside / "file").read_text() == "precious" and not (inside / "~").exists()


@pytest.mark.parametrize("holds", ["nothing", "files", "an earlier model"])
def test_a_linked_output_folder_is_refused_or_used_and_what_it_points_to_is_kept(
    holds: str, folder: Path, inside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = inside / "target"
    target.mkdir()
    if holds != "nothing":
        (target / "precious").write_text("precious")
    if holds == "an earlier model":
        (target / "training_config.json").write_text("{}")
    (inside / "link").symlink_to(target)
    ending = call("sft", stage_flags(folder, inside, output_dir=inside / "link"))
    assert ending.code in (0, 2), ending.stderr
    if ending.code == 2:
        assert len(ending.errors) == 1 and str(inside / "link") in ending.errors[0]
        assert (holds == "nothing") or (target / "precious").read_text() == "precious"
    else:
        assert (inside / "link" / "config.json").is_file()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name", slow_but(["$(touch X)", "a'b"], ["a; touch X", "$(touch X)", "`touch X`", "a'b", "* ?"]), ids=ascii
)
def test_the_launch_script_hands_words_on_unchanged(name: str, tmp_path: Path) -> None:
    data = f"{name}.jsonl"
    command = ["bash", str(ROOT / "launch" / "single_gpu.sh"), "1", "--output-dir", name, "--data-path", data]
    environment = stub_environment(tmp_path, gpus=1, STUB_OUTCOMES="0")
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    words = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[0])["argv"]
    assert words[words.index("--output-dir") + 1] == name and words[words.index("--data-path") + 1] == data
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["bin", "log.jsonl", "runs", "site", name])


SHELL_NAMES = ("$(touch X)", "a; touch X", "a\ntouch X", "-oProxyCommand=touch X")
FOLDER_FLAGS = [("output-dir", name) for name in SHELL_NAMES]  # these names are taken, and a plan is made of them
REFUSING_FLAGS = ("actor-model", "hostfile", "include", "master-addr")


@pytest.mark.parametrize(
    ("flag", "name"),
    [*slow_but((), FOLDER_FLAGS), *((flag, name) for flag in REFUSING_FLAGS for name in SHELL_NAMES)],
)
def test_train_starts_no_shell_on_a_name(name: str, flag: str, inside: Path) -> None:
    words = flags(step=1, **{flag.replace("-", "_"): name})
    ending = call("train", [f"{words[0]}={words[1]}", f"{words[2]}={words[3]}", "--dry-run"])
    assert ending.code in (0, 2, 3), ending.stderr
    assert made_below(inside.parent) == [inside.name] and "X" not in os.listdir(ROOT)
