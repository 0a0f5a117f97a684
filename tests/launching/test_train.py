"""train.py as a real process: plans, commands, chaining, refusals. Launchers are stubs (launch_stub.py)."""

import shlex
import socket
from itertools import product

import pytest
from support.launch_stub import ROOT, TINY, make_model, notes, started, train
from support.marks import slow_but
from support.messages import naming, refusal

from pipeline.configuration.flag_table import flat_items
from pipeline.errors import dashed
from pipeline.launching.request import parse_request
from rlhf.train_plan import make_plan

PRESETS = ROOT / "launch" / "presets"
SHARED, WHOLE = ("--data-split", "2,4,4"), ("--data-split", "none")


# --- commands and chaining ------------------------------------------------------------------------------------------


def test_three_steps_in_order_with_chained_folders(tmp_path):
    done = train(tmp_path, *TINY, "--output-dir", "my out", STUB_OUTCOMES="0,0")
    assert done.returncode == 0, done.stderr
    assert started(tmp_path) == [
        ["step1_sft.main", "--preset", f"{PRESETS}/tiny.yaml", "--output-dir", "my out/sft", *SHARED],
        ["step2_reward.main", "--preset", f"{PRESETS}/tiny.yaml", "--output-dir", "my out/reward", *SHARED],
        ["step3_ppo.main", "--preset", f"{PRESETS}/tiny.yaml",
         "--actor-model-name-or-path", "my out/sft", "--critic-model-name-or-path", "my out/reward",
         "--output-dir", "my out", *SHARED],
    ]  # fmt: skip
    assert done.stdout.splitlines()[-1] == "next: python chat.py 'my out/actor'"
    assert "== stage 2: reward model" in done.stdout and "== stage 3: done in" in done.stdout


@pytest.mark.slow
def test_a_reward_model_is_followed_by_the_same_command_for_the_next_stage(tmp_path):
    done = train(tmp_path, *TINY, "--step", "2", "--output-dir", "my out", "--overwrite", STUB_OUTCOMES="0,0")
    assert done.returncode == 0, done.stderr
    following = "python train.py --step 3 --actor-model tiny --reward-model tiny --output-dir 'my out'"
    assert done.stdout.splitlines()[-1] == f"next: {following}"


