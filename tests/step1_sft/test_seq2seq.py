"""Step 1 on encoder-decoder models: transformers' own T5 loss, any ranks and ZeRO stages, resumed, and its refusals."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.command_run import run_command
from support.ds_arguments import PARTITIONED_FILE, zero_file
from support.in_process import refusal_of
from support.messages import naming
from support.model_card import read_card, run_example
from support.row_options import load_rows
from support.run_words import run_stage, run_words
from support.source_tree import ROOT
from support.tiny_models import randomise
from support.tiny_run import read_metrics, write_lines
from support.tiny_t5 import TASK, make_t5_folder
from tokenizers import processors
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer

from pipeline.configuration.flags import parse
from pipeline.data.batching import IGNORED, seq2seq_batch
from pipeline.data.selection import DataOptions
from pipeline.engine.start_models import check_start_models
from pipeline.errors import InputError
from pipeline.models.forward.seq2seq_lm import Seq2SeqLM
from pipeline.models.loading import load_language_model
from pipeline.models.source import ModelSource, prepare_tokenizer
from pipeline.preparation.preflight import look_before_start
from rlhf.chat import main as chat
from rlhf.stages import stage_of
from step1_sft.checks import start_models
from step1_sft.config import SFTConfig
from step1_sft.main import main
from step2_reward.config import RewardConfig
from step2_reward.main import main as reward_main
from step3_ppo.config import PPOConfig
from step3_ppo.main import main as ppo_main

NUM_STEPS = 4
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`t5/` with its head tied to the embeddings; `flan/` as T5 1.1 and FLAN-T5: gated, with a head of its own."""
    made = make_t5_folder(tmp_path_factory.mktemp("t5"))
    flan = make_t5_folder(made / "v11", feed_forward_proj="gated-gelu", tie_word_embeddings=False) / "t5"
    weights = load_file(flan / "model.safetensors")
    weights["lm_head.weight"] = torch.randn(weights["shared.weight"].shape, generator=torch.Generator().manual_seed(1))
    save_file(weights, flan / "model.safetensors", {"format": "pt"})
    config = json.loads((flan / "config.json").read_text())
    del config["scale_decoder_outputs"]  # as published: transformers before 5 had no such field
    (flan / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    flan.rename(made / "flan")
    return made


def words(folder: Path, out: str, **changes: object) -> list[str]:
    flags = {
        "model_name_or_path": folder / "t5", "max_seq_len": 64, "learning_rate": 3e-3, "lr_scheduler_type": "constant",
        "per_device_train_batch_size": 8, "max_steps": NUM_STEPS, "output_dir": folder / out / "sft",
    }  # fmt: skip
    return run_words(folder, **flags | changes)


def run(folder: Path, out: str, **changes: object) -> Path:
    """A run in this process; returns the model's folder."""
    assert run_stage("sft", words(folder, out, **changes)) == 0
    return folder / out / "sft"


def losses(model: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(model.parent / "runs" / "sft") if "loss" in line]


def apart(first: Path, second: Path) -> float:
    """The largest difference of two saved models' weights."""
    mine, theirs = (load_file(path / "model.safetensors") for path in (first, second))
    assert mine.keys() == theirs.keys()
    return max((mine[name] - theirs[name]).abs().max().item() for name in mine)


@pytest.mark.parametrize("name", ["t5", "flan"])
def test_the_loss_is_that_of_transformers(folder: Path, name: str) -> None:
    """From its own tokenisation of the texts, on rows of different lengths and one of padding."""
    path = str(folder / name)
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    tokenizer = prepare_tokenizer(ModelSource(path), "auto")
    options = DataOptions(
        data_path=(str(folder / "train.jsonl"),), data_split="none", eval_fraction=0.0, cache_dir=str(folder / "cache")
    )
    data = load_rows("sft", options, tokenizer).train
    batch = seq2seq_batch([*([data[index]] for index in range(5)), None], pad_id=tokenizer.pad_token_id)

    plain = AutoTokenizer.from_pretrained(path)
    source = plain([row["prompt"] for row in rows[:5]], return_tensors="pt", padding=True)
    target = plain([row["response"] for row in rows[:5]], return_tensors="pt", padding=True)
    labels = target.input_ids.masked_fill(target.attention_mask == 0, -100)
    assert len({*source.attention_mask.sum(1).tolist()}) > 1 and (labels == -100).any(), "nothing is padded"
    assert batch.input_ids[:5].equal(source.input_ids) and batch.labels[:5].equal(labels)
    assert batch.attention_mask[:5].equal(source.attention_mask.bool())
    assert (batch.labels[5] == IGNORED).all() and batch.weights.tolist() == [1, 1, 1, 1, 1, 0]

    reference = AutoModelForSeq2SeqLM.from_pretrained(path).eval()
    expected = reference(**source, labels=labels)
    model = Seq2SeqLM(load_language_model(ModelSource(path), dtype=torch.float32)).train()  # dropout is off
    log_probs = model(batch.input_ids, attention_mask=batch.attention_mask, labels=batch.labels)
    assert abs(-log_probs.sum() / (batch.labels != IGNORED).sum() - expected.loss) < TOLERANCE
    by_hand = expected.logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(log_probs[:5], by_hand.where(labels >= 0, 0), atol=TOLERANCE, rtol=0)
    (-log_probs.sum()).backward()
    (expected.loss * (labels >= 0).sum()).backward()
    named = dict(reference.named_parameters())
    for key, parameter in model.model.named_parameters():
        torch.testing.assert_close(parameter.grad, named[key].grad, atol=1e-4, rtol=1e-4)


def test_a_bos_that_the_tokenizer_puts_first_is_read_and_written(folder: Path, tmp_path: Path) -> None:
    """As BART's, whose answers begin with it when transformers generates."""
    shutil.copytree(folder / "t5", tmp_path / "bart")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "bart", bos_token="<extra_id_0>")
    pieces = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<extra_id_0>", "</s>")]
    both = processors.TemplateProcessing(single="<extra_id_0> $A </s>", special_tokens=pieces)
    tokenizer.backend_tokenizer.post_processor = both
    tokenizer.save_pretrained(tmp_path / "bart")
    options = DataOptions(data_path=(str(folder / "train.jsonl"),), data_split="none", cache_dir=str(tmp_path))
    rows = load_rows("sft", options, prepare_tokenizer(ModelSource(str(tmp_path / "bart")), "auto")).train
    batch = seq2seq_batch([[rows[0]]], pad_id=tokenizer.pad_token_id)
    given = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    expected = {tuple(tokenizer(row["prompt"]).input_ids): tokenizer(row["response"]).input_ids for row in given}
    assert batch.labels[0].tolist() == expected[tuple(batch.input_ids[0].tolist())]
    assert batch.labels[0, 0] == batch.input_ids[0, 0] == tokenizer.bos_token_id


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks"), [("t5", 1), ("flan", 1), ("t5", 2), ("flan", 2)])
def test_zero_3_on_any_ranks_follows_zero_0_on_one(folder: Path, name: str, ranks: int) -> None:
    """Also with a head of its own, which transformers ties to the embeddings where weights are partitioned."""
    model = {"model_name_or_path": folder / name, "overwrite": "true"}
    one = run(folder, f"{name}-0", **model)
    cut = {"zero_stage": 3, "deepspeed_config": PARTITIONED_FILE, "zero3_gather": "layers"}
    two = folder / f"{name}-{ranks}" / "sft"
    flags = words(folder, f"{name}-{ranks}", **model, **cut, per_device_train_batch_size=8 // ranks)
    if ranks == 1:
        assert run_stage("sft", flags) == 0
    else:
        ended = run_command("step1_sft", flags, folder=folder, ranks=ranks)
        assert ended.code == 0 and "untested" not in ended.stderr, ended.stderr
    assert losses(one)[0] - losses(one)[-1] > 0.5, "nothing was learned"
    assert max(abs(a - b) for a, b in zip(losses(one), losses(two), strict=True)) < 1e-4
    assert apart(one, two) < 1e-3
    loaded, info = AutoModelForSeq2SeqLM.from_pretrained(two, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and loaded.config.dropout_rate == 0.1
    # Readers other than transformers 5 tie the head where the configuration says so.
    saved = json.loads((two / "config.json").read_text())
    assert saved["tie_word_embeddings"] == (name == "t5") and ("lm_head.weight" in weights_of(two)) == (name == "flan")


def weights_of(model: Path) -> Iterable[str]:
    return load_file(model / "model.safetensors").keys()


SETTINGS: list[dict[str, Any]] = [
    {"gradient_checkpointing": "true", "zero_stage": 3, "deepspeed_config": PARTITIONED_FILE},
    {
        "zero_stage": 3,
        "offload": "true",
        "offload_parameters": "true",
        "stage3_max_live_parameters": 2000,
        "sub_group_size": 3000,
    },
    {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
]


@pytest.mark.slow
@pytest.mark.parametrize("changes", SETTINGS, ids=["recomputed", "offloaded", "accumulated"])
def test_memory_settings_change_nothing(folder: Path, changes: dict[str, Any]) -> None:
    plain = run(folder, "plain")
    at_once = {"deepspeed_config": zero_file(folder, stage3_max_reuse_distance=0)} if "offload" in changes else {}
    other = run(folder, "other", overwrite="true", **changes, **at_once)
    assert max(abs(a - b) for a, b in zip(losses(plain), losses(other), strict=True)) < 1e-4


@pytest.mark.slow
def test_lora_under_zero_3_is_that_without(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    lora = {"lora_dim": 4, "lora_learning_rate": 0.01, "max_steps": 2}
    plain = run(folder, "lora", **lora)
    cut = {"zero_stage": 3, "deepspeed_config": PARTITIONED_FILE, "zero3_gather": "layers"}
    other = run(folder, "lora-3", **lora, **cut, gradient_checkpointing="true", save_adapter_only="true")
    assert max(abs(a - b) for a, b in zip(losses(plain), losses(other), strict=True)) < TOLERANCE
    adapted = json.loads((other / "adapter_config.json").read_text())
    assert adapted["task_type"] == "SEQ_2_SEQ_LM"
    assert {name.rpartition(".")[2] for name in adapted["target_modules"]} == {"q", "k", "v", "o", "wi", "wo"}
    capsys.readouterr()
    run_example(other, monkeypatch)  # by peft's class for these models


@pytest.mark.slow
def test_the_preset_starts_on_a_small_model(folder: Path) -> None:
    """Everything offloaded, and interrupted: the rest of the run is that of one that was not."""
    preset = ["--preset", str(ROOT / "launch" / "presets" / "t5-3b.yaml")]
    whole, halves = folder / "preset" / "sft", folder / "preset-halves" / "sft"
    for model, steps in ((whole, 3), (halves, 2), (halves, 3)):
        flags = {
            "model_name_or_path": folder / "t5", "data_split": None, "output_dir": model, "max_steps": steps,
            "lr_scheduler_type": "constant", "num_warmup_steps": 0, "train_batch_size": 16, "eval_max_new_tokens": 4,
        }  # fmt: skip
        assert run_stage("sft", [*preset, *run_words(folder, **flags)]) == 0
    assert losses(whole) == losses(halves) and apart(whole, halves) == 0.0
    settings = json.loads((whole.parent / "runs" / "sft" / "config.json").read_text())
    names = "offload offload_parameters stage3_max_live_parameters sub_group_size"
    assert all(settings[name]["from"] == preset[1] for name in names.split())
    assert "eval_bleu" in read_metrics(whole.parent / "runs" / "sft")[0]


@pytest.mark.slow
def test_a_resumed_run_is_an_uninterrupted_one(folder: Path) -> None:
    whole = run(folder, "whole")
    run(folder, "halves", max_steps=2)
    halves = run(folder, "halves", max_steps=NUM_STEPS)
    assert losses(halves) == losses(whole) and apart(whole, halves) == 0.0


def test_the_model_can_be_shared(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example of its card runs."""
    model = run(folder, "shared")
    metadata, _ = read_card(model)
    assert metadata["pipeline_tag"] == "text2text-generation"
    capsys.readouterr()
    run_example(model, monkeypatch)
    assert capsys.readouterr().out


def test_chat_answers_as_generate_does(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = folder / "flan"
    tokenizer, loaded = AutoTokenizer.from_pretrained(model), AutoModelForSeq2SeqLM.from_pretrained(model)
    source = tokenizer(f"{TASK}the old house", return_tensors="pt")
    expected = tokenizer.decode(loaded.generate(**source, max_new_tokens=9)[0], skip_special_tokens=True)
    capsys.readouterr()
    flags = ["--prompt", f"{TASK}the old house", "--temperature", "0", "--max-new-tokens", "9", "--dtype", "fp32"]
    assert chat([str(model), *flags]) == 0
    assert capsys.readouterr().out.strip() == expected.strip() != ""


def save_other(kind: str, folder: Path) -> Path:
    """Replace the T5 in `folder` by a tiny model of another type, with the same tokenizer."""
    size = len(AutoTokenizer.from_pretrained(folder))
    shape = {
        "vocab_size": size, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 48, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1,
    }  # fmt: skip
    if kind == "t5gemma":
        part = shape | {"num_key_value_heads": 1, "head_dim": 16, "sliding_window": 4}
        decoder = part | {"cross_attention_hidden_size": 32}
        config = AutoConfig.for_model(kind, encoder=part, decoder=decoder, vocab_size=size, pad_token_id=0)
    else:
        decoder = shape | {"is_decoder": True, "add_cross_attention": True}
        parts = {"encoder": shape | {"model_type": "bert"}, "decoder": decoder | {"model_type": "bert"}}
        config = AutoConfig.for_model(kind, **parts, decoder_start_token_id=2, pad_token_id=0)
    model = AutoModelForSeq2SeqLM.from_config(config)
    randomise(model, 0)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["t5gemma", "encoder-decoder"])
def test_other_models_are_trained_and_saved_as_transformers_reads_them(kind: str, tmp_path: Path) -> None:
    """T5Gemma, whose head has another name than T5's, and one joined of two BERTs."""
    made = make_t5_folder(tmp_path, num_train=4, num_test=3)
    start = save_other(kind, made / "t5")
    trained = run(made, "other", max_steps=1, per_device_train_batch_size=2)
    tokenizer = AutoTokenizer.from_pretrained(start)
    rows = [json.loads(line) for line in (made / "test.jsonl").read_text().splitlines()]
    logged = [line["eval_loss"] for line in read_metrics(trained.parent / "runs" / "sft") if "eval_loss" in line]
    for path, found in zip((start, trained), logged, strict=True):
        # Older versions of transformers would take sdpa, which leaves T5Gemma's soft caps out.
        model, total, count = AutoModelForSeq2SeqLM.from_pretrained(path, attn_implementation="eager").eval(), 0.0, 0
        for row in rows:
            source, target = (tokenizer(row[name], return_tensors="pt").input_ids for name in ("prompt", "response"))
            total += model(input_ids=source, labels=target).loss.item() * target.numel()
            count += target.numel()
        assert abs(total / count - found) < 1e-4
    assert abs(logged[0] - logged[1]) > 1e-2


UNSUITABLE = {
    "mbart": "mbart ... language codes ... T5",
    "blenderbot": "blenderbot ... T5",
    "t5": "config.json ... decoder_start_token_id",
}


@pytest.mark.parametrize("kind", UNSUITABLE)
def test_a_model_whose_labels_are_not_shifted_as_ours_is_refused(
    kind: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = Path(shutil.copytree(folder / "t5", tmp_path / "model"))
    fields = json.loads((model / "config.json").read_text())
    del fields["decoder_start_token_id"]
    (model / "config.json").write_text(json.dumps(fields | {"model_type": kind}))
    line = refusal_of(main, words(folder, "unsuitable", model_name_or_path=model), capfd)
    assert line == naming(f"error: --model-name-or-path {model}: ... {UNSUITABLE[kind]}")


REFUSED = {
    "packing": ({"packing": "true"}, "--packing: "),
    "prompts": ({"train_on_prompt": "true"}, "--train-on-prompt: "),
    "plain text": ({"data_path": "text.jsonl"}, "--data-path: got plain text"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_such_a_model_cannot_do_is_one_line(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "text.jsonl", [{"text": "the old house sees a river"} for _ in range(9)])
    changes, begin = REFUSED[name]
    assert refusal_of(main, words(folder, "refused", **changes), capfd).startswith(f"error: {begin}")


def test_fp16_is_refused_where_the_device_has_it(folder: Path, tmp_path: Path) -> None:
    """On a CPU step 1 refuses it before it asks which model it is."""
    resolved = parse(SFTConfig, words(folder, "refused", dtype="fp16", run_dir=tmp_path / "run"), section="sft")
    with pytest.raises(InputError, match=naming("--dtype fp16 ... t5 ... bf16 or fp32")):
        check_start_models(start_models(resolved.config, {}))


def test_a_conversation_is_counted_and_left_out(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of a template with turns the last one is trained, and the others are the encoder's input."""
    turns = [{"role": role, "content": "the old house"} for role in ("user", "assistant", "user", "assistant")]
    write_lines(tmp_path / "turns.jsonl", [{"messages": turns[:2]}, {"messages": turns}])
    rows = {"data_path": tmp_path / "turns.jsonl", "eval_fraction": 0, "eval_data_path": folder / "test.jsonl"}
    run(folder, "turns", max_steps=1, **rows)
    assert capfd.readouterr().err == naming("1 dropped ... refused ... template")
    run(folder, "turns-2", max_steps=1, template="human_assistant", **rows)
    assert "sft rows: 2 to train on" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("stage", "flag"), [(reward_main, "--model-name-or-path"), (ppo_main, "--actor-model-name-or-path")]
)
def test_steps_2_and_3_refuse_it_in_one_line(
    stage: Any, flag: str, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = ["--data-path", str(folder / "train.jsonl"), "--output-dir", str(tmp_path / "out")]
    line = refusal_of(stage, [flag, str(folder / "t5"), *data], capfd)
    assert line == naming(f"error: {flag}: {folder / 't5'} ... encoder-decoder ... (t5)")


def test_a_chain_of_steps_is_refused_before_the_first_one_starts(folder: Path, tmp_path: Path) -> None:
    """Step 3 starts from what step 1 makes of the model; no outputs are counted of what is refused."""
    data = ["--data-path", str(folder / "train.jsonl")]
    flags = {
        "sft": words(folder, "chained"),
        "reward": ["--model-name-or-path", str(folder / "t5"), "--output-dir", str(tmp_path / "reward"), *data],
        "ppo": ["--actor-model-name-or-path", str(folder / "chained" / "sft"), *data],
    }
    chain = {"sft": SFTConfig, "reward": RewardConfig, "ppo": PPOConfig}
    stages = {stage_of(name): parse(config, flags[name], section=name).config for name, config in chain.items()}
    with pytest.raises(InputError) as caught:
        look_before_start(stages, dry_run=True, named_by_section=True)
    for flag in ("--reward.model-name-or-path", "--ppo.actor-model-name-or-path"):
        assert str(caught.value) == naming(f"{flag}: {folder / 't5'} ... encoder-decoder ... (t5)")
