"""From sampled responses to experience: scoring by four real tiny models, and rewards worked by hand."""

import json
import math
from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.packed_rows import give_bounds, plain_kernel
from support.tiny_models import EOS, NUM_TOKENS, PAD, random_rows, save_tiny
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast

from pipeline.data.templates import encode_conversation, set_template
from pipeline.data.turns import Message
from pipeline.dist import RankGroup, World
from pipeline.engine.engine import FrozenEngine
from pipeline.generation.eager import generate_batches
from pipeline.generation.rollouts import RandomKey, Sampling
from pipeline.models.causal_lm import CausalLM
from pipeline.models.loading import load_causal_lm
from pipeline.models.lora import add_lora
from pipeline.models.reward_model import TokenValueModel, load_reward_model
from step3_ppo.config import PPOCoefficients
from step3_ppo.experience import Responses, Scores
from step3_ppo.micro_batches import Lengths, MicroBatch
from step3_ppo.models import Models, same_tokens
from step3_ppo.rollout import Sampler, reward, score
from step3_ppo.rollout_metrics import evaluation_metrics, rollout_metrics

CPU = torch.device("cpu")
WORLD = World(rank=0, size=1, local_rank=0, device=CPU)
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
    critic = TokenValueModel(load_reward_model(folders.reward, dtype=torch.float32).model, score_mean=0.5, score_std=2)
    settings = {
        "tokenizer": PreTrainedTokenizerFast.from_pretrained(folders.actor),
        "actor": frozen(CausalLM(actor)),
        "critic": frozen(critic),
        "reference": frozen(CausalLM(load_causal_lm(folders.reference, dtype=torch.float32))),
        "reward": frozen(load_reward_model(folders.reward, dtype=torch.float32)),
        "reward_tokenizer": reward_tokenizer,
        "score_mean": 0.5,
        "score_std": 2.0,
    }
    return Models(**(settings | changes))


PROMPTS = random_rows(21, (5, 2, 8, 1))
DATA = [
    {"prompt_ids": row.tolist(), "prompt_id": 500 + n, "messages": json.dumps([{"role": "user", "content": f"q{n}"}])}
    for n, row in enumerate(PROMPTS)
]


class PlainHybrid:
    """What a Sampler needs of a HybridEngine, over a plain model; ends on about one token in eight."""

    pad_id = PAD

    def __init__(self, model: nn.Module) -> None:
        self.model = model.eval()
        self.group = RankGroup(1)

    def generation(self):
        return torch.no_grad()

    def generate(self, prompts, **settings):
        return generate_batches(self.model, prompts, eos_ids=frozenset(range(EOS, 50)), pad_id=PAD, **settings)


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


def test_places_that_only_fill_do_not_count(folders):
    model = load_causal_lm(folders.actor, dtype=torch.float32)
    whole, filled = sample(model, [2, 0, 3, 1]), sample(model, [2, 0, 3, None])
    assert filled.valid.tolist() == [True] * 6 + [False] * 2
    assert not filled.response_mask[6:].any() and filled.response_mask[:6].equal(filled.trimmed().response_mask[:6])
    three = sample(model, [2, 0, 3])  # the batch size makes it four places
    assert three.valid.tolist() == [True] * 6 + [False] * 2
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
    """The policy in one order and shape of batches, the three others in another."""
    lengths = Lengths.of(responses)
    cut = [MicroBatch.of(rows, lengths) for rows in batches]
    others = [MicroBatch.of(rows[::-1], lengths) for rows in batches[::-1]]
    return score(models, responses, others, cut, **settings)


