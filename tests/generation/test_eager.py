"""The eager backend: its distribution, its independence of the batch, exact ids of a scripted model, its log-probs."""

import math
import shutil
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.decode_models import eagerly
from support.families import family_config
from support.scripted_model import scripted_model
from support.tiny_models import EOS, NUM_TOKENS, PAD, random_rows, randomise
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from pipeline.generation.rollouts import GenerationStopped, Prompt, RandomKey, Rollout, Sampling, Truncation, draw
from pipeline.models.forward.causal_lm import CausalLM
from pipeline.models.loading import load_causal_lm
from pipeline.random_numbers import uniforms
from pipeline.tensor_ops import pad_rows

KEY = RandomKey(seed=3, purpose="test")
# The 0.999 quantile of chi-square with k degrees of freedom.
CHI_SQUARE_999 = {1: 10.828, 2: 13.82, 3: 16.27, 4: 18.47, 7: 24.32}


def prompts_of(rows: Sequence[torch.Tensor]) -> list[Prompt]:
    return [Prompt(row.tolist(), 1000 + index) for index, row in enumerate(rows)]


def sampled(
    model: nn.Module,
    prompts: list[Prompt],
    *,
    num_samples: int = 1,
    ends: Sequence[int] = (EOS,),
    num_tokens: int | None = None,
    **sampling: Any,
) -> Rollout:
    settings = Sampling(**({"max_new_tokens": 12} | sampling))
    model = model.eval()
    return eagerly(
        model,
        prompts,
        num_samples=num_samples,
        sampling=settings,
        key=KEY,
        ends=ends,
        pad_id=PAD,
        num_tokens=num_tokens,
    )


def same(first: Rollout, second: Rollout, rows: Sequence[int] | None = None) -> bool:
    """Return True where the rows of `first` (all, or those of `rows` in order) are those of `second`."""
    chosen = range(len(first.responses)) if rows is None else rows
    pairs = zip(chosen, range(len(second.responses)), strict=True)
    return all(
        first.responses[n].equal(second.responses[m])
        and torch.allclose(first.log_probs[n], second.log_probs[m], atol=1e-4)
        and first.finished[n] == second.finished[m]
        for n, m in pairs
    )


# --- the distribution ---

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, -4.0])


class OneDistribution(nn.Module):
    """A model that gives the same logits at every position."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(LOGITS.clone())

    def forward(self, input_ids: torch.Tensor, past_key_values: object, **settings: object) -> object:
        class Outputs:
            logits = self.logits.expand(len(input_ids), 1, -1)

        Outputs.past_key_values = past_key_values
        return Outputs


def nucleus(probabilities: torch.Tensor, top_p: float) -> list[int]:
    """The smallest set of most likely tokens that reaches top_p, by a slow loop."""
    kept, total = [], 0.0
    for token in sorted(range(len(probabilities)), key=lambda token: -probabilities[token]):
        if total >= top_p:
            break
        kept.append(token)
        total += probabilities[token].item()
    return kept


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, range(8)),
        ({"temperature": 2.0}, range(8)),
        ({"temperature": 0.5, "top_k": 4}, range(4)),
        ({"top_k": 5}, range(5)),
        ({"top_p": 0.8}, nucleus(LOGITS.softmax(0), 0.8)),
        ({"temperature": 2.0, "top_p": 0.8}, nucleus((LOGITS / 2).softmax(0), 0.8)),
    ],
)
def test_samples_follow_the_exact_softmax(settings, kept):
    num_samples = 4000
    actual = sampled(
        OneDistribution(), [Prompt([5], 9)], num_samples=num_samples, ends=(), max_new_tokens=1, **settings
    )
    tokens = torch.cat(actual.responses)
    scaled = LOGITS / settings.get("temperature", 1.0)
    kept = list(kept)
    expected = num_samples * scaled[kept].softmax(0)
    counts = torch.bincount(tokens, minlength=8).float()
    assert counts[kept].sum() == num_samples  # nothing outside the truncated set
    chi_square = ((counts[kept] - expected) ** 2 / expected).sum().item()
    assert chi_square < CHI_SQUARE_999[len(kept) - 1]
    # Log-probabilities are those of the untruncated distribution at the temperature: what PPO's ratio needs.
    torch.testing.assert_close(torch.cat(actual.log_probs), scaled.log_softmax(0)[tokens])


@pytest.mark.parametrize(("settings", "kept"), [({}, [0, 1, 2]), ({"top_k": 2}, [1, 2]), ({"top_p": 0.8}, [1, 2])])
def test_rows_that_pad_a_vocabulary_are_never_drawn(settings, kept):
    """The likeliest rows lie beyond the tokenizer's three ids, whose logits are -4, -2 and -1."""
    model = OneDistribution()
    model.logits.data.copy_(LOGITS.flip(0))
    actual = sampled(
        model, [Prompt([5], 9)], num_samples=4000, ends=(), max_new_tokens=1, num_tokens=3, temperature=2.0, **settings
    )
    tokens = torch.cat(actual.responses)
    expected = 4000 * (torch.tensor([-4.0, -2.0, -1.0]) / 2.0)[kept].softmax(0)
    counts = torch.bincount(tokens, minlength=8).float()
    assert counts[kept].sum() == 4000
    assert ((counts[kept] - expected) ** 2 / expected).sum() < CHI_SQUARE_999[len(kept) - 1]
    # PPO's ratio is to the trainer's softmax, which is over all rows.
    torch.testing.assert_close(torch.cat(actual.log_probs), (model.logits.data / 2.0).log_softmax(0)[tokens])


