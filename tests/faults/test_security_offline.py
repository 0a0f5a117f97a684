"""With the network cut off everything runs from local files: three steps, chat, both evaluations."""

import socket
from pathlib import Path
from typing import Any

import pytest
from input_calls import call, stage_words

FOLDER_SIZES = {"num_train": 12, "num_test": 2}
LOOPBACK = ("127.0.0.1", "::1", "localhost", "")


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Names and addresses off this machine that anything asked for; asking raises."""
    asked: list[object] = []
    connect, lookup = socket.socket.connect, socket.getaddrinfo

    def refuse(address: object) -> None:
        asked.append(address)
        raise OSError(101, f"the test has cut off the network: {address}")

    def checked_connect(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX and address[0] not in LOOPBACK:
            refuse(address)
        connect(self, address)

    def checked_lookup(host: Any, *args: Any, **words: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        if name not in (*LOOPBACK, None, socket.gethostname()):
            refuse(host)
        return lookup(host, *args, **words)

    monkeypatch.setattr(socket.socket, "connect", checked_connect)
    monkeypatch.setattr(socket, "getaddrinfo", checked_lookup)
    return asked


def test_the_network_is_cut_off(tried: list[object]) -> None:
    with pytest.raises(OSError, match="cut off"):
        socket.create_connection(("192.0.2.1", 80), timeout=1)
    with pytest.raises(OSError, match="cut off"):
        socket.create_connection(("huggingface.co", 443), timeout=1)
    assert len(tried) == 2


@pytest.mark.parametrize("switch", ["", pytest.param("1", marks=pytest.mark.faults)])
def test_the_whole_way_from_rows_to_answers(
    switch: str, folder: Path, tmp_path: Path, tried: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step starts from the step before, as train.py chains them; with and without HF_HUB_OFFLINE."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if switch:
        monkeypatch.setenv("HF_HUB_OFFLINE", switch)
    else:
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    out = tmp_path / "output"
    small = {"per_device_train_batch_size": 4, "max_steps": 1}
    models = {"actor_model_name_or_path": out / "sft", "critic_model_name_or_path": out / "reward"}
    commands: list[tuple[str, dict[str, object]]] = [
        ("sft", {"output_dir": out / "sft", **small}),
        ("reward", {"output_dir": out / "reward", **small}),
        ("ppo", {"output_dir": out, **models, "per_device_generation_batch_size": 4, **small}),
        ("chat", {"path": out / "actor"}),
        ("prompt_eval", {"models": [out / "sft", out / "actor"], "reward_model": out / "reward"}),
        ("reward_eval", {"path": out / "reward", "eval_fraction": 0.5}),
    ]
    for command, changes in commands:
        ending = call(command, stage_words(command, folder, tmp_path, **changes))
        assert ending.code == 0, (command, ending.stderr)
    assert tried == []
