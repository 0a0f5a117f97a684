"""`rlhf chat` from its command line, in process and in a real terminal, with models whose replies are known."""

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.messages import naming
from support.scripted_model import SHOWN, TEXT, random_model, scripted_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from pipeline.data.templates import encode_prompt
from pipeline.data.turns import Message
from pipeline.errors import InputError
from pipeline.inference.answer_settings import AnswerSettings, ReplySettings
from pipeline.inference.answers import AnswerStreamer, generate_answers, load_chat_model
from pipeline.inference.chat_session import Conversation
from rlhf import chat

ROOT = Path(__file__).resolve().parents[2]


def ask(monkeypatch, capsys, *argv: str, stdin: str = "hello\n") -> str:
    monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
    assert chat.main(list(argv)) == 0
    return capsys.readouterr().out


def conversation(path: str, **settings) -> Conversation:
    return Conversation(load_chat_model(path, dtype=torch.float32), ReplySettings(**settings))


def nothing(_: str) -> None:
    pass


# ---- one question from a pipe ----


def test_a_pipe_gets_the_answer_alone_with_escapes_made_visible(speaking, monkeypatch, capsys):
    assert ask(monkeypatch, capsys, "--path", speaking, "--temperature", "0") == SHOWN + "\n"


def test_prompt_flag_needs_no_stdin(speaking, capsys):
    assert chat.main(["--path", speaking, "--temperature", "0", "--prompt", "hi"]) == 0
    assert capsys.readouterr().out == SHOWN + "\n"


