"""Limits of length, batch arithmetic, a padding token that is EOS, a hub that is not there; and ten real processes."""

import json
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pytest
from broken_models import make
from input_calls import call, stage_words, stopped_at_the_models
from support.ds_arguments import built
from support.forks import ROOT, environment
from support.messages import naming, refusal
from support.tiny_models import tiny_config
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from pipeline import hub
from pipeline.configuration.groups import DeepSpeedConfig
from pipeline.data.batching import packed_sft_batch
from pipeline.data.counts import Counts, Origin
from pipeline.data.formats import Record
from pipeline.data.row_kinds import PROMPTS, SEQUENCES, TokenizationOptions
from pipeline.data.templates import encode_prompt, set_template
from pipeline.data.turns import Message

FOLDER_SIZES = {"num_train": 12, "num_test": 2}
LIMIT = 24


@pytest.fixture
def tokenizer(folder: Path) -> Any:
    loaded = AutoTokenizer.from_pretrained(folder / "base")
    set_template(loaded, "human_assistant")
    return loaded


# Fault 20: prompts around the limit.


def prompt_of(tokenizer: Any, num_tokens: int) -> Record:
    """A prompt that has exactly `num_tokens` tokens with its template; each Q is one (no merge knows it)."""
    frame = len(encode_prompt(tokenizer, [Message("user", "Q")])) - 1
    messages = (Message("user", "Q" * (num_tokens - frame)),)
    assert len(encode_prompt(tokenizer, messages)) == num_tokens
    return Record(messages, "yes", prompt_id=7, origin=Origin("a.jsonl", 1), split=None)


@pytest.mark.parametrize("num_tokens", [LIMIT - 1, LIMIT, LIMIT + 1, 10 * LIMIT])
@pytest.mark.parametrize("policy", ["drop", "truncate_left"])
def test_a_prompt_around_the_limit(num_tokens: int, policy: Any, tokenizer: Any) -> None:
    options = TokenizationOptions(max_seq_len=LIMIT, max_prompt_seq_len=LIMIT, long_prompts=policy)
    record, counts = prompt_of(tokenizer, num_tokens), Counts()
    found = [sample.prompt_ids for sample in PROMPTS.rows([record], tokenizer, options, counts)]
    whole = encode_prompt(tokenizer, record.messages)
    if num_tokens <= LIMIT:
        assert found == [whole] and not list(counts)
    elif policy == "drop":
        assert found == [] and counts.lines() == [naming("1 dropped ... max_prompt_seq_len (first: a.jsonl:1)")]
    else:
        assert [len(ids) for ids in found] == [LIMIT] and found[0][-LIMIT + 1 :] == whole[-LIMIT + 1 :]
        assert counts.lines() == [naming("1 cut ... the prompt (first: a.jsonl:1)")]


def test_an_empty_prompt_is_counted_and_none_is_left(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": ""}) + "\n")
    with stopped_at_the_models(monkeypatch):
        ending = call("ppo", stage_words("ppo", folder, tmp_path / "out", data_path=tmp_path / "rows.jsonl"))
    assert ending.code == 2 and "1 dropped: empty prompt (first: " in ending.errors[0]


# Fault 19: where padding and EOS are the same token, no mask may come from ids.


def test_an_eos_that_is_the_padding_token_is_still_trained(tokenizer: Any) -> None:
    tokenizer.pad_token = tokenizer.eos_token
    options = TokenizationOptions(max_seq_len=96, max_prompt_seq_len=96)
    turns = (Message("user", "Who?"),)
    records = [
        Record(turns, text, prompt_id=n, origin=Origin("a", n), split=None) for n, text in enumerate(("I.", "A toad."))
    ]
    rows = [
        {"ids": sample.ids, "trained": sample.trained}
        for sample in SEQUENCES.rows(records, tokenizer, options, Counts())
    ]
    batch = packed_sft_batch([[row] for row in rows], pad_id=tokenizer.pad_token_id)
    for row, length in enumerate(len(item["ids"]) for item in rows):
        assert batch.input_ids[row, length - 1] == tokenizer.eos_token_id == tokenizer.pad_token_id
        assert batch.trained_mask[row, length - 1] and batch.attention_mask[row, :length].all()
        assert not batch.attention_mask[row, length:].any() and not batch.trained_mask[row, length:].any()


# Fault 25: three numbers and what would be right.


def test_a_batch_that_is_no_number_is_refused() -> None:
    (line,) = refusal(built, DeepSpeedConfig(), user_json={"train_batch_size": "many"})
    assert line == naming("train_batch_size ... 'many' ... a whole number")


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        (64, '"train_batch_size": 512 (or "auto")'),
        (1024, "--gradient-accumulation-steps 8 or --per-device-train-batch-size 32"),
        (100, '"train_batch_size": 512 (or "auto")'),
        (0, '"train_batch_size": 512 (or "auto")'),
    ],
)
def test_a_batch_that_is_not_the_product_names_its_factors(batch: Any, says: str) -> None:
    sizes = {"micro_batch_size": 16, "gradient_accumulation_steps": 4, "world_size": 8}
    (line,) = refusal(built, DeepSpeedConfig(), user_json={"train_batch_size": batch}, **sizes)
    assert "--per-device-train-batch-size 16 x --gradient-accumulation-steps 4 x 8 ranks = 512" in line and says in line


