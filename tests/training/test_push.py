"""`--push-to-hub` against a stand-in for the hub on loopback: what is uploaded, and what is refused before a run."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hub_server import Hub, hub_server
from support.in_process import error_lines, undone_afterwards
from support.messages import naming
from support.run_words import run_words

from pipeline import hub
from pipeline.errors import EXIT_DONE, EXIT_ENVIRONMENT, EXIT_INPUT
from pipeline.preparation.preflight import look_before_start
from pipeline.preparation.stage_entry import read_flags
from step1_sft.main import main as sft
from step1_sft.stage import STAGE
from step3_ppo.main import main as ppo

FOLDER_SIZES = {"num_train": 12, "num_test": 2}
TOKEN = "hf_CANARYcanaryCANARYcanaryCANARY012345"
COMMIT = "/api/models/org/tiny/commit/"


@pytest.fixture(autouse=True)
def reachable_anew() -> Iterator[None]:
    hub.is_reachable.cache_clear()
    yield
    hub.is_reachable.cache_clear()


def use(served: Hub | None, monkeypatch: pytest.MonkeyPatch, *, token: str = TOKEN, offline: bool = False) -> None:
    """Make the hub's client ask this hub, with this token."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", served.url if served else "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", "/nowhere/token")
    for name in hub.PROXIES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_TOKEN", token)


def words(folder: Path, out: Path, *further: str) -> list[str]:
    flags = {
        "max_steps": 1, "per_device_train_batch_size": 4, "monitors": "none", "output_dir": out,
        "push_to_hub": "org/tiny",
    }  # fmt: skip
    return [*run_words(folder, **flags), *further]


def sft_words(folder: Path, out: Path) -> list[str]:
    return words(folder, out, "--model-name-or-path", str(folder / "base"), "--max-seq-len", "96")


def run(main, argv: list[str]) -> int:
    with undone_afterwards():
        return main(argv)


def texts_below(folder: Path) -> str:
    return "".join(file.read_text(errors="replace") for file in folder.rglob("*") if file.is_file())


def test_the_finished_model_is_uploaded_whole(folder, tmp_path, monkeypatch, capfd) -> None:
    with hub_server() as served:
        use(served, monkeypatch)
        assert run(sft, sft_words(folder, tmp_path / "sft")) == EXIT_DONE
    (created,) = served.created
    assert (created["organization"], created["name"]) == ("org", "tiny")
    assert created.get("visibility") == "private" or created.get("private") is True, "older clients say the latter"
    files = {str(file.relative_to(tmp_path / "sft")): file for file in (tmp_path / "sft").rglob("*") if file.is_file()}
    assert served.files == {name: file.read_bytes() for name, file in files.items()} and "README.md" in files
    assert served.tokens == {f"Bearer {TOKEN}"}
    printed = "".join(capfd.readouterr())
    assert f"uploaded to {served.url}/org/tiny" in printed and "\r" not in printed and "HTTP" not in printed
    assert TOKEN not in printed + texts_below(tmp_path)


def test_of_several_models_the_actor_is_uploaded(folder, tmp_path, monkeypatch) -> None:
    start = ("--actor-model-name-or-path", str(folder / "base"), "--critic-model-name-or-path", str(folder / "scorer"))
    lengths = ("--max-prompt-seq-len", "48", "--max-answer-seq-len", "4")
    with hub_server() as served:
        use(served, monkeypatch)
        assert run(ppo, words(folder, tmp_path / "out", *start, *lengths)) == EXIT_DONE
    assert served.files["model.safetensors"] == (tmp_path / "out/actor/model.safetensors").read_bytes()


def test_a_refused_upload_is_one_line_and_leaves_the_model(folder, tmp_path, monkeypatch, capfd) -> None:
    out = tmp_path / "my sft"
    with hub_server(COMMIT) as served:
        use(served, monkeypatch)
        assert run(sft, sft_words(folder, out)) == EXIT_ENVIRONMENT
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert line == naming("error: --push-to-hub org/tiny ... no right to do this")
    assert line == naming(f"{out}: hf upload org/tiny '{out}' . --private")
    assert (out / "model.safetensors").is_file() and (tmp_path / "runs/my sft/done.json").is_file()
    assert TOKEN not in line + texts_below(tmp_path) and served.files == {}
    outcome = json.loads((tmp_path / "runs/my sft/outcome/rank-0.json").read_text())
    assert outcome["code"] == EXIT_ENVIRONMENT


@pytest.mark.parametrize(
    ("has_server", "change", "expected"),
    [
        (True, {"token": ""}, "no token ... `hf auth login` ... HF_TOKEN"),
        (True, {"offline": True}, "cannot be reached ... (HF_HUB_OFFLINE)"),
        (False, {}, "cannot be reached ... http://127.0.0.1:9"),
    ],
)
def test_an_upload_that_cannot_be_is_refused_before_the_start(
    folder, tmp_path, monkeypatch, capfd, has_server, change, expected
) -> None:
    """By a stage itself before it writes anything, and among all problems of `rlhf train`."""
    with hub_server() as served:
        use(served if has_server else None, monkeypatch, **change)
        assert run(sft, sft_words(folder, tmp_path / "sft")) == EXIT_ENVIRONMENT
        found = error_lines(capfd.readouterr().err)
        assert found == [naming(f"error: --push-to-hub org/tiny ... {expected}; ... without the flag")]
        assert not list(tmp_path.iterdir()) and served.requests == []
        config = read_flags(STAGE, sft_words(folder, tmp_path / "sft")).config
        with pytest.raises(Exception, match="^--sft.push-to-hub org/tiny: ") as raised:
            look_before_start({STAGE: config}, dry_run=False, named_by_section=True)
        assert raised.value.code == EXIT_ENVIRONMENT


@pytest.mark.parametrize("name", ["a b", "org/name/more", "./sft", "https://hub/org/name"])
def test_what_is_no_id_is_refused(folder, tmp_path, capfd, name) -> None:
    assert run(sft, [*sft_words(folder, tmp_path / "sft"), "--push-to-hub", name]) == EXIT_INPUT
    assert f"--push-to-hub: got {name!r}" in capfd.readouterr().err


def test_nothing_is_asked_without_the_flag(monkeypatch) -> None:
    use(None, monkeypatch, token="")
    hub.check_push("")