@torch.no_grad()
@pytest.mark.parametrize(
    "batches", [[[0, 1, 2, 3, 4, 5, 6, 7]], [[0, 1, 2], [3, 4, 5], [6, 7]], [[7, 0], [6, 1], [5, 2, 3, 4]]]
)
def test_scores_equal_transformers_row_by_row(folders, batches):
    models = make_models(folders)
    responses = sample(models.actor.module.model, [2, 0, 3, 1])
    found = scored(models, responses, batches, rows=DATA, temperature=0.8)
    for n, expected in enumerate(slow_scores(folders, responses, 0.8)):
        length = int(responses.response_lengths[n])
        for name in ("log_probs", "ref_log_probs", "entropy", "values"):
            row = getattr(found, name)[n].numpy()
            np.testing.assert_allclose(row[:length], expected[name], rtol=1e-3, atol=1e-4, err_msg=name)
            assert (row[length:] == 0).all()
        assert found.scores[n].item() == pytest.approx(expected["scores"], rel=1e-3, abs=1e-4)
    sampled_log_probs = torch.where(responses.response_mask, responses.sampler_log_probs - found.log_probs, 0)
    assert sampled_log_probs.abs().max() < 1e-3


def test_without_a_pass_of_the_policy_the_samplers_log_probs_serve(folders):
    models = make_models(folders)
    responses = sample(models.actor.module.model, [2, 0, 3, 1])
    batches = [MicroBatch.of(range(8), Lengths.of(responses))]
    settings = {"rows": DATA, "temperature": 0.8}
    expected = score(models, responses, batches, batches, **settings)
    found = score(replace(models, actor=None), responses, batches, None, **settings)
    assert found.entropy is None and found.log_probs.equal(responses.sampler_log_probs)
    assert found.ref_log_probs.equal(expected.ref_log_probs) and found.scores.equal(expected.scores)
    rewards = reward(responses, found, PPOCoefficients(), kl_coef=0.1, score_mean=0.0, score_std=1.0)
    metrics = rollout_metrics(responses, found, rewards, kl_coef=0.1)
    assert "objective/kl" in metrics and not {"objective/entropy", "policy/sampler_error"} & set(metrics)


def test_the_critic_starts_as_the_normalised_score(folders):
    """Its value behind the last token, which PPO never reads, is the normalised score of the sequence."""
    models = make_models(folders)
    responses = sample(models.actor.module.model, [2, 0, 3, 1])
    found = scored(models, responses, [list(range(8))], rows=DATA, temperature=0.8)
    values = models.critic(responses.sequences, responses.attention_mask)
    last = responses.attention_mask.sum(1) - 1
    torch.testing.assert_close(values[torch.arange(8), last], (found.scores - 0.5) / 2, rtol=1e-4, atol=1e-4)


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
    expected = scored(make_models(folders, reference=base), responses, batches, rows=DATA, temperature=1.0)
    found = scored(make_models(folders, actor=actor, reference=None), responses, batches, rows=DATA, temperature=1.0)
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
        sequences=sequences, prompt_lengths=torch.tensor([len(row) for row in rows]),
        response_lengths=torch.tensor([len(end) for end in ends]),
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
    found = scored(models, responses, [[0, 1]], rows=rows, temperature=1.0).scores
    texts = [(Message("user", "How?"), "The fox."), (Message("user", "Where?"), "Paris is")]
    ids = [encode_conversation(other, [question, Message("assistant", answer)]).ids for question, answer in texts]
    assert ids[0][-1] == ids[1][-1] == EOS
    ids[1] = ids[1][:-1]  # this response was cut: the reward model sees no end
    judge = AutoModelForSequenceClassification.from_pretrained(folders.reward).eval()
    judge.config.pad_token_id = None
    expected = torch.tensor([judge(input_ids=torch.tensor([row])).logits.item() for row in ids])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    give_bounds(models.reward.module.model)
    with plain_kernel() as kernel:
        packed = scored(models, responses, [[0, 1]], rows=rows, temperature=1.0).scores
    assert kernel.called, "its own rows pass without their padding"
    torch.testing.assert_close(packed, expected, rtol=1e-3, atol=1e-4)


# --- rewards ---


