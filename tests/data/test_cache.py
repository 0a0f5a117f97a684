"""The cache holds what was asked for, is built once, and its key follows everything that decides its content."""

import json
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from support.messages import naming
from support.row_options import load_rows, of_stage

from pipeline.data import cache
from pipeline.data.cache import cache_key
from pipeline.data.selection import DataOptions
from pipeline.errors import InputError
from pipeline.files import cache_folder
from pipeline.models.tokenizers import load_tokenizer


def write_rows(path: Path, rows: list[dict]) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return str(path)


def pairs(number: int, start: int = 0, **extra) -> list[dict]:
    return [
        {"prompt": f"question {i}?", "chosen": f"good {i}", "rejected": f"bad {i}", **extra}
        for i in range(start, start + number)
    ]


@pytest.fixture
def options(tmp_path) -> DataOptions:
    path = write_rows(tmp_path / "rows.jsonl", pairs(60))
    return DataOptions(data_path=(path,), cache_dir=str(tmp_path / "cache"))


def prompts(dataset, tokenizer, column="ids") -> set[str]:
    """The 'question <i>?' of every row."""
    texts = (tokenizer.decode(row[column]) for row in dataset)
    return {text.split("Human: ")[1].split("\n\n")[0] for text in texts}


def test_steps_and_evaluation_rows_are_disjoint_and_complete(options, bpe_tokenizer):
    stages = {"sft": "ids", "reward": "chosen_ids", "ppo": "prompt_ids"}
    built = {stage: load_rows(stage, options, bpe_tokenizer) for stage in stages}
    train = [prompts(built[stage].train, bpe_tokenizer, column) for stage, column in stages.items()]
    evaluated = [prompts(built[stage].eval, bpe_tokenizer, column) for stage, column in stages.items()]
    assert all(train) and evaluated[0] == evaluated[1] == evaluated[2]
    everything = [prompt for part in [*train, evaluated[0]] for prompt in part]
    assert sorted(everything) == sorted(f"question {i}?" for i in range(60))


def test_division_does_not_depend_on_the_order_of_the_rows(options, bpe_tokenizer, tmp_path):
    turned = write_rows(tmp_path / "turned.jsonl", pairs(60)[::-1])
    first = load_rows("sft", options, bpe_tokenizer)
    second = load_rows("sft", replace(options, data_path=(turned,)), bpe_tokenizer)
    assert prompts(first.train, bpe_tokenizer) == prompts(second.train, bpe_tokenizer)
    assert prompts(first.eval, bpe_tokenizer) == prompts(second.eval, bpe_tokenizer)


def test_columns_are_as_documented(options, bpe_tokenizer):
    whole = replace(options, data_split="none", eval_fraction=0.0)
    sft, reward, ppo = (load_rows(stage, whole, bpe_tokenizer).train[0] for stage in ("sft", "reward", "ppo"))
    assert set(sft) == {"ids", "trained", "num_tokens", "num_trained"}
    assert (sft["num_tokens"], sft["num_trained"]) == (len(sft["ids"]), sum(sft["trained"]))
    assert bpe_tokenizer.decode(sft["ids"]) == "\n\nHuman: question 0?\n\nAssistant: good 0</s>"
    assert set(reward) == {"chosen_ids", "rejected_ids", "prompt_length", "margin", "num_tokens"}
    assert reward["num_tokens"] == len(reward["chosen_ids"]) + len(reward["rejected_ids"])
    assert bpe_tokenizer.decode(reward["rejected_ids"][reward["prompt_length"] :]) == " bad 0</s>"
    assert set(ppo) == {"prompt_ids", "prompt_id", "messages", "num_tokens"}
    assert ppo["prompt_ids"] == reward["chosen_ids"][: reward["prompt_length"]]
    assert json.loads(ppo["messages"])[0]["content"] == "question 0?"


def test_text_stage_gives_blocks(bpe_tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("one two\n\n" * 40)
    options = DataOptions(
        data_path=(str(tmp_path / "a.txt"),), cache_dir=str(tmp_path), max_seq_len=16, eval_fraction=0.0
    )
    blocks = load_rows("text", options, bpe_tokenizer).train
    assert set(blocks[0]) == {"ids", "trained", "num_tokens", "num_trained"}
    assert blocks[0]["num_tokens"] == 16 and blocks[0]["num_trained"] == 15


def test_no_split_gives_every_step_all_rows(options, bpe_tokenizer):
    whole = replace(options, data_split="none", eval_fraction=0.0)
    assert [len(load_rows(stage, whole, bpe_tokenizer).train) for stage in ("sft", "reward", "ppo")] == [60] * 3
    assert len(load_rows("sft", whole, bpe_tokenizer).eval) == 0
    assert len(load_rows("sft", replace(whole, data_split="1,0,0"), bpe_tokenizer).train) == 60


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"eval_fraction": 1.0}, "--eval-fraction ... no training row ... lower ... more"),
        (
            {"eval_fraction": 0.0, "eval_data_path": True},
            "--eval-data-path ... same prompts ... no training",
        ),
    ],
)
def test_an_evaluation_that_takes_all_rows_is_named(options, bpe_tokenizer, changes, says):
    given = {"eval_data_path": options.data_path} if "eval_data_path" in changes else {}
    with pytest.raises(InputError, match=naming(f"stage sft: {says}")):
        load_rows("sft", replace(options, data_split="none", **(changes | given)), bpe_tokenizer)


