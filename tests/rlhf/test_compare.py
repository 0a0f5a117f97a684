"""`rlhf compare` from its command line, with models whose answers are known."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.messages import naming
from support.scripted_model import random_model, save, scripted_model, tiny_config
from transformers import LlamaForSequenceClassification, OPTConfig, OPTForCausalLM

from pipeline.data.templates import encode_conversation, encode_prompt
from pipeline.data.turns import Message
from pipeline.inference.answer_scores import load_scorer, score_answers
from pipeline.inference.answers import load_chat_tokenizer
from pipeline.models.source import ModelSource
from pipeline.rewards.reward_model import scored_ids
from rlhf.compare import main, unseen_note

ROOT = Path(__file__).resolve().parents[2]
QUESTIONS = "one\ntwo\n\nthree\n"


@pytest.fixture(scope="module")
def plain(bpe_folder, tmp_path_factory) -> str:
    """A random model whose vocabulary is the tokenizer's."""
    return random_model(bpe_folder, tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def padded(bpe_folder, tmp_path_factory) -> str:
    """Another architecture, another vocabulary size: OPT with 408 entries for 400 tokens."""
    torch.manual_seed(3)
    config = OPTConfig(
        vocab_size=408,
        hidden_size=32,
        ffn_dim=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        word_embed_proj_dim=32,
        max_position_embeddings=128,
        init_std=0.5,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return save(OPTForCausalLM(config), bpe_folder, tmp_path_factory.mktemp("padded"))


@pytest.fixture(scope="module")
def judge_path(bpe_folder, tmp_path_factory) -> str:
    torch.manual_seed(4)
    config = tiny_config()
    config.num_labels = 1
    model = LlamaForSequenceClassification(config)
    torch.nn.init.normal_(model.score.weight, std=1.0)
    return save(model, bpe_folder, tmp_path_factory.mktemp("judge"))


@pytest.fixture
def questions(tmp_path) -> str:
    file = tmp_path / "questions.txt"
    file.write_text(QUESTIONS)
    return str(file)


def compared(capsys, tmp_path, *argv: str) -> dict:
    """The JSON that the command writes."""
    assert main([*argv, "--output", str(tmp_path / "out" / "run-0.5")]) == 0, capsys.readouterr().err
    return json.loads((tmp_path / "out" / "run-0.5.json").read_text())


def texts(result: dict, label: str) -> list[str]:
    return [row["text"] for prompt in result["prompts"] for row in prompt["answers"][label]]


# ---- the command ----


def test_a_model_against_itself_ties_everywhere(plain, judge_path, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("COLUMNS", "120")
    argv = ("--models", plain, plain, "--reward-model", judge_path, "--max-new-tokens", "8")
    result = compared(capsys, tmp_path, *argv)
    first, second = result["models"]
    assert first["against"] is None and first["mean_score"] == second["mean_score"]
    against = second["against"]
    assert (against["wins"], against["ties"], against["losses"], against["num_prompts"]) == (0, 108, 0, 108)
    none = {"value": 0.0, "low": 0.0, "high": 0.0, "method": "a bootstrap over the prompts"}
    assert against["win_rate"]["value"] == 0.5 and against["difference"] == none
    shown = capsys.readouterr().out
    assert "0.50 [0.41, 0.59]" in shown and "n = 108 prompts" in shown and "B 0/108/0" in shown
    assert against["length_controlled"] == against["win_rate"] and shown.count("0.50 [0.41, 0.59]") == 2


def test_the_first_model_prints_how_long_all_take(plain, questions, capsys, monkeypatch):
    """A batch of one prompt takes what it takes; without the limit in seconds every comparison prints the line once."""
    monkeypatch.setattr("rlhf.compare.MIN_ESTIMATE_S", 0.0)
    argv = ["--models", plain, plain, "--prompts", questions, "--batch-size", "1", "--max-new-tokens", "2"]
    assert main(argv) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines.count("note: about 1 minute for 2 models") == 1 == lines.index("note: about 1 minute for 2 models") + 1


def test_models_of_other_vocabularies_and_architectures(plain, padded, questions, capsys, tmp_path):
    flags = ("--model-name-or-path-baseline", plain, "--model-name-or-path-finetune", padded)
    argv = ("--prompts", questions, "--temperature", "1.5", "--max-new-tokens", "30")
    result = compared(capsys, tmp_path, *flags, *argv)
    assert [model["path"] for model in result["models"]] == [plain, padded]
    assert [prompt["prompt"] for prompt in result["prompts"]] == ["one", "two", "three"]
    assert texts(result, "A") != texts(result, "B")
    assert all(model["mean_score"] is None for model in result["models"])


def test_scores_are_those_of_the_reward_model_on_its_training_text(bpe_folder, judge_path, questions, capsys, tmp_path):
    good = scripted_model(bpe_folder, tmp_path / "good", " yes")
    endless = scripted_model(bpe_folder, tmp_path / "endless", "no", ends=False)
    argv = ("--models", good, endless, "--reward-model", judge_path, "--prompts", questions, "--max-new-tokens", "5")
    result = compared(capsys, tmp_path, *argv)
    judge = load_scorer(judge_path, dtype=torch.float32)
    answer = result["prompts"][0]["answers"]["A"][0]
    conversation = [Message("user", "one"), Message("assistant", "yes")]
    ids = encode_conversation(judge.tokenizer, conversation).ids
    logits = judge.model.model(input_ids=torch.tensor([ids])).logits
    assert (answer["text"], answer["finished"]) == ("yes", True) and ids[-1] == 2
    assert answer["score"] == pytest.approx(logits.item(), abs=1e-5)
    cut = result["prompts"][0]["answers"]["B"][0]
    assert (cut["finished"], cut["num_tokens"], result["models"][1]["finished_share"]) == (False, 5, 0.0)
    assert scored_ids(judge.tokenizer, conversation[:1], "yes", False, num_positions=None) == ids[:-1]


REWARDS = """
import os, time
from pathlib import Path
def wanted(prompts, completions, word):
    return [None if one is None else float(one in text) for one, text in zip(word, completions)]
def slow(completions):
    time.sleep(2)
    return [1.0] * len(completions)
def meet(completions):
    here = Path(__file__).parent
    (here / f"met-{os.getpid()}").touch()
    end = time.monotonic() + 10
    while (met := len(list(here.glob("met-*")))) < 3 and time.monotonic() < end:
        time.sleep(0.01)
    return [met] * len(completions)
"""


@pytest.fixture
def functions(bpe_folder, tmp_path) -> list[str]:
    """Two models that say "yes" and "no" to three prompts, of which the last has no word to look for."""
    (tmp_path / "f.py").write_text(REWARDS)
    rows = [{"prompt": "one", "word": "yes"}, {"prompt": "two", "word": "no"}, {"prompt": "three", "word": None}]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    models = (scripted_model(bpe_folder, tmp_path / text, f" {text}") for text in ("yes", "no"))
    return ["--models", *models, "--prompts", str(tmp_path / "q.jsonl"), "--max-new-tokens", "5"]


def test_a_function_decides_the_wins_by_a_column_of_the_data(functions, capsys, tmp_path):
    """B wins the second prompt and loses the first; to the third the function does not apply."""
    result = compared(capsys, tmp_path, *functions, "--reward-function", f"{tmp_path}/f.py:wanted:3")
    against = result["models"][1]["against"]
    assert (against["wins"], against["ties"], against["losses"], against["num_prompts"]) == (1, 0, 1, 2)
    given = [[row["score"] for row in one["answers"]["A"] + one["answers"]["B"]] for one in result["prompts"]]
    assert given == [[3.0, 0.0], [0.0, 3.0], [None, None]]
    assert [model["mean_score"] for model in result["models"]] == [1.5, 1.5]


def test_each_scorer_has_rows_of_its_own_and_functions_decide(functions, judge_path, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("COLUMNS", "140")
    length = '{"name": "length:-1", "args": {"high": 1, "margin": 1}}'
    argv = (*functions, "--reward-function", length, "--reward-model", judge_path)
    result = compared(capsys, tmp_path, *argv)
    shown = capsys.readouterr().out
    assert list(result["by_scorer"]) == ["length", Path(judge_path).name]
    assert result["by_scorer"]["length"] == result["models"]
    first = result["prompts"][0]["answers"]["A"][0]
    assert first["score"] == first["scores"]["length"] != first["scores"][Path(judge_path).name]
    alone = compared(capsys, tmp_path, *functions, "--reward-model", judge_path)
    assert result["by_scorer"][Path(judge_path).name] == alone["models"] and "by_scorer" not in alone
    assert "scored by" in shown and f"B by {Path(judge_path).name} " in shown
    assert "scored by" not in capsys.readouterr().out
    assert "reward_timeout_s" in result["settings"] and "reward_timeout_s" not in alone["settings"]


def test_a_function_that_takes_too_long_ends_the_comparison(functions, capsys, tmp_path):
    assert main([*functions, "--reward", f"{tmp_path}/f.py:slow", "--reward-timeout-s", "0.5"]) == 2
    assert "slow gave no value for 6 of the last 6 responses (6 timed out)" in capsys.readouterr().err


def test_as_many_workers_as_the_flag_says(functions, capsys, tmp_path):
    """Three processes that wait for each other."""
    result = compared(capsys, tmp_path, *functions, "--reward", f"{tmp_path}/f.py:meet", "--reward-workers", "3")
    assert [model["mean_score"] for model in result["models"]] == [3.0, 3.0]


@pytest.mark.parametrize(
    ("settings", "is_noted"),
    [
        ({"reward_model_name_or_path": "NAME"}, True),
        ({"reward_model_name_or_path": "", "critic": {"model_name_or_path": "NAME"}}, True),
        ({"critic": {"model_name_or_path": "NAME"}, "rewards": {"reward_function": ["length"]}}, False),
        ({"reward_model_name_or_path": "another"}, False),
        ({"critic": 5}, False),
    ],
)
def test_a_note_asks_for_a_reward_model_that_training_did_not_see(settings, is_noted, tmp_path):
    (tmp_path / "training_config.json").write_text(json.dumps(settings).replace("NAME", "reward"))
    notes = unseen_note(["/no/sft", str(tmp_path)], "output/reward")
    assert bool(notes) is is_noted and all("was trained with reward and may exploit it" in note for note in notes)


def test_scores_do_not_depend_on_the_batch(judge_path):
    judge = load_scorer(judge_path, dtype=torch.float32)
    prompt = (Message("user", "Why?"),)
    answers = [(prompt, text, finished) for text, finished in (("The fox", True), ("a", False), ("much longer", True))]
    alone = [score_answers(judge, [answer], batch_size=1)[0] for answer in answers]
    assert len({round(score, 3) for score in alone}) == 3
    assert score_answers(judge, answers, batch_size=2) == pytest.approx(alone, abs=1e-5)


@pytest.mark.parametrize("how", [["--temperature", "2", "--top-k", "50"], ["--num-beams", "2"]])
def test_several_answers_to_a_prompt(how, plain, questions, capsys, tmp_path):
    argv = ("--models", plain, plain, "--prompts", questions, "--num-return-sequences", "2", "--max-new-tokens", "6")
    result = compared(capsys, tmp_path, *argv, *how)
    answers = texts(result, "A")
    assert len(answers) == 6 and len(set(answers)) > 3
    assert texts(result, "B") == answers  # the same seed for every model
    assert texts(compared(capsys, tmp_path, *argv, *how), "A") == answers
    other = texts(compared(capsys, tmp_path, *argv, *how, "--seed", "9"), "A")
    assert (other == answers) is (how[0] == "--num-beams")


def test_greedy_is_the_default_and_ignores_the_seed(plain, questions, capsys, tmp_path):
    argv = ("--models", plain, plain, "--prompts", questions, "--max-new-tokens", "8")
    first = texts(compared(capsys, tmp_path, *argv), "A")
    assert texts(compared(capsys, tmp_path, *argv, "--seed", "9", "--batch-size", "1"), "A") == first
    assert texts(compared(capsys, tmp_path, *argv, "--repetition-penalty", "5.0"), "A") != first


@pytest.mark.parametrize(("width", "side_by_side"), [(80, True), (60, False)])
def test_answers_stand_side_by_side_where_the_width_allows_it(
    width, side_by_side, bpe_folder, questions, monkeypatch, capsys, tmp_path
):
    monkeypatch.setenv("COLUMNS", str(width))
    one = scripted_model(bpe_folder, tmp_path / "one", " [red]\x1b1m")
    two = scripted_model(bpe_folder, tmp_path / "two", " four")
    assert main(["--models", one, two, "--prompts", questions]) == 0
    lines = capsys.readouterr().out.splitlines()
    row = next(line for line in lines if "[red]\\x1b1m" in line)  # neither markup nor an escape
    assert ("four" in row) is side_by_side
    assert max(map(len, lines[: lines.index(f"A = {one}")])) <= width and "\x1b" not in "".join(lines)


def test_the_markdown_file_shows_texts_literally(bpe_folder, questions, capsys, tmp_path):
    odd = scripted_model(bpe_folder, tmp_path / "odd", " #`<b>|")
    compared(capsys, tmp_path, "--models", odd, odd, "--prompts", questions)
    content = (tmp_path / "out" / "run-0.5.md").read_text()
    assert "```text\n#`<b>|\n```" in content and f"- A = `{odd}`" in content
    assert "| B | " in content and "max_new_tokens `100`" in content


@pytest.mark.slow
def test_a_real_process_sends_tables_to_stdout_and_the_rest_to_stderr(plain, questions):
    command = [sys.executable, "prompt_eval.py", plain, plain, "--prompts", questions, "--max-new-tokens=4"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0 and "[3/3] three" in done.stdout, done.stderr
    assert "3 answers in" in done.stderr and "\x1b" not in done.stdout + done.stderr


# ---- errors ----


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--models", "only"], "got 1 ... two or more"),
        (["--model-name-or-path-baseline", "a"], "got 1 ... two or more"),
        (["--models", "a", "b", "--model-name-or-path-finetune", "c"], "give this, or"),
        (["--models", "/no/a", "/no/b"], "/no/a ... no such folder ... /"),
        (["--modles", "a", "b"], "did you mean --models?"),
        (["--models", "a", "b", "--language", "Englsh"], "did you mean English?"),
        (["--models", "a", "b", "--num-return-sequences", "2"], "--num-beams ... 2 ... --temperature"),
        (["--models", "a", "b", "--prompts", "/no/file.txt"], "/no/file.txt: no such file"),
        (["--models", "a", "b", "--prompts", str(ROOT / "prompt_eval.py")], ".txt, .json, .jsonl are right"),
    ],
)
def test_input_errors_are_one_line_and_exit_2(argv, message, capsys):
    assert main(argv) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err == naming(message) and shown.err.count("\n") == 1


def test_a_language_model_is_no_reward_model(plain, questions, capsys):
    argv = ["--models", plain, plain, "--prompts", questions, "--reward-model", plain, "--max-new-tokens", "2"]
    assert main(argv) == 2
    assert "has no reward head" in capsys.readouterr().err


def test_prompts_longer_than_the_positions_are_refused(plain, padded, questions, capsys):
    argv = ["--models", padded, plain, "--prompts", questions, "--max-new-tokens", "120"]
    assert main(argv) == 2
    assert "the model's 128 positions" in capsys.readouterr().err


def test_answers_of_the_default_length_are_as_long_as_the_positions_allow(plain, padded, tmp_path, capsys):
    """The longest prompt and both models bound them; a prompt that leaves no position is refused all the same."""
    path, question = tmp_path / "prompts.txt", "one two three " * 3
    path.write_text(f"one\n{question}\n", encoding="utf-8")
    tokenizer = load_chat_tokenizer(ModelSource(padded))
    room = 128 - len(encode_prompt(tokenizer, [Message("user", question.strip())]))
    assert 1 < room < 100
    assert main(["--models", plain, padded, "--prompts", str(path), "--temperature", "1"]) == 0
    assert capsys.readouterr().err == naming(f"note: --max-new-tokens {room} ... longest prompt")
    path.write_text("a" * 600, encoding="utf-8")
    assert main(["--models", plain, padded, "--prompts", str(path)]) == 2
    assert capsys.readouterr().err == naming("at most 0 new tokens")


def test_the_score_of_a_cut_answer_is_that_of_its_last_own_token(bpe_folder, judge_path, capsys, tmp_path):
    (tmp_path / "q.txt").write_text("one\ntwo\n")
    good = scripted_model(bpe_folder, tmp_path / "good", " yes")
    endless = scripted_model(bpe_folder, tmp_path / "endless", "no", ends=False)
    argv = (
        "--models",
        good,
        endless,
        "--reward-model",
        judge_path,
        "--prompts",
        str(tmp_path / "q.txt"),
        "--max-new-tokens",
        "5",
    )
    assert main([*argv, "--output", str(tmp_path / "out")]) == 0, capsys.readouterr().err
    result = json.loads((tmp_path / "out.json").read_text())
    judge = load_scorer(judge_path, dtype=torch.float32)
    cut = result["prompts"][0]["answers"]["B"][0]
    assert not cut["finished"]
    ids = encode_conversation(judge.tokenizer, [Message("user", "one"), Message("assistant", cut["text"])]).ids
    with torch.no_grad():
        scores = [judge.model.model(input_ids=torch.tensor([one])).logits.item() for one in (ids[:-1], ids)]
    assert cut["score"] == pytest.approx(scores[0], abs=1e-5) and abs(scores[0] - scores[1]) > 1e-3


@pytest.mark.parametrize("finished", [True, False])
def test_of_a_long_text_the_last_tokens_are_scored(bpe_folder, judge_path, finished):
    tokenizer = load_scorer(judge_path, dtype=torch.float32).tokenizer
    prompt, answer = [Message("user", "Where is it, and how does it get there?")], "The quick brown fox jumps"
    whole = encode_conversation(tokenizer, [*prompt, Message("assistant", answer)]).ids
    whole = whole if finished else whole[:-1]
    assert scored_ids(tokenizer, prompt, answer, finished, num_positions=12) == whole[-12:] != whole[:12]
    assert scored_ids(tokenizer, prompt, answer, finished, num_positions=len(whole)) == whole
    assert scored_ids(tokenizer, prompt, answer, finished, num_positions=None) == whole