def rows_of(lengths: list[int], finished: list[bool], valid: list[bool] | None = None) -> Responses:
    """Responses with one prompt token each."""
    count, width = len(lengths), max(lengths)
    return Responses(
        sequences=torch.full((count, width + 1), 7), prompt_lengths=torch.ones(count, dtype=torch.int64),
        response_lengths=torch.tensor(lengths), sampler_log_probs=torch.zeros(count, width),
        finished=torch.tensor(finished), valid=torch.tensor(valid or [True] * count),
        row_index=torch.arange(count), order=torch.arange(count),
    )  # fmt: skip


def scores_by_hand(log_probs, ref_log_probs, values, scores) -> Scores:
    made = [torch.tensor(part, dtype=torch.float32) for part in (log_probs, ref_log_probs, values, scores)]
    return Scores(
        log_probs=made[0], ref_log_probs=made[1], entropy=torch.ones_like(made[0]), values=made[2], scores=made[3]
    )


def rewarded(responses: Responses, scores: Scores, *, mean: float = 0.0, std: float = 1.0, kl_coef=0.5, **ppo):
    settings = {"gae_lambda": 1.0, "gamma": 1.0, "whiten_advantages": False} | ppo
    return reward(responses, scores, PPOCoefficients(**settings), kl_coef=kl_coef, score_mean=mean, score_std=std)


def test_the_reward_stands_at_the_last_token_by_hand():
    # Row 0: three tokens, KL per token 0.2, 0, 0.4; score 3. With lambda = gamma = 1 and values 0, the return of a
    # token is the sum of rewards from it on: rewards -0.1, 0, -0.2 + 3 -> 2.7, 2.8, 2.8.
    # Row 1: an EOS alone; KL -0.6; score -1: reward 0.3 - 1 = -0.7. Nothing after it.
    scores = scores_by_hand(
        [[-1.0, -1, -1], [-1, 0, 0]], [[-1.2, -1, -1.4], [-0.4, 0, 0]], [[0.0, 0, 0], [0, 0, 0]], [3.0, -1.0]
    )
    found = rewarded(rows_of([3, 1], [True, True]), scores)
    expected = torch.tensor([[2.7, 2.8, 2.8], [-0.7, 0, 0]])
    torch.testing.assert_close(found.experience.returns, expected)
    torch.testing.assert_close(found.experience.advantages, expected)
    torch.testing.assert_close(found.kl.sum(1), torch.tensor([0.6, -0.6]))
    assert found.sequence_rewards.tolist() == [3.0, -1.0]


def test_normalise_clip_penalty_and_kl_come_in_this_order():
    # (9 - 1) / 2 = 4, clipped to 3, cut off: 3 - 1.5 = 1.5; KL 0.2 * 0.5 = 0.1 off: 1.4.
    # Any other order: clip first (3 - 1) / 2 = 1 - 1.5; penalty first (9 - 1.5 - 1) / 2 = 3.25 -> 3.
    scores = scores_by_hand([[-1.0]], [[-1.2]], [[0.0]], [9.0])
    found = rewarded(rows_of([1], [False]), scores, mean=1.0, std=2.0, reward_clip=3.0, missing_eos_penalty=1.5)
    assert found.sequence_rewards.item() == pytest.approx(1.5)
    assert found.experience.returns.item() == pytest.approx(1.4)


def test_the_clip_does_not_touch_the_kl():
    # Score 1 within the clip, KL of 20: the reward is 1 - 0.5 * 20 = -9, far outside of 5.
    scores = scores_by_hand([[-1.0]], [[-21.0]], [[0.0]], [1.0])
    assert rewarded(rows_of([1], [True]), scores).experience.returns.item() == pytest.approx(-9.0)


