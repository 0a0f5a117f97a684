"""From sampled responses to experience: scoring by four real tiny models, and rewards worked by hand."""

import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.packed_rows import give_bounds, plain_kernel
from support.reward_rows import of_models
from support.tiny_models import EOS, NUM_TOKENS, PAD, random_rows, save_tiny
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast

from pipeline.data.templates import encode_conversation, set_template
from pipeline.data.turns import Message
from pipeline.dist import RankGroup, World
from pipeline.engine.engine import FrozenEngine
from pipeline.errors import Interrupted
from pipeline.generation.eager import EagerGenerator
from pipeline.generation.episodes import generate
from pipeline.generation.rollouts import GenerationStopped, RandomKey, Sampling, Vocabulary
from pipeline.models.forward.causal_lm import CausalLM
from pipeline.models.loading import load_causal_lm
from pipeline.models.lora import add_lora
from pipeline.models.reward_model import TokenValueModel, load_reward_model
from pipeline.models.source import ModelSource
from pipeline.models.tokenizers import same_tokens
from pipeline.rewards.reward_model import RewardModel
from pipeline.rewards.rows import Scale
from pipeline.training.micro_batches import MicroBatch
from step3_ppo.experience import Responses, Scores, span_mask
from step3_ppo.flags.groups import PPOCoefficients
from step3_ppo.models.engines import Models
from step3_ppo.rewarding import reward_responses
from step3_ppo.rollout import Sampler
from step3_ppo.rollout_metrics import rollout_metrics
from step3_ppo.scoring import Passes, policy_log_probs, reward_model_scores, score_responses

CPU = torch.device("cpu")
WORLD = World(rank=0, size=1, device=CPU)
PLAIN = {"zero_optimization": {"stage": 0}}


def frozen(module: nn.Module) -> FrozenEngine:
    return FrozenEngine(module, PLAIN, CPU)


@pytest.fixture(scope="module", params=["opt", "opt-350m", "llama"])
def folders(request, tiny_folders, bpe_folder, tmp_path_factory):
    """Actor, reference and reward folders of one family, with different weights."""
    parent = tmp_path_factory.mktemp("ppo")
    reference = save_tiny(request.param, bpe_folder, parent / "reference", seed=5)
    return SimpleNamespace(
        actor=tiny_folders[request.param], reference=reference, reward=tiny_folders[f"{request.param}-reward"]
    )


def make_models(folders, *, reward_tokenizer=None, actor: nn.Module | None = None, **changes) -> Models:
    """The four models as plain modules; the critic is the reward model on a scale of mean 0.5 and std 2."""
    actor = actor or load_causal_lm(folders.actor, dtype=torch.float32)
    critic = TokenValueModel(
        load_reward_model(ModelSource(folders.reward), dtype=torch.float32).model, score_mean=0.5, score_std=2
    )
    models = {
        "reference": frozen(CausalLM(load_causal_lm(folders.reference, dtype=torch.float32))),
        "reward": frozen(load_reward_model(ModelSource(folders.reward), dtype=torch.float32)),
    } | {name: changes.pop(name) for name in ("reference", "reward") if name in changes}
    settings = {
        "tokenizer": PreTrainedTokenizerFast.from_pretrained(folders.actor),
        "trained": {"actor": frozen(CausalLM(actor)), "critic": frozen(critic)},
        "frozen": {name: model for name, model in models.items() if model is not None},
        "rewards": [],
    }
    made = Models(**(settings | changes))
    opened = partial(made.reward_model, "reward")
    made.rewards.append(RewardModel("reward model", 1.0, Scale(0.5, 2.0), opened, reward_tokenizer))
    return made


PROMPTS = random_rows(21, (5, 2, 8, 1))
DATA = [
    {"prompt_ids": row.tolist(), "prompt_id": 500 + n, "messages": json.dumps([{"role": "user", "content": f"q{n}"}])}
    for n, row in enumerate(PROMPTS)
]


class PlainHybrid:
    """What a Sampler needs of a HybridEngine, over a plain model; ends on about one token in eight."""

    vocabulary = Vocabulary(frozenset(range(EOS, 50)), PAD)

    def __init__(self, model: nn.Module) -> None:
        self.source = EagerGenerator(model.eval(), self.vocabulary)
        self.group = RankGroup(1)

    def generation(self):
        return torch.no_grad()

    def generate(self, prompts, *, batch_size, num_samples, **settings):
        return generate(self.source, prompts, num_slots=batch_size * num_samples, num_samples=num_samples, **settings)


