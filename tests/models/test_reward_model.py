"""Values and scores against transformers' own sequence classification, row by row."""

import math

import pytest
import torch
from support.messages import naming
from support.tiny_models import EOS, padded, random_rows
from tokenizers import Tokenizer, models
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

from pipeline.errors import InputError
from pipeline.models.loading import backbone
from pipeline.models.lora import add_lora, keep_start_adapter
from pipeline.models.paths import check_reward_model
from pipeline.models.reward_model import (
    FloatLinear,
    TokenValueModel,
    initialise_head,
    last_token_scores,
    load_reward_model,
    pad_id_for_pooling,
    score_constants,
)
from pipeline.models.source import ModelSource

TOLERANCE = {"rtol": 1e-4, "atol": 2e-5}


def loaded(folder: str) -> TokenValueModel:
    return load_reward_model(ModelSource(folder), dtype=torch.float32)


def reference_values(folder: str, row: torch.Tensor) -> torch.Tensor:
    """(S,) scores of the row's prefixes: transformers' raw score of each, read one by one."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    model.config.pad_token_id = None
    with torch.no_grad():
        prefixes = [row[: end + 1].unsqueeze(0) for end in range(len(row))]
        return torch.cat([model(input_ids=prefix).logits[0] for prefix in prefixes])


@pytest.mark.parametrize("extra", [0, 6])
def test_values_equal_the_scores_of_all_prefixes_for_any_padding(reward_folder, extra):
    rows = random_rows(0, (7, 3, 1))
    ids, mask = padded(rows, side="right", extra=extra)
    values = loaded(reward_folder)(ids, mask)
    assert values.dtype == torch.float32 and values.shape == ids.shape
    for index, row in enumerate(rows):
        torch.testing.assert_close(values[index][mask[index]], reference_values(reward_folder, row), **TOLERANCE)


def test_rows_padded_on_the_left_are_refused(reward_folder):
    ids, mask = padded(random_rows(0, (7, 3, 1)), side="left", extra=0)
    with pytest.raises(ValueError, match="padded on the right"):
        loaded(reward_folder)(ids, mask)


def test_last_token_scores_by_hand():
    values = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]])
    assert last_token_scores(values, torch.tensor([3, 1, 2])).tolist() == [3.0, 4.0, 8.0]


def test_an_eos_that_is_also_padding_is_the_scored_token(reward_folder):
    """Rows end in EOS and are filled up with EOS: the score is at the response's own EOS, not before and not after."""
    rows = [torch.cat([row, torch.tensor([EOS])]) for row in random_rows(1, (6, 2))]
    ids, mask = padded(rows, side="right", extra=3, fill=EOS)
    scores = last_token_scores(loaded(reward_folder)(ids, mask), mask.sum(1))
    expected = torch.stack([reference_values(reward_folder, row)[-1] for row in rows])
    torch.testing.assert_close(scores, expected, **TOLERANCE)


def test_the_critic_reads_on_the_normalised_scale(reward_folder):
    ids, mask = padded(random_rows(2), side="right", extra=0)
    raw = loaded(reward_folder)
    critic = TokenValueModel(raw.model, score_mean=1.5, score_std=4.0)
    torch.testing.assert_close(critic(ids, mask), (raw(ids, mask) - 1.5) / 4.0)


def test_score_constants_are_those_of_the_configuration(reward_folder):
    config = loaded(reward_folder).config
    assert score_constants(config) is None
    config.score_mean, config.score_std = 0.25, 3.0
    assert score_constants(config) == (0.25, 3.0)