def test_a_kl_in_the_loss_is_not_in_the_reward():
    scores = scores_by_hand([[-1.0]], [[-1.2]], [[0.0]], [1.0])
    found = rewarded(rows_of([1], [True]), scores, kl_in_loss=True, kl_estimator="k2")
    assert found.experience.returns.item() == pytest.approx(1.0)
    other = rewarded(rows_of([1], [True]), scores, kl_estimator="k2")
    assert other.experience.returns.item() == pytest.approx(1.0 - 0.5 * 0.2**2 / 2)


def random_scores(lengths: list[int], seed: int = 0) -> Scores:
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    mask = torch.arange(width) < torch.tensor(lengths).unsqueeze(1)
    parts = [torch.where(mask, torch.randn(len(lengths), width, generator=generator), 0) for _ in range(4)]
    return Scores(*parts, torch.randn(len(lengths), generator=generator))


LENGTHS = [3, 1, 5, 2, 4]


def chosen(scores: Scores, rows: torch.Tensor) -> Scores:
    """Some rows of scores for LENGTHS, as wide as the longest of them."""
    width = max(LENGTHS[n] for n in rows)
    columns = (getattr(scores, field.name)[rows] for field in fields(Scores))
    return Scores(*(column[:, :width] if column.dim() == 2 else column for column in columns))


def test_experience_equals_a_slow_loop():
    responses, scores = rows_of(LENGTHS, [True, False, True, True, False]), random_scores(LENGTHS)
    found = rewarded(
        responses, scores, mean=0.3, std=1.7, kl_coef=0.2, gamma=0.9, gae_lambda=0.8, whiten_advantages=True,
        reward_clip=0.7, missing_eos_penalty=0.4,
    )  # fmt: skip
    advantages, returns = [], []
    for n, length in enumerate(LENGTHS):
        shaped = float(np.clip((scores.scores[n].item() - 0.3) / 1.7, -0.7, 0.7)) - 0.4 * (not responses.finished[n])
        kl = (scores.log_probs[n] - scores.ref_log_probs[n]).tolist()
        values = [*scores.values[n, :length].tolist(), 0.0]
        row: list[float] = []
        following = 0.0
        for t in reversed(range(length)):
            r = -0.2 * kl[t] + (shaped if t == length - 1 else 0.0)
            following = r + 0.9 * values[t + 1] - values[t] + 0.9 * 0.8 * following
            row.insert(0, following)
        advantages.append(row)
        returns.append([a + v for a, v in zip(row, values, strict=False)])
    flat = np.concatenate(advantages)
    for n, length in enumerate(LENGTHS):
        wanted = (np.array(advantages[n]) - flat.mean()) / flat.std()
        np.testing.assert_allclose(found.experience.advantages[n, :length], wanted, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found.experience.returns[n, :length], returns[n], rtol=1e-4, atol=1e-5)
        assert (found.experience.advantages[n, length:] == 0).all() and (
            found.experience.returns[n, length:] == 0
        ).all()
    assert found.advantage_mean == pytest.approx(flat.mean(), rel=1e-4)
    assert found.advantage_std == pytest.approx(flat.std(), rel=1e-4)


def test_whitening_is_over_all_rows_and_their_tokens():
    found = rewarded(rows_of(LENGTHS, [True] * 5), random_scores(LENGTHS), whiten_advantages=True)
    tokens = found.experience.advantages[found.experience.response_mask]
    assert len(tokens) == sum(LENGTHS)
    assert tokens.mean().item() == pytest.approx(0, abs=1e-6)
    assert tokens.std(correction=0).item() == pytest.approx(1, rel=1e-4)
    per_row = found.experience.advantages[0, :3]
    assert abs(per_row.mean().item()) > 0.01


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["scores", "log_probs", "ref_log_probs", "values"])
def test_a_row_with_a_number_that_is_not_finite_is_masked_before_whitening(name, bad):
    scores = random_scores(LENGTHS)
    column = getattr(scores, name).clone()
    column[2 if name == "scores" else (2, 1)] = bad
    found = rewarded(rows_of(LENGTHS, [True] * 5), replace(scores, **{name: column}), whiten_advantages=True)
    kept = torch.tensor([0, 1, 3, 4])
    lengths = [LENGTHS[n] for n in kept]
    without = rewarded(rows_of(lengths, [True] * 4), chosen(scores, kept), whiten_advantages=True)
    assert found.valid.tolist() == [True, True, False, True, True]
    assert not found.experience.response_mask[2].any() and (found.experience.advantages[2] == 0).all()
    torch.testing.assert_close(found.experience.advantages[kept][:, :4], without.experience.advantages)
    for tensor in (found.experience.returns, found.experience.values, found.experience.log_probs, found.kl):
        assert tensor.isfinite().all()