def sample(model: nn.Module, planned, *, batch_size: int = 2, num_samples: int = 2) -> Responses:
    sampler = Sampler(
        hybrid=PlainHybrid(model), rows=DATA, world=WORLD, sampling=Sampling(8, temperature=0.8),
        num_samples=num_samples, batch_size=batch_size, max_prompt=10, should_stop=lambda: False,
    )  # fmt: skip
    return sampler.sample(planned, RandomKey(7, "rollout"))


# --- sampling ---


def test_samples_stand_in_the_planned_order_whatever_the_batch_size(folders):
    model = load_causal_lm(folders.actor, dtype=torch.float32)
    planned = [2, 0, 3, 1]
    found = sample(model, planned, batch_size=2)
    assert found.row_index.tolist() == [2, 2, 0, 0, 3, 3, 1, 1] and found.order.tolist() == list(range(8))
    for n, row in enumerate(found.row_index.tolist()):
        assert found.sequences[n, : found.prompt_lengths[n]].tolist() == DATA[row]["prompt_ids"]
    other = sample(model, planned, batch_size=1)
    assert other.sequences.equal(found.sequences) and other.finished.equal(found.finished)
    assert other.valid.all() and found.valid.all()


@pytest.mark.parametrize("samples", [1, 3])
def test_a_rollout_has_the_same_tokens_however_many_prompts_are_sampled_at_once(folders, samples):
    """Also where the last batch is smaller; in fp32 on a CPU to the last bit of what was sampled."""
    model, planned = load_causal_lm(folders.actor, dtype=torch.float32), [2, 0, 3, 1, None]
    whole = sample(model, planned, batch_size=5, num_samples=samples)
    assert whole.valid.tolist() == [True] * 4 * samples + [False] * samples
    for size in (1, 2, 3, 4, 7):
        found = sample(model, planned, batch_size=size, num_samples=samples)
        for name in ("sequences", "row_index", "order", "finished", "valid", "response_lengths"):
            assert getattr(found, name).equal(getattr(whole, name)), (size, name)


