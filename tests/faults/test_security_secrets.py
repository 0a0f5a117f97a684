"""Canaries: tokens of the environment and of settings are in no file that a run writes and in no line it prints."""

import json
from pathlib import Path

import pytest
from input_calls import call, stage_words
from support.messages import naming

from pipeline.configuration.resume_rules import check_resumed
from pipeline.errors import InputError, dashed
from pipeline.redact import MASK, masked, redacted
from step3_ppo.config import PPOConfig

FOLDER_SIZES = {"num_train": 12, "num_test": 2}

HUB, WANDB, OPENAI = "hf_CANARYcanaryCANARYcanaryCANARY012345", "c" * 20 + "d" * 20, "sk-canaryCANARYcanaryCANARY01"
ENVIRONMENT = {"HF_TOKEN": HUB, "WANDB_API_KEY": WANDB, "OPENAI_API_KEY": OPENAI, "AWS_SECRET_ACCESS_KEY": "aws-canary"}
SECRETS = [
    HUB, OPENAI, "ghp_canaryCANARYcanaryCANARY012345", "github_pat_canaryCANARYcanary01", "AKIAABCDEFGHIJKLMNOP",
    "xoxb-canary-canary", "eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.canary", "https://user:canary@host/set",
    "https://host/set?token=canary&x=1", "s3://host/a?X=1&signature=canary",
]  # fmt: skip
HARMLESS = [
    "facebook/opt-1.3b",
    "data/hf_models/a.jsonl",
    "https://host/set",
    "a@b",
    "output/sk-1",
    "Dahoas/rm-static:0.5",
]


def holding(folder: Path, canary: str) -> list[str]:
    """Files that hold the canary."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    return [str(path) for path in files if canary.encode() in path.read_bytes()]


def test_three_steps_write_no_secret_of_the_environment(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    printed = ""
    for command in ("sft", "reward", "ppo", "dpo"):
        sizes = {"per_device_train_batch_size": 4, "max_steps": 1}
        sizes |= {"per_device_generation_batch_size": 4} if command == "ppo" else {}
        ending = call(command, stage_words(command, folder, tmp_path / command, enable_csv="true", **sizes))
        assert ending.code == 0, ending.stderr
        printed += ending.stdout + ending.stderr
    for canary in ENVIRONMENT.values():
        assert canary not in printed and holding(tmp_path, canary) == []


@pytest.mark.parametrize("command", ["sft", "reward", "ppo", "dpo", "prompt_eval", "reward_eval"])
@pytest.mark.parametrize("secret", SECRETS)
def test_a_secret_is_no_setting(secret: str, command: str, folder: Path, tmp_path: Path) -> None:
    """Neither as a flag nor from a YAML file; it is not said again, and nothing is written."""
    flag = {"prompt_eval": "prompts"}.get(command, "data_path")
    (tmp_path / "c.yaml").write_text(f"{flag}: {secret}\n")
    words = stage_words(command, folder, tmp_path / "out", **{flag: secret})
    at = words.index(f"--{flag}")
    for given in (words, [*words[:at], *words[at + 2 :], "--config", tmp_path / "c.yaml"]):
        ending = call(command, given)
        assert ending.code == 2 and ending.errors[0] == naming(f"{dashed(flag)} ... token or password"), ending.stderr
        assert secret not in ending.stderr and "canary" not in ending.stderr.lower()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("words", [["--hf-token", HUB], [HUB], ["--seed", HUB], ["--seed", "1", HUB]])
def test_an_error_does_not_repeat_a_secret(words: list[str]) -> None:
    ending = call("sft", words)
    assert ending.code == 2 and HUB not in ending.stderr and ending.errors


@pytest.mark.parametrize("key", [OPENAI, "Kn0wn-to-nobody"])
def test_a_key_in_the_deepspeed_json_is_not_printed(folder: Path, tmp_path: Path, key: str) -> None:
    (tmp_path / "ds.json").write_text('{"comet": {"enabled": false, "api_key": "' + key + '"}}')
    words = stage_words("sft", folder, tmp_path / "out", deepspeed_config=tmp_path / "ds.json")
    ending = call("sft", [*words, "--per-device-train-batch-size", 4])
    assert ending.code == 0, ending.stderr
    assert "comet.api_key ***" in ending.stdout + ending.stderr
    assert key not in ending.stdout + ending.stderr and holding(tmp_path / "out", key) == []


def test_what_a_person_says_to_a_model_is_no_setting(folder: Path, tmp_path: Path) -> None:
    ending = call("chat", stage_words("chat", folder, tmp_path, prompt=f"What is {OPENAI}?"))
    assert ending.code == 0, ending.stderr


@pytest.mark.parametrize("text", SECRETS)
def test_a_secret_is_masked(text: str) -> None:
    assert MASK in redacted(f"got {text!r} there") and "canary" not in redacted(text).lower()


@pytest.mark.parametrize("text", HARMLESS)
def test_other_words_are_left(text: str) -> None:
    assert redacted(text) == text


NAMES = (
    "api_key apiKey X-Api-Key key token hf_token accessToken judge_key password db_passwd mysql_pwd client_secret "
    "Authorization bearer jwt credentials webhook connection_string openai_api_key_2 token_secret"
).split()
PLAIN_NAMES = (
    "answer_key stop_token stopToken eos_token max_tokens max_completion_tokens stop_token_ids key_variable keywords "
    "tokenizer thinking_token_budget prompt_cache_key skip_special_tokens author pattern column key_column"
).split()


@pytest.mark.parametrize("name", NAMES)
def test_what_has_the_name_of_a_secret_is_masked(name: str) -> None:
    entry = {"name": "f.py:f", "args": {name: "canary", "more": [{name: {"a": ["canary"]}}]}}
    for value in (entry, json.dumps(entry), [f"--reward-function={json.dumps(entry)}"]):
        shown = masked(value)
        assert "canary" not in str(shown) and str(shown).count(MASK) == 2 and "f.py:f" in str(shown)


@pytest.mark.parametrize("name", PLAIN_NAMES)
def test_what_only_sounds_like_a_secret_stays(name: str) -> None:
    text = json.dumps({"name": "f.py:f", "args": {name: "a"}}, indent=1)
    assert masked([text, "[" * 10**5, "{" * 10**5, "f.py:f"]) == [text, "[" * 10**5, "{" * 10**5, "f.py:f"]


def test_a_checkpoint_of_before_that_holds_a_secret_is_compared_without_it() -> None:
    """Older versions wrote it; what differs besides is told, and the secret is not."""

    def entry(secret: str, more: str = "a") -> dict[str, dict[str, list[str]]]:
        function = json.dumps({"name": "f.py:f", "args": {"token": secret, "answer_key": more}})
        return {"settings": {"reward_function": [function]}}

    check_resumed(Path("step-1"), entry("canary"), entry(MASK), PPOConfig())
    with pytest.raises(InputError) as caught:
        check_resumed(Path("step-1"), entry("canary"), entry(MASK, "b"), PPOConfig())
    assert "canary" not in str(caught.value) and "answer_key" in str(caught.value)