def test_the_nucleus_holds_the_token_that_reaches_it():
    """Each row by its own settings, also beside rows that truncate more."""
    settings = [
        Sampling(1, top_p=0.6),
        Sampling(1, top_p=0.01),
        Sampling(1),
        Sampling(1, top_k=99),
        Sampling(1, top_k=3),
    ]
    wanted = [2, 1, 4, 4, 3]
    top_p, top_k = torch.tensor([s.top_p for s in settings]), torch.tensor([s.top_k for s in settings])
    logits = torch.tensor([[0.5, 0.25, 0.15, 0.1]]).log().repeat(len(settings), 1)
    kept = Truncation.of(settings).apply(logits, top_p, top_k).isfinite()
    assert kept.tolist() == [[True] * count + [False] * (4 - count) for count in wanted]
    assert not Truncation.of([Sampling(1)]) and Truncation().apply(logits, top_p, top_k) is logits


def test_draw_inverts_the_cumulative_distribution():
    # Cumulative 0.2, 0.2, 0.7, 1: the token of probability 0 is never drawn.
    logits = torch.tensor([[0.2, 0.0, 0.5, 0.3]]).log().expand(5, -1)
    uniform = torch.tensor([1e-17, 0.19, 0.21, 0.69, 1 - 2**-53], dtype=torch.float64)
    assert draw(logits, uniform).tolist() == [0, 0, 2, 2, 3]