# Rotary positions of type dynamic are others for all tokens of a pass that is longer than the model's positions.


def dynamic(folder: Path, target: Path, source: str, auto_class: Any) -> Path:
    """A Llama of 90 positions in the place of the model `source`."""
    path = shutil.copytree(folder / source, target)
    size = len(AutoTokenizer.from_pretrained(path))
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    values = {"max_position_embeddings": 90, "rope_parameters": rope, "num_labels": 1, "pad_token_id": 0}
    config = tiny_config("llama", **{"vocab_size": size, **values})
    auto_class.from_config(config).save_pretrained(path)
    return path


TOO_LONG = {  # command -> its flags, and what is refused
    "sft": ("model_name_or_path", {}, "--max-seq-len 96 ... {} has 90 positions ... --max-seq-len 90"),
    "reward": ("model_name_or_path", {}, "--max-seq-len 96 ... {} has 90 positions ... --max-seq-len 90"),
    "dpo": ("model_name_or_path", {}, "--max-seq-len 96 ... {} has 90 positions ... --max-seq-len 90"),
    "ppo": ("actor_model_name_or_path", {}, "--max-answer-seq-len 96 ... {} has 90 positions"),
    "chat": (
        "model",
        {"prompt": "Describe the otter. " * 40},
        "169 tokens ... 90 positions",
    ),
    "prompt_eval": (
        "model",
        {"max_new_tokens": 40},
        "{} ... 59 tokens ... --max-new-tokens 40 ... model's 90",
    ),
}


@pytest.mark.parametrize("command", TOO_LONG)
def test_no_command_takes_more_tokens_than_a_model_has_positions(command: str, folder: Path, tmp_path: Path) -> None:
    flag, changes, says = TOO_LONG[command]
    path = dynamic(folder, tmp_path / "dynamic", "base", AutoModelForCausalLM)
    ending = call(
        command,
        stage_words(
            command,
            folder,
            tmp_path / "out",
            **{flag: [folder / "base", path] if command == "prompt_eval" else path},
            **changes,
        ),
    )
    assert ending.code == 2 and len(ending.errors) == 1 and ending.errors[0] == naming(says.format(path)), ending.stderr


@pytest.mark.parametrize("model", ["judge", "dynamic"])
def test_pairs_that_are_longer_than_a_reward_model_are_cut(model: str, folder: Path, tmp_path: Path) -> None:
    """A model with a table of positions would fail, rotary positions go on to ones that it never saw."""
    path, row = folder / model, {"prompt": "Describe the otter. " * 40, "chosen": "Wet.", "rejected": "Dry."}
    if model == "dynamic":
        path = dynamic(folder, tmp_path / "dynamic", "judge", AutoModelForSequenceClassification)
    (tmp_path / "long.jsonl").write_text(json.dumps(row) + "\n")
    changes = {"model": path, "data_path": tmp_path / "long.jsonl", "eval_fraction": 1, "max_seq_len": 512}
    ending = call("reward_eval", stage_words("reward_eval", folder, tmp_path / "out", **changes))
    assert ending.code == 0 and naming("1 cut: start of the prompt") in ending.counts