def test_empty_share_is_an_input_error(options, bpe_tokenizer):
    with pytest.raises(InputError, match=naming("stage sft: --data-split 0,1,1 ... no training row")):
        load_rows("sft", replace(options, data_split="0,1,1"), bpe_tokenizer)


def test_no_sample_left_is_an_input_error_and_leaves_nothing_behind(options, bpe_tokenizer):
    with pytest.raises(InputError, match=naming("no training row ... dropped ... max_seq_len")):
        load_rows("reward", replace(options, max_seq_len=4), bpe_tokenizer)
    assert not list(Path(options.cache_dir).iterdir())


def test_own_test_rows_are_the_evaluation_rows(bpe_tokenizer, tmp_path):
    rows = pairs(6, split="train") + pairs(3, start=5, split="test")
    options = DataOptions(
        data_path=(write_rows(tmp_path / "a.jsonl", rows),), cache_dir=str(tmp_path), data_split="none"
    )
    built = load_rows("sft", options, bpe_tokenizer)
    assert prompts(built.eval, bpe_tokenizer) == {"question 5?", "question 6?", "question 7?"}
    assert prompts(built.train, bpe_tokenizer) == {f"question {i}?" for i in range(5)}
    assert built.counts["prompt is also an evaluation prompt"] == 1


def test_eval_data_path_wins_over_test_rows(bpe_tokenizer, tmp_path):
    train = write_rows(tmp_path / "a.jsonl", pairs(6, split="train") + pairs(2, start=6, split="test"))
    evaluation = write_rows(tmp_path / "b.jsonl", pairs(3, start=20))
    options = DataOptions(data_path=(train,), eval_data_path=(evaluation,), cache_dir=str(tmp_path), data_split="none")
    built = load_rows("sft", options, bpe_tokenizer)
    assert prompts(built.train, bpe_tokenizer) == {f"question {i}?" for i in range(6)}
    assert prompts(built.eval, bpe_tokenizer) == {"question 20?", "question 21?", "question 22?"}
    assert built.counts["test row (eval_data_path is given)"] == 2


def test_sft_only_rows_are_taken_whole_by_step_one_alone(bpe_tokenizer, tmp_path):
    shared = write_rows(tmp_path / "a.jsonl", pairs(40))
    extra = write_rows(tmp_path / "b.jsonl", [{"prompt": f"extra {i}", "response": "x"} for i in range(20)])
    options = DataOptions(data_path=(shared,), sft_only_data_path=(extra,), cache_dir=str(tmp_path), eval_fraction=0.0)
    sft = prompts(load_rows("sft", options, bpe_tokenizer).train, bpe_tokenizer)
    assert {prompt for prompt in sft if prompt.startswith("extra")} == {f"extra {i}" for i in range(20)}
    assert 0 < len(sft) - 20 < 40
    ppo = prompts(load_rows("ppo", options, bpe_tokenizer).train, bpe_tokenizer, "prompt_ids")
    assert not any(prompt.startswith("extra") for prompt in ppo)


def test_weight_keeps_a_share_of_a_source(bpe_tokenizer, tmp_path):
    path = write_rows(tmp_path / "a.jsonl", pairs(400))
    options = DataOptions(data_path=(f"{path}:0.5",), cache_dir=str(tmp_path), data_split="none", eval_fraction=0.0)
    # 5 standard deviations of Binomial(400, 0.5) are 50.
    assert len(load_rows("sft", options, bpe_tokenizer).train) == pytest.approx(200, abs=50)


def test_second_call_loads_and_returns_the_same(options, bpe_tokenizer, monkeypatch):
    longest = max(load_rows("sft", options, bpe_tokenizer).train["num_tokens"])
    small = replace(options, max_seq_len=longest - 1)
    first = load_rows("sft", small, bpe_tokenizer)
    assert first.counts["response beyond max_seq_len"] > 0
    monkeypatch.setattr(cache, "select_records", lambda *a: pytest.fail("built a second time"))
    second = load_rows("sft", small, bpe_tokenizer)
    assert second.train.to_list() == first.train.to_list()
    assert second.counts.to_json() == first.counts.to_json()