def test_logits_that_are_not_finite_give_a_token_of_the_vocabulary():
    """The run is to end by its skipped steps, not by an index out of bounds."""
    logits = torch.tensor([[math.nan, 0.0, 1.0], [math.inf, 0.0, 1.0], [0.0, 0.0, math.nan]])
    assert set(draw(logits, torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()) <= {0, 1, 2}


def test_a_token_is_the_one_of_its_own_uniform():
    """Row n, position t draws with the uniform of (seed, purpose, epoch, prompt id, sample, t) and nothing else."""
    prompts = [Prompt([5], 70), Prompt([6, 7], 71)]
    actual = sampled(OneDistribution(), prompts, num_samples=3, ends=(), max_new_tokens=4)
    cumulative = LOGITS.double().softmax(0).cumsum(0)
    for n in range(6):
        for t in range(4):
            u = uniforms(
                seed=3, purpose="test", epoch=0, prompt_ids=torch.tensor([70 + n // 3]),
                sample_index=torch.tensor([n % 3]), position=t,
            )  # fmt: skip
            assert actual.responses[n][t] == (cumulative < u).sum()


# --- independence ---


@pytest.fixture(scope="module")
def llama(tiny_folders):
    return load_causal_lm(tiny_folders["llama"], dtype=torch.float32)


ROWS = random_rows(11, (3, 9, 1, 6, 5, 2))


def test_samples_of_a_prompt_differ_and_a_key_repeats(llama):
    first = sampled(llama, prompts_of(ROWS[:2]), num_samples=3)
    assert len({tuple(response.tolist()) for response in first.responses[:3]}) == 3
    assert same(first, sampled(llama, prompts_of(ROWS[:2]), num_samples=3))


@pytest.mark.parametrize("change", [{"seed": 4}, {"purpose": "eval"}, {"epoch": 1}])
def test_another_key_is_another_rollout(llama, change):
    settings = {"num_samples": 1, "sampling": Sampling(12), "pad_id": PAD}
    first = eagerly(llama, prompts_of(ROWS), key=KEY, **settings)
    key = RandomKey(**({"seed": 3, "purpose": "test", "epoch": 0} | change))
    second = eagerly(llama, prompts_of(ROWS), key=key, **settings)
    assert not any(a.equal(b) for a, b in zip(first.responses, second.responses, strict=True))


def test_equal_prompts_of_other_hashes_differ(llama):
    actual = sampled(llama, [Prompt([5, 6], 1), Prompt([5, 6], 2)])
    assert not actual.responses[0].equal(actual.responses[1])


@pytest.mark.parametrize("chosen", [[0], [4], [5, 4, 3, 2, 1, 0], [2, 0], [1, 3]])
def test_rollouts_do_not_depend_on_the_batch(causal_folder, chosen):
    model = load_causal_lm(causal_folder, dtype=torch.float32)
    prompts = prompts_of(ROWS)
    whole = sampled(model, prompts, num_samples=2)
    part = sampled(model, [prompts[n] for n in chosen], num_samples=2)
    assert same(whole, part, [2 * n + k for n in chosen for k in range(2)])


# --- a scripted model: the next token is the last one plus one ---


@pytest.fixture(scope="module")
def counting_model(bpe_folder, tmp_path_factory):
    """Follows a chain of tokens, then EOS; (model, chain)."""
    text = "The capital of France is Paris"
    folder = scripted_model(bpe_folder, tmp_path_factory.mktemp("scripted"), text)
    chain = PreTrainedTokenizerFast.from_pretrained(bpe_folder)(text, add_special_tokens=False)["input_ids"]
    return load_causal_lm(folder, dtype=torch.float32), chain


def test_exact_ids_with_left_padding_and_early_ends(counting_model):
    model, chain = counting_model
    length = len(chain)
    starts = [(5, 5, chain[length - 1]), (chain[0],), (5, chain[1]), (chain[length - 2],)]
    prompts = [Prompt(ids, n) for n, ids in enumerate(starts)]
    actual = sampled(model, prompts, max_new_tokens=length + 5, temperature=0.05)
    expected = [[EOS], [*chain[1:], EOS], [*chain[2:], EOS], [chain[length - 1], EOS]]
    assert [response.tolist() for response in actual.responses] == expected
    assert [prompt.tolist() for prompt in actual.prompts] == [list(ids) for ids in starts]
    assert actual.finished.tolist() == [True] * 4
    assert [len(row) for row in actual.log_probs] == [len(row) for row in expected]


def test_a_response_is_cut_at_its_length_and_says_so(counting_model):
    model, chain = counting_model
    actual = sampled(model, [Prompt([chain[0]], 0), Prompt([chain[-1]], 1)], max_new_tokens=3, temperature=0.05)
    assert [response.tolist() for response in actual.responses] == [chain[1:4], [EOS]]
    assert actual.finished.tolist() == [False, True]


def test_an_end_at_the_last_position_counts_as_an_end(counting_model):
    model, chain = counting_model
    actual = sampled(model, [Prompt([chain[-2]], 0)], max_new_tokens=2, temperature=0.05)
    assert actual.responses[0].tolist() == [chain[-1], EOS] and actual.finished.item()


def test_any_of_several_end_tokens_ends(counting_model):
    model, chain = counting_model
    actual = sampled(model, [Prompt([chain[0]], 0)], max_new_tokens=9, temperature=0.05, ends=[chain[2], EOS])
    assert actual.responses[0].tolist() == chain[1:3] and actual.finished.item()


def test_a_padding_id_that_is_the_eos_changes_nothing(llama):
    prompts = prompts_of(ROWS)
    first = sampled(llama, prompts)
    settings = {"num_samples": 1, "sampling": Sampling(12), "key": KEY}
    assert same(first, eagerly(llama, prompts, pad_id=EOS, **settings))


@pytest.mark.parametrize("after", [0, 2])
def test_generation_stops_between_steps_when_asked(llama, after):
    asked = []

    def should_stop() -> bool:
        asked.append(None)
        return len(asked) > after

    with pytest.raises(GenerationStopped):
        eagerly(
            llama, prompts_of(ROWS), num_samples=1, sampling=Sampling(12), key=KEY, pad_id=PAD, should_stop=should_stop,
        )  # fmt: skip
    assert len(asked) == after + 1


# --- log-probabilities, and what a model folder may bring along ---


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampler_log_probs_are_the_trainers(causal_folder, temperature):
    check_log_probs(load_causal_lm(causal_folder, dtype=torch.float32), temperature)


@pytest.mark.parametrize("name", ["jamba", "lfm2", "minimax"])
def test_rows_leave_the_batch_with_their_recurrent_states_too(name):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(family_config(name, NUM_TOKENS))
    randomise(model, 0)
    check_log_probs(model, temperature=1.0)


def check_log_probs(model: nn.Module, temperature: float) -> None:
    """Rows finish at different times (many tokens end a response), so that rows leave the batch meanwhile."""
    actual = sampled(model, prompts_of(ROWS), num_samples=4, temperature=temperature, ends=range(2, 40))
    lengths = torch.tensor([len(row) for row in actual.responses])
    assert len(set(lengths.tolist())) >= 4
    starts = torch.tensor([len(row) for row in actual.prompts])
    rows = [torch.cat(pair) for pair in zip(actual.prompts, actual.responses, strict=True)]
    ids = pad_rows(rows, PAD)
    columns = torch.arange(ids.shape[1])
    mask = columns < (starts + lengths).unsqueeze(1)
    selected = (columns[:-1] >= starts.unsqueeze(1) - 1) & (columns[:-1] < (starts + lengths).unsqueeze(1) - 1)
    forced = CausalLM(model)(ids, attention_mask=mask, selected=selected, temperature=temperature).log_probs
    for n, row in enumerate(actual.log_probs):
        torch.testing.assert_close(forced[n][selected[n]], row, rtol=1e-4, atol=1e-4)


def test_generation_settings_in_the_folder_change_nothing(tiny_folders, tmp_path):
    folder = shutil.copytree(tiny_folders["llama"], tmp_path / "trap")
    GenerationConfig(
        do_sample=True, temperature=0.1, top_p=0.2, top_k=3, repetition_penalty=5.0, max_new_tokens=2, eos_token_id=EOS
    ).save_pretrained(folder)
    trapped = AutoModelForCausalLM.from_pretrained(folder)
    assert trapped.generation_config.repetition_penalty == 5.0
    model = load_causal_lm(str(folder), dtype=torch.float32)
    plain = load_causal_lm(tiny_folders["llama"], dtype=torch.float32)
    assert same(sampled(plain, prompts_of(ROWS)), sampled(model, prompts_of(ROWS)))
