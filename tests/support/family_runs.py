"""Numbers that the three steps logged and models that they saved, computed again by transformers alone.

One row at a time without padding or cache, from texts that are written here; responses are greedy.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_run import read_metrics
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

BOS, EOS = "</s>", "</s>"  # of the tokenizer of tiny_run
CLOSE: dict[str, Any] = {"rel": 1e-4, "abs": 1e-5}


def load(folder: Path, auto_class: Any = AutoModelForCausalLM) -> Any:
    """Load a folder without a missing or unexpected weight; eager attention keeps Gemma 2's soft caps."""
    model, info = auto_class.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()), info
    model.config.pad_token_id = None  # scores are those of the last token, also where a policy samples padding
    return model.eval()


class Rows:
    """The pairs of a file, tokenised in the Human/Assistant layout."""

    def __init__(self, folder: Path, name: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder / "base")
        self.pairs = [json.loads(line) for line in (folder / name).read_text().splitlines()]

    def prompts(self) -> list[torch.Tensor]:
        """Return (S,) of each row up to the words before an answer."""
        return [self._ids(f"{BOS}\n\nHuman: {pair['prompt']}\n\nAssistant:") for pair in self.pairs]

    def whole(self, column: str) -> list[torch.Tensor]:
        """Return (S,) of each prompt with the answer of `column`, and EOS."""
        answers = [self._ids(f" {pair[column]}{EOS}") for pair in self.pairs]
        return [torch.cat(parts) for parts in zip(self.prompts(), answers, strict=True)]

    def _ids(self, text: str) -> torch.Tensor:
        return torch.tensor(self.tokenizer(text, add_special_tokens=False).input_ids)


@torch.no_grad()
def log_probs(model: Any, ids: torch.Tensor, start: int) -> torch.Tensor:
    """(S - start,) of the tokens from `start` on."""
    every = model(input_ids=ids.unsqueeze(0)).logits[0, start - 1 : -1].log_softmax(-1)
    return every.gather(1, ids[start:].unsqueeze(1)).squeeze(1)


def token_loss(model: Any, rows: Rows) -> float:
    """Return the mean negative log-likelihood of all tokens of the chosen answers."""
    pairs = zip(rows.prompts(), rows.whole("chosen"), strict=True)
    return -torch.cat([log_probs(model, ids, len(prompt)) for prompt, ids in pairs]).mean().item()


@torch.no_grad()
def scores(model: Any, rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([model(input_ids=ids.unsqueeze(0)).logits[0] for ids in rows])


def pair_loss(model: Any, rows: Rows) -> float:
    margins = scores(model, rows.whole("chosen")) - scores(model, rows.whole("rejected"))
    return -logsigmoid(margins).mean().item()


def greedy(model: Any, rows: Rows, length: int) -> list[torch.Tensor]:
    """Return each prompt with the likeliest `length` tokens, or as far as EOS."""
    found = []
    for prompt in rows.prompts():
        ids = prompt
        while len(ids) < len(prompt) + length and (len(ids) == len(prompt) or ids[-1] != 2):
            with torch.no_grad():
                ids = torch.cat([ids, model(input_ids=ids.unsqueeze(0)).logits[0, -1:].argmax(-1)])
        found.append(ids)
    return found


def check_sft(folder: Path) -> None:
    """The losses before and after the step are those of the two folders, and training lowers them."""
    start, tuned = load(folder / "base"), load(folder / "sft")
    before, step, after = read_metrics(folder / "runs/sft")
    held_out, trained = Rows(folder, "test.jsonl"), Rows(folder, "train.jsonl")
    assert before["eval_loss"] == pytest.approx(token_loss(start, held_out), **CLOSE)
    assert step["loss"] == pytest.approx(token_loss(start, trained), **CLOSE)
    assert after["eval_loss"] == pytest.approx(token_loss(tuned, held_out), **CLOSE)
    assert token_loss(tuned, trained) < step["loss"] - 1e-3


def check_reward(folder: Path) -> None:
    """The loss after the step is that of the folder, and lower on the rows that were trained on."""
    model = load(folder / "reward", AutoModelForSequenceClassification)
    _, step, after = read_metrics(folder / "runs/reward")
    assert after["eval_loss"] == pytest.approx(pair_loss(model, Rows(folder, "test.jsonl")), **CLOSE)
    assert pair_loss(model, Rows(folder, "train.jsonl")) < step["loss"] - 1e-3


def check_ppo(folder: Path, length: int) -> None:
    """Before and after the step: the responses are those of the folder, and so are their scores and their KL."""
    rows, run = Rows(folder, "test.jsonl"), folder / "output/runs/ppo"
    start, actor = load(folder / "sft"), load(folder / "output/actor")
    reward, _ = (load(folder / name, AutoModelForSequenceClassification) for name in ("reward", "output/critic"))
    before, step, after = read_metrics(run)
    assert max(step["policy/first_ratio_error"], step["policy/sampler_error"], abs(step["objective/kl"])) < 1e-4
    lines = [json.loads(line) for line in (run / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    for policy, logged in ((start, before), (actor, after)):
        pairs = list(zip(rows.prompts(), greedy(policy, rows, length), strict=True))
        texts = {rows.tokenizer.decode(ids[len(prompt) :], skip_special_tokens=True) for prompt, ids in pairs}
        assert {line["response"] for line in lines if line["step"] == logged["step"]} <= texts
        found = scores(reward, [ids for _, ids in pairs]).mean().item()
        assert logged["eval_objective/scores"] == pytest.approx(found, **CLOSE)
        each = [log_probs(policy, ids, len(prompt)) - log_probs(start, ids, len(prompt)) for prompt, ids in pairs]
        assert logged["eval_objective/kl"] == pytest.approx(torch.cat(each).sum().item() / len(pairs), **CLOSE)
    assert abs(after["eval_objective/kl"]) > 3e-5