def test_a_row_that_only_fills_adds_nothing():
    scores = random_scores(LENGTHS)
    found = rewarded(rows_of(LENGTHS, [True] * 5, [True] * 4 + [False]), scores, whiten_advantages=True)
    first = rewarded(rows_of(LENGTHS[:4], [True] * 4), chosen(scores, torch.arange(4)), whiten_advantages=True)
    torch.testing.assert_close(found.experience.advantages[:4], first.experience.advantages)
    assert not found.experience.response_mask[4].any()


# --- metrics of a rollout ---


def test_rollout_metrics_by_hand():
    scores = scores_by_hand(
        [[-1.0, -2.0], [-1, 0], [-5, -5]],
        [[-1.5, -1.0], [-2, 0], [-5, -5]],
        [[0.0, 1.0], [2, 0], [9, 9]],
        [3.0, -1.0, 50.0],
    )
    responses = rows_of([2, 1, 2], [True, False, True], [True, True, False])
    found = rewarded(responses, scores, kl_coef=0.5, missing_eos_penalty=1.0)
    metrics = rollout_metrics(responses, scores, found, kl_coef=0.5)
    # KL per sequence: 0.5 - 1 = -0.5 and 1; mean 0.25. Shaped 3 and -1 - 1 = -2; minus half the KL: 3.25 and -2.5.
    assert metrics["objective/kl"] == pytest.approx(0.25)
    assert metrics["objective/rlhf_reward"] == pytest.approx((3.25 - 2.5) / 2)
    assert metrics["objective/scores"] == pytest.approx(1.0)
    k3 = (math.exp(-0.5) - 1 + 0.5) + (math.exp(1) - 1 - 1) + (math.exp(-1) - 1 + 1)
    assert metrics["objective/kl_k3"] == pytest.approx(k3 / 2, rel=1e-5)
    assert metrics["completions/mean_length"] == pytest.approx(1.5)
    assert metrics["completions/eos_fraction"] == metrics["completions/truncated_fraction"] == 0.5
    assert metrics["policy/sampler_error"] == pytest.approx(2.0)
    assert metrics["objective/entropy"] == pytest.approx(1.0)
    # Values 0, 1, 2; returns by the rewards tested above.
    returns, values = found.experience.returns[found.experience.response_mask].numpy(), np.array([0.0, 1, 2])
    assert metrics["value/explained_variance"] == pytest.approx(1 - (returns - values).var() / returns.var(), rel=1e-5)
    assert metrics["rows_masked"] == 0
    shown = evaluation_metrics(metrics)
    assert shown["eval_objective/kl"] == metrics["objective/kl"] and "eval_policy/sampler_error" not in shown


def test_masked_rows_are_counted_and_left_out_of_the_metrics():
    scores = random_scores(LENGTHS)
    bad = replace(scores, scores=torch.where(torch.arange(5) == 2, math.nan, scores.scores))
    responses = rows_of(LENGTHS, [True] * 5)
    metrics = rollout_metrics(responses, bad, rewarded(responses, bad), kl_coef=0.5)
    assert metrics["rows_masked"] == 1
    assert metrics["objective/scores"] == pytest.approx(scores.scores[[0, 1, 3, 4]].mean().item(), rel=1e-5)
    assert all(math.isfinite(value) for value in metrics.values())