@pytest.mark.parametrize(("prompts", "size"), [(12, 3), (12, 4), (12, 5), (20, 8), (4, 16), (8, 1)])
@pytest.mark.parametrize(("ranks", "shared"), [(1, 1), (2, 1), (4, 1), (4, 2)])
def test_ranks_share_a_rollout_evenly_without_padding(prompts, size, ranks, shared):
    """Each group of ranks takes as many, in whole batches but for the last, and all of them each prompt once."""
    rows, shares = [{"prompt_ids": [5], "prompt_id": n} for n in range(prompts)], list[list[int]]()

    def generate(requests, **_):
        shares.append([request.prompt_id for request in requests])
        raise GenerationStopped

    hybrid = SimpleNamespace(group=SimpleNamespace(size=shared), generation=torch.no_grad, generate=generate)
    for rank in range(0, ranks, shared):
        world = World(rank=rank, size=ranks, device=CPU)
        sampler = Sampler(
            hybrid=hybrid, rows=rows, world=world, sampling=Sampling(8), num_samples=1, batch_size=size, max_prompt=10,
            should_stop=lambda: False,
        )  # fmt: skip
        with pytest.raises(Interrupted):
            sampler.sample(list(range(prompts)), RandomKey(7, "rollout"))
    assert {len(share) for share in shares} == {prompts * shared // ranks}
    assert sorted(place for share in shares for place in share) == list(range(prompts))
    if prompts % (ranks * size) == 0:
        starts = range(0, prompts, ranks * size)
        first = [place for start in starts for place in range(start, start + size * shared)]
        assert shares[0] == first, "as it was when sizes had to divide"


def test_places_that_only_fill_do_not_count(folders):
    model = load_causal_lm(folders.actor, dtype=torch.float32)
    whole, filled = sample(model, [2, 0, 3, 1]), sample(model, [2, 0, 3, None])
    assert filled.valid.tolist() == [True] * 6 + [False] * 2
    assert not filled.response_mask[6:].any() and filled.response_mask[:6].equal(filled.trimmed().response_mask[:6])
    three = sample(model, [2, 0, 3])  # a batch of two places, and one of one
    assert three.valid.tolist() == [True] * 6
    for n in range(6):
        length = int(whole.prompt_lengths[n] + whole.response_lengths[n])
        assert three.sequences[n, :length].equal(whole.sequences[n, :length])


# --- scoring ---


def slow_scores(folders, responses: Responses, temperature: float) -> list[dict[str, np.ndarray]]:
    """What each row's numbers should be, by transformers alone, one row and one token at a time."""
    actor, reference = (AutoModelForCausalLM.from_pretrained(p).eval() for p in (folders.actor, folders.reference))
    reward_model = AutoModelForSequenceClassification.from_pretrained(folders.reward).eval()
    reward_model.config.pad_token_id = None
    found = []
    for n in range(len(responses.order)):
        start, length = int(responses.prompt_lengths[n]), int(responses.response_lengths[n])
        row = responses.sequences[n : n + 1, : start + length]
        logs = [(m(input_ids=row).logits[0] / temperature).log_softmax(-1) for m in (actor, reference)]
        entropy = -(logs[0].exp() * logs[0]).sum(-1)
        prefix_scores = [reward_model(input_ids=row[:, : start + t]).logits.item() for t in range(length + 1)]
        found.append(
            {
                "log_probs": np.array([logs[0][start + t - 1, row[0, start + t]].item() for t in range(length)]),
                "ref_log_probs": np.array([logs[1][start + t - 1, row[0, start + t]].item() for t in range(length)]),
                "entropy": np.array([entropy[start + t - 1].item() for t in range(length)]),
                # V(s_t) is read where token t is predicted: the score of everything before it, normalised.
                "values": (np.array(prefix_scores[:-1]) - 0.5) / 2,
                "scores": prefix_scores[-1],
            }
        )
    return found


def scored(models: Models, responses: Responses, batches: list[list[int]], **settings) -> Scores:
    """The policy in one order and shape of batches, reference and critic in another."""
    lengths = responses.lengths()
    cut = [MicroBatch.of(rows, lengths) for rows in batches]
    others = [MicroBatch.of(rows[::-1], lengths) for rows in batches[::-1]]
    policy = policy_log_probs(models, Passes(responses, cut), temperature=settings["temperature"])
    return score_responses(models, Passes(responses, others), policy, **settings)


def judged(models: Models, responses: Responses, batches: list[list[int]], rows=DATA) -> torch.Tensor:
    """Raw scores (N, R), in batches of turned order."""
    lengths = responses.lengths()
    others = [MicroBatch.of(rows[::-1], lengths) for rows in batches[::-1]]
    return reward_model_scores(models, Passes(responses, others), rows=rows)


@torch.no_grad()
@pytest.mark.parametrize(
    "batches", [[[0, 1, 2, 3, 4, 5, 6, 7]], [[0, 1, 2], [3, 4, 5], [6, 7]], [[7, 0], [6, 1], [5, 2, 3, 4]]]
)
def test_scores_equal_transformers_row_by_row(folders, batches):
    models = make_models(folders)
    responses = sample(models.actor.module.model, [2, 0, 3, 1])
    found, scores = scored(models, responses, batches, temperature=0.8), judged(models, responses, batches)
    assert scores.shape == (8, 1)
    for n, expected in enumerate(slow_scores(folders, responses, 0.8)):
        length = int(responses.response_lengths[n])
        for name in ("log_probs", "ref_log_probs", "entropy", "values"):
            row = getattr(found, name)[n].numpy()
            np.testing.assert_allclose(row[:length], expected[name], rtol=1e-3, atol=1e-4, err_msg=name)
            assert (row[length:] == 0).all()
        assert scores[n].item() == pytest.approx(expected["scores"], rel=1e-3, abs=1e-4)
    sampled_log_probs = torch.where(responses.response_mask, responses.sampler_log_probs - found.log_probs, 0)
    assert sampled_log_probs.abs().max() < 1e-3


def test_without_a_pass_of_the_policy_the_samplers_log_probs_serve(folders):
    models = make_models(folders)
    responses = sample(models.actor.module.model, [2, 0, 3, 1])
    passes = Passes(responses, [MicroBatch.of(range(8), responses.lengths())])
    settings = {"temperature": 0.8}
    policy = policy_log_probs(models, passes, temperature=0.8)
    expected = score_responses(models, passes, policy, **settings)
    sampled = (responses.sampler_log_probs, None)
    found = score_responses(replace(models, trained={"critic": models.trained["critic"]}), passes, sampled, **settings)
    assert found.entropy is None and found.log_probs.equal(responses.sampler_log_probs)
    assert found.ref_log_probs.equal(expected.ref_log_probs)
    scores = of_models(judged(models, responses, [list(range(8))]), models.rewards)
    rewards = reward_responses(responses, found, scores, PPOCoefficients(), kl_coef=0.1)
    metrics = rollout_metrics(responses, found, rewards, PPOCoefficients())
    assert "objective/kl" in metrics and not {"objective/entropy", "policy/sampler_error"} & set(metrics)


def test_the_critic_starts_as_the_normalised_score(folders):
    """Its value behind the last token, which PPO never reads, is the normalised score of the sequence."""
    models = make_models(folders)
    responses = sample(models.actor.module.model, [2, 0, 3, 1])
    scores = judged(models, responses, [list(range(8))])[:, 0]
    values = models.critic(responses.sequences, responses.attention_mask)
    last = responses.attention_mask.sum(1) - 1
    torch.testing.assert_close(values[torch.arange(8), last], (scores - 0.5) / 2, rtol=1e-4, atol=1e-4)


def test_a_lora_actor_without_its_adapters_is_the_reference(folders):
    model = load_causal_lm(folders.actor, dtype=torch.float32)
    settings = {"dim": 4, "alpha": 8.0, "dropout": 0.0, "module_name": "all-linear"}
    actor = add_lora(model, **settings, only_lora=True, task="CAUSAL_LM", seed=0)
    for name, parameter in actor.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(1))
    responses = sample(load_causal_lm(folders.actor, dtype=torch.float32), [2, 0, 3, 1])
    batches = [list(range(8))]
    base = frozen(CausalLM(load_causal_lm(folders.actor, dtype=torch.float32)))
    expected = scored(make_models(folders, reference=base), responses, batches, temperature=1.0)
    found = scored(make_models(folders, actor=actor, reference=None), responses, batches, temperature=1.0)
    torch.testing.assert_close(found.ref_log_probs, expected.ref_log_probs, rtol=1e-4, atol=1e-4)
    assert (found.log_probs - expected.log_probs).abs().max() > 0.05