def test_a_temperature_that_overflows_is_one_line(speaking, capsys):
    """transformers ends with `probability tensor contains either inf`."""
    flags = ["--temperature", "1e-310", "--repetition-penalty", "1.5", "--max-new-tokens", "4"]
    assert chat.main([speaking, "--prompt", "hi", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == naming(f"error: {speaking} ... not finite ... --temperature 1e-310 ... --repetition-penalty")


@pytest.mark.slow
def test_a_real_process_with_a_pipe(speaking):
    command = [sys.executable, "chat.py", speaking, "--temperature=0"]
    done = subprocess.run(command, input="hello", capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert (done.returncode, done.stdout) == (0, SHOWN + "\n"), done.stderr
    assert "\x1b" not in done.stderr and "\r" not in done.stderr


def test_seeds_repeat_a_sampled_reply_and_greedy_ignores_them(rambling, monkeypatch, capsys):
    def reply(*argv):
        return ask(monkeypatch, capsys, "--path", rambling, "--max-new-tokens", "12", *argv)

    hot = ("--temperature", "2")
    assert reply(*hot, "--seed", "5") == reply(*hot, "--seed", "5") != reply(*hot, "--seed", "6")
    assert reply(*hot) != reply(*hot)  # without a seed another one each time
    assert reply("--temperature", "0", "--seed", "5") == reply("--temperature", "0", "--seed", "6")


def test_the_global_generator_is_left_alone(rambling, monkeypatch, capsys):
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    ask(monkeypatch, capsys, "--path", rambling, "--max-new-tokens", "3", "--seed", "1")
    assert torch.equal(torch.rand(1), expected)


# ---- generation ----


def test_a_models_own_generation_config_changes_nothing(rambling, bpe_folder, tmp_path, monkeypatch, capsys):
    argv = ("--temperature", "0", "--max-new-tokens", "12")
    expected = ask(monkeypatch, capsys, "--path", rambling, *argv)
    trap = random_model(bpe_folder, tmp_path / "trap", vocab_size=408)
    settings = {"do_sample": True, "temperature": 5.0, "top_k": 0, "repetition_penalty": 9.0, "max_length": 3}
    settings |= {"min_new_tokens": 12, "num_beams": 3, "suppress_tokens": list(range(4, 300)), "eos_token_id": 2}
    (tmp_path / "trap" / "generation_config.json").write_text(json.dumps(settings))
    assert ask(monkeypatch, capsys, "--path", trap, *argv) == expected


def test_end_tokens_of_the_generation_config_are_honoured(endless, tmp_path, bpe_tokenizer):
    chat_model = load_chat_model(endless, dtype=torch.float32)
    prompt = encode_prompt(chat_model.tokenizer, [Message("user", "hi")])
    letter_b = bpe_tokenizer.convert_tokens_to_ids("b")
    assert letter_b not in chat_model.vocabulary.eos_ids
    model = AutoModelForCausalLM.from_pretrained(endless)
    model.generation_config.eos_token_id = [2, letter_b]
    model.save_pretrained(tmp_path)
    chat_model.tokenizer.save_pretrained(tmp_path)
    listed = load_chat_model(str(tmp_path), dtype=torch.float32)
    [[answer]] = generate_answers(listed, [prompt], ReplySettings(max_new_tokens=9), seed=0)
    assert (answer.text, len(answer.ids), answer.finished) == ("a", 2, True)


def test_ids_of_a_padded_vocabulary_are_never_sampled(rambling):
    chat_model = load_chat_model(rambling, dtype=torch.float32)
    assert chat_model.num_embeddings == 408
    with torch.no_grad():
        chat_model.model.lm_head.weight[400:] *= 50  # they would win if they were allowed to
    settings = ReplySettings(temperature=3.0, max_new_tokens=40)
    [[answer]] = generate_answers(chat_model, [[5, 6, 7]], settings, seed=0)
    assert answer.ids and max(answer.ids) < 400


@pytest.mark.parametrize("narrow", [{"top_p": 1e-6}, {"top_k": 1}])
def test_of_a_nucleus_of_one_token_that_one_is_answered(rambling, narrow):
    """Each setting by itself, at a temperature at which other tokens are drawn."""
    chat_model = load_chat_model(rambling, dtype=torch.float32)
    hot, greedy = {"temperature": 5.0, "max_new_tokens": 6}, ReplySettings(temperature=0.0, max_new_tokens=6)
    given = [greedy, ReplySettings(**hot, **narrow), ReplySettings(**hot)]
    likeliest, answer, other = (generate_answers(chat_model, [[5, 6, 7]], each, seed=0)[0][0] for each in given)
    assert answer.ids == likeliest.ids != other.ids


def test_a_tokenizer_larger_than_the_model_is_refused(bpe_folder, tmp_path):
    with pytest.raises(InputError, match=naming("378 ... vocabulary has 300")):
        load_chat_model(random_model(bpe_folder, tmp_path, vocab_size=300), dtype=torch.float32)


def test_an_id_beyond_the_vocabulary_is_refused(rambling):
    with pytest.raises(InputError, match=naming("9999 ... vocabulary")):
        generate_answers(load_chat_model(rambling, dtype=torch.float32), [[9999]], ReplySettings(), seed=0)


@pytest.mark.parametrize("sampled", [{}, {"temperature": 1.5}, {"temperature": 0.9, "top_p": 0.8, "top_k": 50}])
def test_batches_give_the_answers_of_single_prompts(rambling, sampled):
    """Of equal prompts too, whose samples differ; another order, seed or number of samples changes no other answer."""
    chat_model = load_chat_model(rambling, dtype=torch.float32)
    prompts, several = [[9, 8, 7, 6, 5, 4], [30], [40, 41, 42], [30]], 2 if sampled else 1
    settings = AnswerSettings(max_new_tokens=8, num_return_sequences=several, **sampled)
    together = generate_answers(chat_model, prompts, settings, seed=3)
    one = ReplySettings(max_new_tokens=8, **sampled)
    for prompt, answers in zip(prompts, together, strict=True):
        assert generate_answers(chat_model, [prompt], settings, seed=3) == [answers]
        assert generate_answers(chat_model, [prompt], one, seed=3) == [answers[:1]]
        assert len({answer.ids for answer in answers}) == several
    assert together[1] == together[3] and len({answers[0].ids for answers in together}) == 3
    assert (generate_answers(chat_model, prompts, settings, seed=4) != together) is bool(sampled)


def test_a_batch_of_transformers_gives_the_answers_of_sessions(rambling):
    """The longest prompt is not the first one; two have the token that pads the others."""
    chat_model = load_chat_model(rambling, dtype=torch.float32)
    pad = chat_model.vocabulary.pad_id
    prompts = [[30], [9, pad, pad, 8, 7, 6, 5], [40, 41, pad]]
    by_session = generate_answers(chat_model, prompts, ReplySettings(max_new_tokens=8), seed=0)
    penalised = ReplySettings(max_new_tokens=8, repetition_penalty=1.0001)
    assert generate_answers(chat_model, prompts, penalised, seed=0) == by_session


def test_streamed_pieces_join_to_the_text_and_split_no_character(speaking):
    chat_model = load_chat_model(speaking, dtype=torch.float32)
    pieces: list[str] = []
    streamer = AnswerStreamer(chat_model, pieces.append)
    generate_answers(chat_model, [[5]], ReplySettings(), seed=0, streamer=streamer)
    assert "".join(pieces) == TEXT.lstrip()
    assert len(pieces) > 3 and "é" in pieces and streamer.finished


# ---- conversations ----


def test_later_turns_are_rendered_like_training_data(speaking):
    talk = conversation(speaking)
    assert talk.say(" one ", nothing).ending == "end"
    talk.say("two", nothing)
    answer = Message("assistant", TEXT.strip())
    assert talk.turns == [Message("user", "one"), answer, Message("user", "two"), answer]
    prompt, _ = talk._fitting_prompt([*talk.turns, Message("user", "three")])
    text = f"\n\nHuman: one\n\nAssistant: {TEXT.strip()}</s>\n\nHuman: two\n\nAssistant: {TEXT.strip()}</s>"
    tokenizer = talk.chat_model.tokenizer
    assert tokenizer.decode(prompt) == text + "\n\nHuman: three\n\nAssistant:"


def test_the_system_prompt_comes_first_and_stays(speaking):
    talk = conversation(speaking)
    talk.start_afresh("Be brief.")
    talk.say("one", nothing)
    prompt, _ = talk._fitting_prompt([Message("user", "two")])
    assert talk.chat_model.tokenizer.decode(prompt).startswith("Be brief.\n\nHuman: two")


def test_old_turns_are_left_out_whole_when_positions_run_out(bpe_folder, tmp_path):
    path = scripted_model(bpe_folder, tmp_path, " ok", num_positions=64)
    talk = conversation(path, max_new_tokens=16)
    forgotten = [talk.say(f"question number {n}", nothing).num_forgotten for n in range(6)]
    assert forgotten[0] == 0 and max(forgotten) == 2 and all(count % 2 == 0 for count in forgotten)
    assert talk.turns[0].role == "user" and talk.turns[-2].content == "question number 5"
    prompt, _ = talk._fitting_prompt(talk.turns[:-1])
    assert len(prompt) + 16 <= 64


def test_a_message_that_alone_exceeds_the_positions_is_refused(bpe_folder, tmp_path):
    talk = conversation(scripted_model(bpe_folder, tmp_path, " ok", num_positions=32))
    with pytest.raises(InputError, match="32 positions"):
        talk.say("x" * 200, nothing)
    assert talk.turns == []
    assert talk.say("short", nothing).text == "ok"


def test_a_reply_uses_no_more_than_the_positions_left(bpe_folder, tmp_path):
    talk = conversation(scripted_model(bpe_folder, tmp_path, "ab", ends=False, num_positions=64), max_new_tokens=5000)
    reply = talk.say("hi", nothing)
    prompt = encode_prompt(talk.chat_model.tokenizer, [Message("user", "hi")])
    assert (reply.ending, reply.num_tokens) == ("limit", 64 - len(prompt))


def test_an_empty_reply_leaves_no_turns(bpe_folder, tmp_path):
    talk = conversation(scripted_model(bpe_folder, tmp_path, "\n"))
    assert talk.say("hi", nothing).text == ""
    assert talk.turns == [] and talk.take_back() == ""


def test_a_retry_differs_and_replaces_the_reply(rambling):
    talk = conversation(rambling, temperature=2.0, max_new_tokens=10)
    first = talk.say("hi", nothing).text
    question = talk.take_back()
    assert question == "hi" and talk.turns == []
    assert talk.say(question, nothing).text != first
    assert len(talk.turns) == 2


def test_an_interrupted_reply_is_kept(endless):
    talk = conversation(endless, max_new_tokens=5000)
    pieces: list[str] = []

    def stop_after_three(piece: str) -> None:
        pieces.append(piece)
        if len(pieces) == 3:
            raise KeyboardInterrupt

    reply = talk.say("hi", stop_after_three)
    assert reply.ending == "stopped" and reply.text.startswith("ab")
    assert talk.turns[-1] == Message("assistant", reply.text)


def test_an_adapter_folder_answers_like_the_merged_model(rambling, tmp_path, monkeypatch, capsys):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["o_proj", "q_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    wrapped = get_peft_model(AutoModelForCausalLM.from_pretrained(rambling), config)
    wrapped.save_pretrained(tmp_path / "merged" / "adapter")
    wrapped.merge_and_unload().save_pretrained(tmp_path / "merged")
    load_chat_model(rambling, dtype=torch.float32).tokenizer.save_pretrained(tmp_path / "merged")
    argv = ("--temperature", "0", "--max-new-tokens", "12", "--path")
    merged = ask(monkeypatch, capsys, *argv, str(tmp_path / "merged"))
    assert ask(monkeypatch, capsys, *argv, str(tmp_path / "merged" / "adapter")) == merged
    assert ask(monkeypatch, capsys, *argv, rambling) != merged


# ---- commands ----


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/claer", "did you mean /clear"),
        ("/foo", "/foo ... /help"),
        ("/set temprature 1", "did you mean temperature"),
        ("/set temperature hot", "got 'hot'"),
        ("/set top_p 2", "or equal to 1"),
        ("/retry", "/retry ... no reply yet"),
        ("/save a.jsonl", "/save ... no reply yet"),
        ("/score", "/score ... start again with --reward-model"),
    ],
)
def test_wrong_commands_say_what_would_be_right(speaking, line, message):
    with pytest.raises(InputError, match=naming(message)):
        chat.Shell(conversation(speaking)).execute(line)


def test_commands_act_on_the_conversation(speaking, capsys):
    talk = conversation(speaking)
    shell = chat.Shell(talk)
    for line in ("hello", "/set temperature 0.5", "/set top_k=7"):
        shell.execute(line)
    assert (talk.settings.temperature, talk.settings.top_k, len(talk.turns)) == (0.5, 7, 2)
    shell.execute("/clear")
    assert talk.turns == []
    shell.execute(" /etc is a folder")
    assert talk.turns[0].content == "/etc is a folder"
    shell.execute("/system Be kind.")
    shell.execute("/help")
    for word in ("/exit", "exit", "quit "):
        with pytest.raises(EOFError):
            shell.execute(word)
    shown = capsys.readouterr()
    assert shown.out == f"{SHOWN}\n{SHOWN}\n"
    assert "/retry" in shown.err and "temperature 0.5" in shown.err


# ---- errors ----


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--modl", "x"], "--modl ... --model?"),
        ([], "--model: missing"),
        (["--path", "/no/such/model"], "--model ... /no/such/model ... no such folder ... /"),
        (["--path", str(ROOT / "pipeline")], "holds no model"),
        (["--path", str(ROOT / "chat.py")], "is a file"),
        (["--path", "x", "--temperature", "-1"], "--temperature: got '-1'"),
    ],
)
def test_input_errors_are_one_line_and_exit_2(argv, message, capsys):
    assert chat.main(argv) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err == naming(message)
    assert shown.err.count("\n") == 1 and shown.err.startswith("error: ")