def test_nothing_is_pickled_and_the_folder_is_private(options, bpe_tokenizer):
    built = load_rows("sft", options, bpe_tokenizer)
    folder = Path(built.train.cache_files[0]["filename"]).parent
    files = ["CACHEDIR.TAG", "counts.json", "eval.arrow", "train.arrow"]
    assert sorted(file.name for file in folder.iterdir()) == files
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(Path(options.cache_dir).stat().st_mode) == 0o700


def test_key_follows_content_options_and_tokenizer(options, bpe_tokenizer, tmp_path):
    def key() -> str:
        return cache_key(of_stage("sft", options), bpe_tokenizer)

    first = key()
    assert key() == first
    assert cache_key(of_stage("sft", replace(options, cache_dir="/elsewhere")), bpe_tokenizer) == first
    assert cache_key(of_stage("reward", options), bpe_tokenizer) != first
    for change in ({"seed": 5}, {"max_seq_len": 100}, {"train_on_prompt": True}, {"column_map": {"prompt": "x"}}):
        assert cache_key(of_stage("sft", replace(options, **change)), bpe_tokenizer) != first
    bpe_tokenizer.chat_template = "{{ 'x' }}"
    assert key() != first
    bpe_tokenizer.chat_template = None
    assert key() == first
    bpe_tokenizer.eos_token = "<unk>"
    assert key() != first
    bpe_tokenizer.eos_token = "</s>"
    write_rows(tmp_path / "rows.jsonl", pairs(61))
    assert key() != first


@pytest.mark.parametrize("flag", ["data_path", "eval_data_path", "sft_only_data_path"])
def test_key_follows_each_file_of_each_source(flag, bpe_tokenizer, tmp_path):
    """Of two sources of a flag, the second one a folder of two files."""
    (tmp_path / "more").mkdir()
    files = [tmp_path / name for name in ("a.jsonl", "more/b.jsonl", "more/c.jsonl")]
    for number, file in enumerate(files):
        write_rows(file, pairs(2, start=10 * number))
    write_rows(tmp_path / "rows.jsonl", pairs(3, start=50))
    given = {"data_path": (f"{tmp_path}/rows.jsonl",)} | {flag: (f"{tmp_path}/a.jsonl", f"{tmp_path}/more")}
    keys = [cache_key(of_stage("sft", DataOptions(**given)), bpe_tokenizer)]
    for number, file in enumerate(files):
        write_rows(file, pairs(3, start=10 * number))
        keys.append(cache_key(of_stage("sft", DataOptions(**given)), bpe_tokenizer))
    assert len(set(keys)) == 4


def test_default_folder_is_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder(None) == tmp_path / "xdg" / "rlhf-pipeline"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder(None) == tmp_path / "home" / ".cache" / "rlhf-pipeline"


def test_one_of_several_builds_and_the_others_wait(options, bpe_folder, monkeypatch):
    """Threads stand in for processes: each call opens its own lock file, as another process would."""
    builders = []
    original = cache._build_folder

    def slow(*arguments):
        builders.append(threading.get_ident())
        time.sleep(0.2)
        original(*arguments)

    monkeypatch.setattr(cache, "_build_folder", slow)
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(load_rows, "sft", options, load_tokenizer(str(bpe_folder))) for _ in range(3)]
        sizes = {len(call.result(timeout=60).train) for call in calls}
    assert len(builders) == 1
    assert len(sizes) == 1


def test_preparations_that_fail_in_turn_delete_the_lock_and_let_one_in_at_a_time(options, bpe_tokenizer, monkeypatch):
    inside, most, delete = [], [], Path.unlink

    def failing(*_):
        inside.append(threading.get_ident())
        time.sleep(0.1)
        most.append(len(inside))
        inside.remove(threading.get_ident())
        raise InputError("no")

    def slow_delete(path, missing_ok=False):
        time.sleep(0.07)  # as long as another one waits before it asks again
        delete(path, missing_ok=missing_ok)

    def many() -> None:
        for _ in range(2):
            with pytest.raises(InputError):
                load_rows("sft", options, bpe_tokenizer)

    monkeypatch.setattr(cache, "_build_folder", failing)
    monkeypatch.setattr(cache, "cache_key", lambda *_: "key")
    monkeypatch.setattr(Path, "unlink", slow_delete)
    with ThreadPoolExecutor(3) as pool:
        for call in [pool.submit(many) for _ in range(3)]:
            call.result(timeout=60)
    assert len(most) == 6 and set(most) == {1}
    assert not list(Path(options.cache_dir).iterdir())