def text_responses(tokenizer, prompts: list[str], answers: list[str], finished: list[bool]) -> Responses:
    """Rows whose prompts and responses are real text; a finished response has an EOS."""
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in prompts]
    ends = [tokenizer(text, add_special_tokens=False)["input_ids"] + [EOS] * done
            for text, done in zip(answers, finished, strict=True)]  # fmt: skip
    width, length = max(map(len, ends)), max(len(a) + len(b) for a, b in zip(rows, ends, strict=True))
    sequences = torch.full((len(rows), length), PAD)
    for n, (row, end) in enumerate(zip(rows, ends, strict=True)):
        sequences[n, : len(row) + len(end)] = torch.tensor(row + end)
    return Responses(
        sequences=sequences,
        trained=span_mask(torch.tensor([len(row) for row in rows]), torch.tensor([len(end) for end in ends]), length),
        sampler_log_probs=torch.zeros(len(rows), width), finished=torch.tensor(finished),
        valid=torch.ones(len(rows), dtype=torch.bool), row_index=torch.arange(len(rows)), order=torch.arange(len(rows)),
    )  # fmt: skip


def test_a_reward_model_of_another_tokenizer_reads_the_text(folders, tmp_path):
    """Here the other vocabulary has the same tokens under other ids, and a template of its own."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folders.actor)
    saved = json.loads(tokenizer.backend_tokenizer.to_str())
    special = {"<pad>", "<s>", "</s>", "<unk>"}
    vocabulary = saved["model"]["vocab"]
    saved["model"]["vocab"] = {t: i if t in special else NUM_TOKENS + 3 - i for t, i in vocabulary.items()}
    (tmp_path / "other.json").write_text(json.dumps(saved))
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    other = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "other.json"), **names)
    set_template(other, "human_assistant")
    assert not same_tokens(tokenizer, other) and same_tokens(tokenizer, tokenizer)
    responses = text_responses(tokenizer, ["tea", "a longer prompt"], [" The fox.", " Paris is"], [True, False])
    rows = [{"messages": json.dumps([{"role": "user", "content": text}])} for text in ("How?", "Where?")]
    models = make_models(folders, reward_tokenizer=other)
    found = judged(models, responses, [[0, 1]], rows)[:, 0]
    texts = [(Message("user", "How?"), "The fox."), (Message("user", "Where?"), "Paris is")]
    ids = [encode_conversation(other, [question, Message("assistant", answer)]).ids for question, answer in texts]
    assert ids[0][-1] == ids[1][-1] == EOS
    ids[1] = ids[1][:-1]  # this response was cut: the reward model sees no end
    judge = AutoModelForSequenceClassification.from_pretrained(folders.reward).eval()
    judge.config.pad_token_id = None
    expected = torch.tensor([judge(input_ids=torch.tensor([row])).logits.item() for row in ids])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    give_bounds(models.frozen["reward"].module.model)
    with plain_kernel() as kernel:
        packed = judged(models, responses, [[0, 1]], rows)[:, 0]
    assert kernel.called, "its own rows pass without their padding"
    torch.testing.assert_close(packed, expected, rtol=1e-3, atol=1e-4)


# --- rewards ---