def test_a_mistyped_folder_gets_the_nearest_model(speaking, tmp_path, capsys):
    (tmp_path / "actor").symlink_to(speaking)
    assert chat.main(["--path", str(tmp_path / "actr")]) == 2
    assert f"did you mean {tmp_path / 'actor'}?" in capsys.readouterr().err
    assert chat.main(["--path", str(tmp_path)]) == 2
    assert capsys.readouterr().err == naming(f"no model (no config.json) ... {tmp_path / 'actor'}?")


def test_the_folder_of_a_run_names_its_model(speaking, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("actor", "critic", "sft"):
        shutil.copytree(speaking, Path("output") / name)
        stage = "ppo" if name != "sft" else "sft"
        (Path("output") / name / "training_config.json").write_text(json.dumps({"stage": stage, "data": {}}))
    for run, model in {"ppo": "actor", "sft": "sft", "other": ""}.items():
        folder = Path("output/runs") / run
        folder.mkdir(parents=True)
        for name in ("run.lock", "config.json"):  # the settings of a run, not of a model
            (folder / name).write_text("{}")
        assert chat.main([str(folder)]) == 2
        wrote = f"; it wrote output/{model}" if model else ""
        assert capsys.readouterr().err == naming("error: --model", f"{folder} ... a run ... a model's{wrote}")


def test_a_folder_of_another_name_is_no_guess(tmp_path, capsys):
    (tmp_path / "nan").mkdir()
    for name in ("nan/config.json", "hh.jsonl"):
        (tmp_path / name).write_text("{}")
    for path in ("hh.jsonl", "gone/model"):
        assert chat.main(["--path", str(tmp_path / path)]) == 2
        assert "did you mean" not in capsys.readouterr().err


def test_a_reward_model_is_refused(rambling, tmp_path, capsys):
    AutoModelForSequenceClassification.from_pretrained(rambling, num_labels=1).save_pretrained(tmp_path)
    assert chat.main(["--path", str(tmp_path)]) == 2
    assert "is a reward model" in capsys.readouterr().err


def test_an_empty_pipe_is_refused(speaking, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO(" \n"))
    assert chat.main(["--path", speaking]) == 2
    assert "the pipe is empty" in capsys.readouterr().err
    assert chat.main(["--path", speaking, "--prompt", ""]) == 2
    assert capsys.readouterr().err == naming("error: --prompt ... empty")
