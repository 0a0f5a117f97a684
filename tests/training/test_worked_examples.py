"""The worked examples, applied to a copy of the project: a flag, a metric, a loss, a monitor, and so on."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import forks
from support.tiny_run import SCORE_MEAN, SCORE_STD, make_folder, read_metrics, write_lines
from support.worked_examples import copied_project, examples
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project with all examples."""
    kinds = [kind for kind in examples() if kind != "stage"]  # its package is in tests/project
    return copied_project(tmp_path_factory.mktemp("copy"), *kinds)


def run(changed: Path, folder: Path, *words: str, **variables: str) -> str:
    """Run Python words in a folder with the changed project, and return what it printed."""
    path = os.pathsep.join([str(changed), str(changed / "tests"), str(changed / "tests/faults")])
    environment = forks.environment() | {"PYTHONPATH": path} | variables
    done = subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def train(changed: Path, folder: Path, output: str, *more: str) -> list[dict]:
    words = "--model-name-or-path base --data-path train.jsonl --data-split none --max-seq-len 48 --max-steps 2"
    also = f"--per-device-train-batch-size 2 --data-output-path cache --output-dir {output} --learning-rate 1e-3"
    run(changed, folder, "-m", "step1_sft.main", *words.split(), *also.split(), *more)
    return read_metrics(folder / Path(output).parent / "runs" / Path(output).name)