@pytest.mark.slow
def test_flags_reach_their_step(tmp_path):
    common = ("--resume", "never", "--overwrite", "--debug")
    done = train(
        tmp_path, *TINY, "--deployment-type", "single_node", "--num-gpus", "2", "--actor-zero-stage", "2",
        "--reward-zero-stage=1", *common, "--sft.data-path", "a b.jsonl", "c'd", "--ppo.kl-coef=0.2",
        "--reward.column-map", "two\nlines", gpus=3, STUB_OUTCOMES="0",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    sft, reward, ppo = started(tmp_path)
    assert {note["environment"]["WORLD_SIZE"] for note in notes(tmp_path)} == {"2"}
    assert sft[sft.index("--zero-stage") :] == ["--zero-stage", "2", *common, "--data-path", "a b.jsonl", "c'd", *WHOLE]
    assert reward[reward.index("--zero-stage") :] == [
        "--zero-stage",
        "1",
        *common,
        "--column-map",
        "two\nlines",
        "--data-split",
        "0,4,4",
    ]
    assert ppo[ppo.index("--actor-zero-stage") :] == [
        "--actor-zero-stage", "2", "--critic-zero-stage", "1", *common, "--kl-coef=0.2", "--data-split", "0,4,4"
    ]  # fmt: skip


def planned(*words: str) -> dict[str, dict[str, object]]:
    """Section -> flags of each stage that `train.py WORDS` would run."""
    plan = make_plan(["--actor-model", "tiny", "--reward-model", "tiny", *words], prog="python train.py")
    return {planned.stage.section: dict(flat_items(planned.resolved.config)) for planned in plan.chosen}


def refused(*words: str) -> list[str]:
    return refusal(planned, *words)


def test_a_flag_without_a_section_is_for_all_stages(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = (
        "--data-path",
        "a.jsonl",
        "b.jsonl",
        "--column-map=prompt=q",
        "--template",
        "tokenizer",
        "--max-steps",
        "9",
    )
    flags = planned(*words, "--lora-dim", "8", "--ppo.max-steps", "4")
    for section in ("sft", "reward", "ppo"):
        assert flags[section]["data_path"] == ["a.jsonl", "b.jsonl"]
        assert flags[section]["column_map"] == "prompt=q" and flags[section]["template"] == "tokenizer"
    assert [flags[section]["max_steps"] for section in flags] == [9, 9, 4], "what is given for one stage is stronger"
    assert [flags["sft"]["lora_dim"], flags["reward"]["lora_dim"]] == [8, 8]
    assert [flags["ppo"]["actor_lora_dim"], flags["ppo"]["critic_lora_dim"]] == [8, 0]


def test_the_last_of_a_repeated_flag_counts_in_train_and_in_its_stages(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for flag in ("--max-steps", "--sft.max-steps"):
        assert planned("--step", "1", flag, "3", "--max-steps=4", flag, "5")["sft"]["max_steps"] == 5
        assert "--sft.max-steps: got '-3' (command line)" in refused("--step", "1", flag, "3", flag, "-3")[0]
    assert planned("--sft.max-steps", "7", "--max-steps", "3", "--max-steps", "4")["sft"]["max_steps"] == 7


def test_a_note_names_what_a_repeated_flag_replaces_but_not_what_is_stronger_by_its_place(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    words = ["--step", "1", "--step", "2", "--actor-model", "tiny", "--reward-model", "tiny"]
    words += ["--reward.seed=4", "--seed", "5", "--reward.seed", "6", "--reward.output-dir", "mine"]
    words += ["--enable-wandb", "true", "--reward.enable-tensorboard", "false"]
    (reward,) = make_plan(words, prog="python train.py").chosen
    assert capsys.readouterr().err.splitlines() == [naming("--step ... more than once ... 1")]
    assert reward.resolved.notes == (naming("--seed ... more than once ... 4"),)
    run = reward.resolved.config.run
    assert (run.seed, run.output_dir, run.monitors) == (6, "mine", ["wandb"])


def test_a_flag_without_a_section_must_fit_all_stages_that_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert planned("--step", "1", "2", "--max-seq-len", "64")["reward"]["max_seq_len"] == 64
    assert refused("--max-seq-len", "64", "--kl-coef", "1") == [
        naming("--max-seq-len ... stage 3 ... --sft.max-seq-len and --reward.max-seq-len"),
        naming("--kl-coef ... stage 1 and stage 2 ... --ppo.kl-coef"),
    ]
    assert refused("--step", "1", "--kl-coef", "1") == [naming("--kl-coef ... --ppo.kl-coef, of stage 3")]
    names = ("sft.learning_rate", "reward.learning_rate", "ppo.actor_learning_rate", "ppo.critic_learning_rate")
    rates = " and ".join(dashed(name) for name in names)
    assert refused("--learning-rate", "1") == [naming(f"--learning-rate ... not one value ... {rates}")]
    assert planned("--step", "3", "--lora-dim", "4")["ppo"]["actor_lora_dim"] == 4
    folders = "--sft.run-dir and --reward.run-dir and --ppo.run-dir"
    assert refused("--run-dir", "x") == [naming(f"--run-dir ... not one value ... {folders}")]


@pytest.mark.parametrize(
    ("word", "right"),
    [
        ("--warmup-steps", "--num-warmup-steps"),
        ("--lora-r", "--lora-dim"),
        ("--max-length", "--sft.max-seq-len or --reward.max-seq-len"),
        ("--batch-size", "--per-device-train-batch-size"),
        ("--cliprange", "--ppo.policy-clip"),
        ("--max-step", "--max-steps?"),
    ],
)
def test_names_of_other_tools_are_answered_with_ours(tmp_path, monkeypatch, word, right):
    monkeypatch.chdir(tmp_path)
    assert refused(word, "1") == [naming(f"{word} ... unknown ... {right}")]


def test_one_name_for_the_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert planned("--model", "org/model")["sft"]["model_name_or_path"] == "org/model"


def commands_in(text: str) -> list[str]:
    """The commands that were shown, each in one line."""
    return [line for line in text.replace("\\\n", "").splitlines() if line.startswith("$ ")]


PLACES = [("--include", "a:0"), ("--exclude", "a:1"), ("--launcher", "srun")]


@pytest.mark.parametrize("place", PLACES, ids=["include", "exclude", "launcher"])
def test_launcher_flags_reach_the_launcher(tmp_path, place):
    (tmp_path / "hosts").write_text("a slots=2\n")
    nodes = ("--deployment-type", "multi_node", "--hostfile", "hosts", "--master-addr", "10.0.0.7")
    done = train(tmp_path, *TINY, "--step", "1", *nodes, "--master-port", "29", *place, "--dry-run")
    assert done.returncode == 0, done.stderr
    (command,) = commands_in(done.stdout)
    request = parse_request("multi_node", shlex.split(command)[3:])
    assert (request.hostfile, request.master_addr, request.master_port) == ("hosts", "10.0.0.7", 29)
    assert getattr(request, place[0].strip("-")) == place[1] and request.step == "1"


@pytest.mark.parametrize(
    ("given", "flags", "preset"),
    [
        ("350m", [], "350m"),
        ("facebook/opt-1.3b", [], "1.3b"),
        ("org/model-7b", ["--model-name-or-path", "org/model-7b"], None),
        ("qwen3-8b", "--chat-template-kwargs enable_thinking=false --model-name-or-path Qwen/Qwen3-8B".split(), "8b"),
        ("meta-llama/Llama-3.2-1B-Instruct", ["--model-name-or-path", "meta-llama/Llama-3.2-1B-Instruct"], "1b"),
    ],
)
def test_models(tmp_path, given, flags, preset):
    done = train(tmp_path, "--step", "1", "--actor-model", given, "--explain")
    assert done.returncode == 0, done.stderr
    words = shlex.split(commands_in(done.stdout)[0])
    expected = ["--preset", str(PRESETS / f"{preset}.yaml")] if preset else []
    assert words[4:] == [*expected, "--output-dir", "output/sft", *flags, *WHOLE]
    assert ("no preset" in done.stdout) == (preset is None)
    assert "note: --reward-model" not in done.stdout, "no stage that starts from it is to run"


def test_config_file_replaces_chained_folders_and_keeps_origins(tmp_path):
    (tmp_path / "run.yaml").write_text(
        "train: {step: [1, 3], actor_model: tiny}\n"
        "sft: {output_dir: elsewhere/tuned, learning_rate: 2e-5}\nppo: {critic_model_name_or_path: org/critic}\n"
    )
    done = train(tmp_path, "--config", "run.yaml", "--sft.max-steps", "7", "--explain")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["learning_rate", "2e-05", "run.yaml"] in rows
    assert ["output_dir", "elsewhere/tuned", "run.yaml"] in rows
    assert ["max_steps", "7", "command", "line"] in rows
    assert ["per_device_train_batch_size", "32", f"{PRESETS}/tiny.yaml"] in rows
    assert ["seed", "1234", "default"] in rows
    assert ["actor_model_name_or_path", "elsewhere/tuned", "command", "line"] in rows
    assert ["critic_model_name_or_path", "org/critic", "run.yaml"] in rows


def test_config_file_without_sections_is_for_one_step(tmp_path):
    (tmp_path / "flat.yaml").write_text("max_steps: 3\n")
    one = train(tmp_path, "--config", "flat.yaml", "--step", "1", "--explain")
    assert (
        one.returncode == 0
        and "max_steps                          3                              flat.yaml" in one.stdout
    )
    three = train(tmp_path, "--config", "flat.yaml", "--explain")
    assert three.returncode == 2 and "flags without sections" in three.stderr


def test_dry_run_starts_nothing(tmp_path):
    done = train(tmp_path, "--dry-run")
    assert done.returncode == 0 and done.stdout.endswith("dry run: nothing was started\n")
    assert started(tmp_path) == [] and not (tmp_path / "output").exists()


# --- what is refused ------------------------------------------------------------------------------------------------


def test_all_errors_of_all_steps_at_once(tmp_path):
    done = train(
        tmp_path, "--step", "1", "--sft.learning-rat", "1", "--reward.seed", "x", "--ppo.kl-coeff", "1", "--stp"
    )
    assert done.returncode == 2 and started(tmp_path) == []
    lines = done.stderr.splitlines()
    assert lines == [
        naming("error: --stp ... --step?"),
        naming("error: --sft.learning-rat ... --sft.learning-rate?"),
        naming("error: --reward.seed ... 'x' (command line) ... integer"),
        naming("error: --ppo.kl-coeff ... --ppo.kl-coef?"),
    ]


def test_an_unknown_section_hides_no_error_of_the_stages(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(
        "train: {stp: 3}\nsft: {logging_steps: 3}\nrewrd: {seed: 1}\nppo: {kl_coef: -1}\n"
    )
    assert refused("--config", "run.yaml") == [
        naming("run.yaml ... rewrd ... reward? ... train, sft, reward, ppo, dpo"),
        naming("run.yaml ... stp ... step?"),
        naming("sft: run.yaml ... logging_steps ... print_steps"),
        naming("--ppo.kl-coef ... -1 (run.yaml) ... 0"),
    ]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--actor-model", "7b"), 2, "--actor-model: got '7b'"),
        (("--actor-model", "./none/model"), 2, "--actor-model: ./none/model: no such folder"),
        (
            ("--resume", "output/runs/sft/checkpoints/step-3"),
            2,
            "--resume ... output/runs/sft/checkpoints/step-3",
        ),
        (("--deployment-type", "single_gpu", "--num-gpus", "2"), 2, "--num-gpus: got 2 with single_gpu"),
        (("--deployment-type", "multi_node", "--hostfile", "none"), 2, "--hostfile: none: cannot read it"),
        (("--deployment-type", "multi_nod"), 2, "did you mean multi_node?"),
        (("--hostfile", "hosts"), 2, "--hostfile ... hosts ... auto ... --deployment-type multi_node"),
        (("--include", "localhost:0", "--exclude", "localhost:1"), 2, "--include and --exclude"),
        (("--include", "localhost:0,2"), 2, "--include ... localhost:2 ... localhost has 0 to 1"),
        (("--exclude", "worker-0:1"), 2, "--exclude ... worker-0 ... localhost"),
        (("--include", "localhost:x"), 2, "'x' ... localhost:0,1"),
        (("--exclude", "localhost"), 2, "--exclude: localhost: leaves no GPU"),
        (("--deployment-type", "single_node", "--num-gpus", "3"), 3, "3 ... 2 GPUs ... visible here"),
        (("--step", "4"), 2, "--step: got '4'"),
        (
            ("--sft.offload", "--sft.zero-stage", "0"),
            2,
            "--sft.offload ... 1, 2 or 3 ... stage 0 ... --sft.zero-stage",
        ),
        (("--preset", "x"), 2, "--preset: presets follow --actor-model"),
        (("--data-path", "x", "\u2014dry-run"), 2, "error: \u2014dry-run ... '\u2014' ... --dry-run"),
        (("--config", "none.yaml"), 2, "none.yaml ... No such file"),
        (("1", "2"), 2, "3 values (tiny 1 2) ... one"),
    ],
)
def test_refused_in_one_line(tmp_path, words, code, message):
    done = train(tmp_path, *(() if "--actor-model" in words else TINY), *words)
    assert done.returncode == code, done.stderr
    assert len(done.stderr.splitlines()) == 1 and done.stderr == naming(message)
    assert started(tmp_path) == []


def test_port_in_use(tmp_path):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        done = train(tmp_path, "--master-port", str(taken.getsockname()[1]))
    assert done.returncode == 3 and "Address already in use" in done.stderr


@pytest.mark.slow
def test_step_3_needs_the_models_of_2_and_of_1_where_none_is_named(tmp_path):
    done = train(tmp_path, *TINY, "--step", "3")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line == naming("error: --ppo.critic-model-name-or-path ... output/reward ... config.json")
    assert line.endswith("python train.py --step 2 --actor-model tiny --reward-model tiny")
    planned = train(tmp_path, *TINY, "--step", "3", "--target", "1xH100")
    assert planned.returncode == 0, planned.stderr
    assert naming("note: output/reward ... planned as trained from output/demo/base") in planned.stdout.splitlines()
    for words in ((), ("--method", "grpo", "--ppo.reward-function", "length")):
        noted = train(tmp_path, *TINY, "--step", "1", "2", "3", "--target", "1xH100", *words).stdout
        assert (noted == naming("note: stage 3 ... reward model of stage 2")) == bool(words)
    make_model(tmp_path / "output" / "sft")
    make_model(tmp_path / "output" / "reward")
    assert train(tmp_path, *TINY, "--step", "3", STUB_OUTCOMES="0").returncode == 0


def test_a_plan_for_a_target_names_the_launchers_flags_that_it_replaces(tmp_path):
    def notes(*words: str) -> list[str]:
        done = train(tmp_path, *TINY, "--step", "1", "--dry-run", *words)
        assert done.returncode == 0, done.stderr
        return [line for line in done.stdout.splitlines() if "--target" in line]

    one = naming("--deployment-type single_gpu ... --target 2x8xH100 ... multi_node")
    assert notes("--target", "2x8xH100", "--deployment-type", "single_gpu") == [one]
    assert notes("--target", "2x8xH100") == notes("--target", "1xH100", "--deployment-type", "single_gpu") == []
    words = ("--deployment-type", "single_node", "--num-gpus", "4", "--include", "localhost:0")
    assert notes("--target", "8xH100", *words[:4]) == [naming("--num-gpus 4 ... --target 8xH100 ... 8")]
    assert notes("--target", "8xH100", *words[:2], *words[4:]) == [naming("--include localhost:0 ... --target 8xH100")]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--ppo.rollout-weights", "streamed"), "--rollout-weights streamed: needs --actor-zero-stage 3"),
        (("--ppo.inference-tp-size", "3"), "--inference-tp-size 3 ... 2 ranks ... 1"),
        (("--ppo.offload-reference-model", "true"), "--offload-reference-model / --offload-reward-model: need ZeRO"),
        (("--ppo.offload-reward-model", "true"), "--offload-reference-model / --offload-reward-model: need ZeRO"),
    ],
)
def test_what_step_3_would_refuse_is_refused_before_step_1(tmp_path, flags, says):
    below_3 = ("--ppo.actor-zero-stage", "2", "--ppo.critic-zero-stage", "2")
    done = train(tmp_path, *TINY, *flags, *below_3, "--explain")
    assert done.returncode == 2 and done.stderr == naming(f"error: --ppo.{says.removeprefix('--')}")


def test_batch_arithmetic_of_the_users_json(tmp_path):
    (tmp_path / "ds.json").write_text('{"train_batch_size": 64, "zero_optimization": {"stage": 2}}')
    words = ("--step", "1", "--actor-model", "tiny", "--sft.deepspeed-config", "ds.json", "--explain")
    node = ("--deployment-type", "single_node", "--num-gpus", "2")
    good = train(tmp_path, *words, *node)
    assert good.returncode == 0, good.stderr
    assert ["zero_stage", "2", "ds.json"] in [line.split() for line in good.stdout.splitlines()]
    bad = train(tmp_path, *words, "--deployment-type", "single_gpu")
    assert bad.returncode == 2 and "train_batch_size: got 64" in bad.stderr and "x 1 rank = 32" in bad.stderr


def test_ptx_text_doubles_the_accumulation_that_the_users_json_may_name(tmp_path):
    (tmp_path / "ds.json").write_text('{"gradient_accumulation_steps": 2}')
    words = ("--step", "3", *TINY, "--ppo.deepspeed-config", "ds.json", "--explain")
    text = ("--ppo.unsupervised-data-path", "text.jsonl")
    done = train(tmp_path, *words, *text)
    assert done.returncode == 2 and "gradient_accumulation_steps: got 2, but" in done.stderr, done.stderr
    assert "makes it 4" in done.stderr


# --- parts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "value"),
    slow_but(
        [("--master-addr", "$(touch X)"), ("--include", "-oProxyCommand=x"), ("--exclude", "a\nb")],
        product(
            ["--master-addr", "--include", "--exclude"],
            ["$(touch X)", "-oProxyCommand=x", "a;touch X", "a b", "`x`", "a\nb"],
        ),
    ),
)
def test_names_of_hosts_hold_nothing_that_a_shell_acts_on(tmp_path, flag, value):
    done = train(tmp_path, *TINY, "--deployment-type", "multi_node", f"{flag}={value}")
    assert done.returncode == 2 and "expected host names" in done.stderr
    assert not list(tmp_path.rglob("X")) and not started(tmp_path)