def test_scores_of_a_16_bit_model_are_computed_in_fp32(reward_folder):
    ids, mask = padded(random_rows(3), side="right", extra=0)
    model = load_reward_model(ModelSource(reward_folder), dtype=torch.bfloat16)
    values = model(ids, mask)
    hidden = backbone(model.model)(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    assert hidden.dtype == model.model.score.weight.dtype == torch.bfloat16
    expected = hidden.float() @ model.model.score.weight.float().squeeze(0)
    torch.testing.assert_close(values[mask], expected[mask], rtol=1e-6, atol=1e-6)
    assert not values[mask].equal(values[mask].bfloat16().float())


def test_a_new_head_has_the_published_spread_and_no_global_generator(tiny_folders):
    head = FloatLinear(4095, 1, bias=False)
    before = torch.get_rng_state()
    initialise_head(head, seed=7)
    first = head.weight.detach().clone()
    assert torch.get_rng_state().equal(before)
    assert first.std().item() == pytest.approx(1 / math.sqrt(4096), rel=0.05) and abs(first.mean().item()) < 1e-3
    initialise_head(head, seed=8)
    assert not head.weight.equal(first)
    initialise_head(head, seed=7)
    assert head.weight.equal(first)
    initialise_head(head, seed=7, std=0.0)
    assert not head.weight.any()


def test_a_language_model_gets_a_head_only_on_request(causal_folder):
    with pytest.raises(InputError, match=r"no reward head \(\w+ForCausalLM\)"):
        loaded(causal_folder)
    model = load_reward_model(ModelSource(causal_folder), dtype=torch.float32, new_head=True)
    assert model.model.score.weight.shape[0] == 1 and model.model.score.bias is None


def test_a_folder_that_names_no_architecture_is_no_reward_model(tmp_path):
    """As that of an adapter alone."""
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "base"}')
    with pytest.raises(InputError, match=naming("no reward head ... (config.json names no architecture)")):
        check_reward_model(str(tmp_path))


def test_the_padding_id_of_a_reward_model_is_no_eos(bpe_folder):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(bpe_folder)
    assert pad_id_for_pooling(tokenizer) == 0
    tokenizer.pad_token = tokenizer.eos_token
    assert pad_id_for_pooling(tokenizer) not in (None, EOS)


@torch.no_grad()
@pytest.mark.parametrize("goes_on", [False, True], ids=["new adapters", "adapters of an earlier run"])
def test_the_start_of_a_critic_under_lora_gives_the_reward_models_raw_scores(reward_folder, goes_on):
    """So that one base serves both, though training moves adapters and head, and values are on another scale."""

    def move(critic):
        for parameter in critic.parameters():
            parameter.add_(0.1) if parameter.requires_grad else None

    rows, mask = padded(random_rows(3), side="right", extra=0)
    critic = loaded(reward_folder).eval()
    settings = {"dim": 2, "alpha": 4.0, "dropout": 0.0, "module_name": "all-linear", "only_lora": True, "seed": 0}
    critic.model = add_lora(critic.model, **settings, task="SEQ_CLS")
    if goes_on:
        move(critic)
        keep_start_adapter(critic.model)
    start, trained = critic(rows, mask), [name for name, p in critic.named_parameters() if p.requires_grad]
    critic.score_mean, critic.score_std = 0.5, 2.0
    move(critic)
    values = critic(rows, mask)
    assert not torch.isclose(2.0 * values + 0.5, start).any()
    with critic.start_model():
        torch.testing.assert_close(critic(rows, mask), start, rtol=0, atol=0)
    torch.testing.assert_close(critic(rows, mask), values, rtol=0, atol=0)
    assert [name for name, p in critic.named_parameters() if p.requires_grad] == trained
    if not goes_on:
        torch.testing.assert_close(start, loaded(reward_folder).eval()(rows, mask), rtol=0, atol=0)


def test_a_tokenizer_that_has_an_eos_alone_gives_a_saved_reward_model_no_padding_id():
    """transformers scores the last token that is no padding: it would leave out the EOS."""
    made = Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token=None))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")
    assert pad_id_for_pooling(tokenizer) is None
    tokenizer.pad_token = "</s>"
    assert pad_id_for_pooling(tokenizer) is None