def test_a_run_writes_the_new_metric_and_the_new_monitor_gets_its_lines(changed: Path, tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    (*_, last) = lines = train(changed, folder, "out/sft", "--monitors", "latest")
    assert [line["step"] for line in lines if "eval_bits" in line] == [0, 2]
    assert last["eval_bits"] == pytest.approx(last["eval_loss"] / math.log(2))
    newest = json.loads((folder / "out/runs/sft/latest.json").read_text())
    assert newest == {name: value for name, value in last.items() if name not in ("stage", "time")}


def test_the_new_flag_changes_training_as_its_row_says(changed: Path, tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    code = "import flag_tests; print(flag_tests.FLAG_TESTS['sft.focal_gamma'].value)"
    gamma = run(changed, folder, "-c", code).strip()
    plain = train(changed, folder, "plain/sft")
    focal = train(changed, folder, "focal/sft", "--focal-gamma", gamma)
    # Tokens weigh less than 1: the loss of the same model on the same rows falls, that of evaluations is as before.
    first, second = ([line["loss"] for line in lines if "loss" in line][0] for lines in (plain, focal))
    assert 0 < second < first
    assert plain[0]["eval_loss"] == focal[0]["eval_loss"] and plain[-1]["eval_loss"] != focal[-1]["eval_loss"]


def judge(changed: Path, folder: Path, output: str, answers: list[str | None]) -> list[dict]:
    """Train a step on prompts with these answers, with one of them held out for each, and return the first samples."""
    prompts = [json.loads(line)["prompt"] for line in (folder / "test.jsonl").open()]
    rows = [{"prompt": prompt, "answer": answer} for prompt, answer in zip(prompts, answers, strict=True)]
    write_lines(folder / "held_out.jsonl", rows)
    write_lines(folder / "prompts.jsonl", [{"prompt": f"{prompt} Why?", "answer": "-"} for prompt in prompts])
    words = "--actor-model-name-or-path base --critic-model-name-or-path scorer --data-split none --dtype fp32"
    lengths = "--max-prompt-seq-len 48 --max-answer-seq-len 12 --max-steps 1 --per-device-train-batch-size 4"
    also = f"--data-path prompts.jsonl --eval-data-path held_out.jsonl --data-output-path cache --output-dir {output}"
    run(changed, folder, "-m", "step3_ppo.main", *words.split(), *lengths.split(), *also.split())
    samples = map(json.loads, (folder / output / "runs/ppo/samples.jsonl").open(encoding="utf-8"))
    return [sample for sample in samples if sample["step"] == 0]


def test_the_new_reward_adds_its_weight_to_the_score_of_a_right_answer(changed: Path, tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    plain = judge(changed, folder, "plain", ["-"] * 8)
    assert len(plain) == 8 and all(sample["response"].strip() != "-" for sample in plain)
    answers = [sample["response"].strip() if n % 2 else "-" for n, sample in enumerate(plain)]
    right = judge(changed, folder, "right", [*answers[:-1], None])
    assert [sample["response"] for sample in right] == [sample["response"] for sample in plain]
    gains = [after["score"] - before["score"] for before, after in zip(plain[:-1], right[:-1], strict=True)]
    assert gains == pytest.approx([0.5 * (n % 2) for n in range(7)], abs=2e-4)
    assert right[-1]["score"] is None, "without an answer there is no score"


# The built-in reward by its name, with and without its setting; the loss of ratios 2 and 1/2, far beyond any clip.
FUNCTIONS = """
import math, torch
from pipeline.rewards.box.table import BOX, check_settings
from step3_ppo.mathematics.losses import unclipped_loss

check_settings("question_marks", {"at_most": 1})
texts = {"completions": ["no", "one?", "two??"]}
old = torch.tensor([[-1.0, -1.0, math.nan]])
new = torch.tensor([[-1.0 + math.log(2), -1.0 - math.log(2), math.nan]], requires_grad=True)
mask = torch.tensor([[True, True, False]])
loss, stats = unclipped_loss(new, old, torch.tensor([[3.0, -4.0, math.nan]]), mask, weights=None)
loss.backward()
print(BOX["question_marks"](**texts), BOX["question_marks"](**texts, at_most=1), loss.item(), *new.grad[0].tolist())
"""


def test_the_new_reward_function_and_the_new_loss(changed: Path, tmp_path: Path) -> None:
    scores, also, *numbers = run(changed, tmp_path, "-c", FUNCTIONS).replace(", ", ",").split()
    assert (scores, also) == ("[1.0,0.0,0.0]", "[1.0,1.0,0.0]")
    assert [float(number) for number in numbers] == pytest.approx([-(2 * 3 - 4 / 2), -2 * 3, 4 / 2, 0.0])


SAMPLE = """
import torch
from support.decode_models import DEVICE, KEY, PAD, family, fused, generator_of, random_prompts
from pipeline.generation.rollouts import Sampling
from pipeline.generation.episodes import generate
from pipeline.model_types import MODEL_TYPES
from pipeline.planning.measurement import shapes
from rlhf.known_models import known_model

known = known_model("seed-oss-36b")
assert known is not None and known.hub_id in shapes() and shapes()[known.hub_id]["model_type"] in MODEL_TYPES
model, prompts = family("seed-oss"), random_prompts((5, 2))
request = {"num_samples": 1, "sampling": Sampling(8, top_k=1), "key": KEY, "num_slots": 2}
mine = generate(generator_of(fused(model), ends=()), prompts, **request).responses
for prompt, response in zip(prompts, mine, strict=True):
    ids = torch.tensor([prompt.ids], device=DEVICE)
    plain = {"do_sample": False, "eos_token_id": None, "pad_token_id": PAD, "max_new_tokens": 8}
    theirs = model.generate(ids, attention_mask=torch.ones_like(ids), **plain)[0, ids.shape[1] :]
    assert response.tolist() == theirs.tolist(), (response, theirs)
print(known.preset, len(mine))
"""


def test_the_fused_backend_samples_the_new_family_as_transformers_does(changed: Path, tmp_path: Path) -> None:
    assert run(changed, tmp_path, "-c", SAMPLE, TRITON_INTERPRET="1").split() == ["30b", "2"]


# The rollout and the one step of a run of PPO, three responses to each of four prompts, for each backend and flag.
PPO = """
import json, sys
from types import SimpleNamespace
from flag_tests import FLAG_TESTS
from support.in_process import group_of_one
from support.ppo_loop import loop_on_random_prompts
from support.ppo_settings import ppo_config

with group_of_one() as world:
    for backend, name, *value in json.loads(sys.argv[1]):
        changed = {name: value[0] if value else FLAG_TESTS[f"ppo.{name}"].value} if name else {}
        models = SimpleNamespace(actor="base", reward="scorer")
        config = ppo_config(models, whiten_advantages=False, kl_coef=0.0, **changed)
        sampled = {"num_samples_per_prompt": 3, "top_k": 40, "top_p": 0.9, "generation_engine": backend}
        optimizer = config.optimizer.replace(gradient_accumulation_steps=6)
        config = config.model_copy(update={"sampling": config.sampling.replace(**sampled), "optimizer": optimizer})
        loop = loop_on_random_prompts(world, None, config)
        del loop.ppo.models.rewards[1:]  # the new reward: these prompts have no answers
        rollout = loop.collect()
        loop.update(rollout)
        ((_, metrics),) = loop.control.steps
        found = {name.split("/")[1]: tensor.tolist() for name, tensor in rollout.tensors().items()}
        lengths = {name: getattr(rollout.responses, name).tolist() for name in ("prompt_lengths", "response_lengths")}
        found |= lengths
        found |= {"backend": loop.ppo.hybrid.backend, "judged": loop.judged.squeeze(1).tolist(), "metrics": metrics}
        print(json.dumps(found | changed))
"""


@pytest.fixture(scope="module")
def ppo_runs(changed: Path, folder: Path) -> list[dict]:
    """Runs as before, with the new estimator, objective, loss and backend; all start alike."""
    runs = [("eager", ""), ("eager", "advantage_estimator"), ("eager", "imitation_coef")]
    runs += [("eager", "policy_loss", "unclipped"), ("plain", "")]
    printed = run(changed, folder, "-c", PPO, json.dumps(runs), DS_ACCELERATOR="cpu")
    return [json.loads(line) for line in printed.splitlines()]


def test_the_new_estimator_compares_the_responses_to_one_prompt(ppo_runs: list[dict]) -> None:
    before, after, *_ = ppo_runs
    ends = zip(after["judged"], after["finished"], strict=True)
    rewards = [min(max((score - SCORE_MEAN) / SCORE_STD, -5.0), 5.0) - (0.0 if ended else 1.0) for score, ended in ends]
    total = 0.0
    for n, length in enumerate(after["response_lengths"]):
        prompt = after["row_index"][n]
        others = [rewards[m] for m in range(12) if m != n and after["row_index"][m] == prompt]
        assert len(others) == 2
        advantage, row = rewards[n] - sum(others) / 2, after["advantages"][n]
        assert row[:length] == pytest.approx([advantage] * length, abs=1e-5) and not any(row[length:])
        total += advantage * length
    # Nothing has moved: each ratio is 1.
    assert after["metrics"]["loss/policy"] == pytest.approx(-total / sum(after["response_lengths"]), abs=1e-5)
    assert after["sequences"] == before["sequences"] and after["returns"] == before["returns"]
    assert after["metrics"]["actor/grad_norm"] != pytest.approx(before["metrics"]["actor/grad_norm"], rel=0.01)


def test_the_gradient_of_the_new_objective_is_added_to_the_policys(ppo_runs: list[dict], folder: Path) -> None:
    before, _, after, *_ = ppo_runs
    assert after["advantages"] == before["advantages"]
    num_tokens = sum(after["response_lengths"])
    for one in (before, after):
        model = AutoModelForCausalLM.from_pretrained(folder / "base").eval()
        policy, imitation = torch.zeros(()), torch.zeros(())
        for n, (start, length) in enumerate(zip(one["prompt_lengths"], one["response_lengths"], strict=True)):
            ids = torch.tensor([one["sequences"][n][: start + length]])
            logs = (model(input_ids=ids).logits[0] / 0.8).log_softmax(-1)
            for t in range(length):
                log_prob, advantage = logs[start + t - 1, ids[0, start + t]], one["advantages"][n][t]
                policy = policy - advantage * log_prob
                imitation = imitation - (log_prob if advantage > 0 else 0.0)
        ((policy + one.get("imitation_coef", 0.0) * imitation) / num_tokens).backward()
        squares = [p.grad.square().sum().item() for p in model.parameters() if p.grad is not None]
        assert one["metrics"]["actor/grad_norm"] == pytest.approx(math.sqrt(sum(squares)), rel=1e-3)
    assert after["metrics"]["loss/imitation"] == pytest.approx(imitation.item() / num_tokens, rel=1e-4)
    assert "loss/imitation" not in before["metrics"]


def test_the_new_loss_is_the_clipped_one_while_nothing_has_moved(ppo_runs: list[dict]) -> None:
    before, *_, after, _ = ppo_runs
    assert after["policy_loss"] == "unclipped" and after["sequences"] == before["sequences"]
    for name in ("loss/policy", "actor/grad_norm"):
        assert after["metrics"][name] == pytest.approx(before["metrics"][name], rel=1e-4), name


def test_the_new_backend_samples_what_the_eager_one_does(ppo_runs: list[dict]) -> None:
    eager, *_, plain = ppo_runs
    assert (eager["backend"], plain["backend"]) == ("eager", "plain")
    for name in ("sequences", "response_lengths", "finished"):
        assert plain[name] == eager[name], name
    assert {True, False} == set(plain["finished"]) and len(set(map(tuple, plain["sequences"]))) > 4
    for mine, theirs in zip(plain["sampler_log_probs"], eager["sampler_log_probs"], strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)