# Fault 28: the hub cannot be reached.


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Every connection is refused at once; the answer is a list of what was tried."""
    tried: list[object] = []

    def refuse(address: object, *args: object, **words: object) -> Any:
        tried.append(address)
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    for name in hub.PROXIES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    hub.is_reachable.cache_clear()
    return tried


@pytest.mark.parametrize("command", ["sft", "reward", "ppo", "dpo", "chat", "prompt_eval", "reward_eval", "data"])
def test_a_hub_that_is_not_there_is_one_line_and_no_storm(
    command: str, folder: Path, tmp_path: Path, no_network: list[object]
) -> None:
    flag = {"ppo": "actor_model_name_or_path", "chat": "model", "prompt_eval": "model", "reward_eval": "model"}
    name, value = (flag.get(command, "model_name_or_path"), "some/model")
    words = stage_words(command if command != "data" else "sft", folder, tmp_path, **{name: value})
    if command == "data":
        words = stage_words("sft", folder, tmp_path, data_path="some/set")
    if command == "prompt_eval":
        words = stage_words("prompt_eval", folder, tmp_path, model=[value, value])
    start = time.monotonic()
    ending = call(command if command != "data" else "sft", words)
    assert time.monotonic() - start < 5
    assert ending.code == 3 and len(ending.errors) == 1, ending.stderr
    assert "Retrying" not in ending.stderr and len(no_network) == 1
    assert "hf download" in ending.errors[0] or "datasets.load_dataset" in ending.errors[0]


# Ten of the cases as a user meets them: a process of its own.


def processes(folder: Path, out: Path) -> dict[str, tuple[list[object], str]]:
    """Name -> (the command's words after `python`, what its one line says)."""
    (out / "half.jsonl").write_text('{"prompt": "a", "chosen"')
    (out / "latin.txt").write_bytes(b"\xe9")

    def stage(name: str, **changes: object) -> list[object]:
        return ["-m", {"sft": "step1_sft.main", "reward": "step2_reward.main", "ppo": "step3_ppo.main"}[name],
                *stage_words(name, folder, out / "out", **changes)]  # fmt: skip

    return {
        "half a row": (stage("sft", data_path=out / "half.jsonl"), "half.jsonl:1: broken JSON"),
        "half a row, step 2": (stage("reward", data_path=out / "half.jsonl"), "half.jsonl:1: broken JSON"),
        "a typo": (stage("ppo", kl_coeff=1), "did you mean --kl-coef?"),
        "no model": (stage("sft", model_name_or_path=folder / "bse"), "did you mean"),
        "half a config": (stage("reward", model_name_or_path=make("half-config", folder, out)), "as JSON"),
        "half the weights": (stage("sft", model_name_or_path=make("half-weights", folder, out)), "fetch it again"),
        "chat": (
            [ROOT / "chat.py", *stage_words("chat", folder, out, model=make("no-weights", folder, out))], "no weights"
        ),
        "prompts": (
            [ROOT / "prompt_eval.py", *stage_words("prompt_eval", folder, out, prompts=out / "latin.txt")], "latin.txt"
        ),
        "pairs": (
            ["-m", "step2_reward.eval", *stage_words("reward_eval", folder, out, data_path=out / "half.jsonl")],
            "half.jsonl:1",
        ),
        "train.py": ([ROOT / "train.py", "--dry-run", "--sft.max-sequence-len", "5"], "did you mean --sft.max-seq"),
    }  # fmt: skip


@pytest.mark.faults
@pytest.mark.parametrize("number", range(10))
def test_a_real_process(number: int, folder: Path, tmp_path: Path) -> None:
    words, says = list(processes(folder, tmp_path).values())[number]
    kept = environment() | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=tmp_path,
        env=kept,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2 and len(lines) == 1 and says in lines[0], done.stderr
    assert "Traceback" not in done.stderr + done.stdout
