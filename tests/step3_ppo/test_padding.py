"""The padding of an epoch's last rollout, which has fewer prompts than others, is in no metric, count or scale."""

from statistics import fmean
from typing import Any

import pytest
from support.ppo_loop import PPOLoop, loop_on_random_prompts
from support.ppo_settings import ppo_config

FUNCTIONS = """
def fails_for_one(completions, number):
    if number[0] == 11:
        raise RuntimeError("no luck")
    return [float(number[0] + len(text)) for text in completions]

def always(completions):
    return [3.0] * len(completions)
"""
K = 2


def loop_with_functions(world, folders, folder, **settings: Any) -> PPOLoop:
    """Three prompts, two responses each, in a rollout of four prompts; two functions reward beside the model."""
    (folder / "rewards.py").write_text(FUNCTIONS)
    (folder / "rows.jsonl").write_text('{"prompt": "tea"}')  # whether prompts are texts is read from it, and no more
    config = ppo_config(folders, normalise_scores=False)
    functions = [f"{folder}/rewards.py:{name}" for name in ("fails_for_one", "always:0.5")]
    parts = {
        "rewards": config.rewards.model_copy(
            update={"reward_function": functions, "reward_workers": 1, "reward_scaling": "running"}
        ),
        "sampling": config.sampling.model_copy(update={"num_samples_per_prompt": K}),
        "reward_model_name_or_path": folders.reward,
        "data": config.data.model_copy(update={"data_path": [str(folder / "rows.jsonl")], "eval_data_path": []}),
    }
    return loop_on_random_prompts(world, folder, config.model_copy(update=parts), num_prompts=3)


def test_padding_is_in_no_number_of_a_rollout(world, trained_folders, tmp_path):
    """By loops over the six responses: two of them failed, which is another reason to be left out."""
    loop = loop_with_functions(world, trained_folders, tmp_path)
    with loop.ppo.calls:
        rollout = loop.collect()
    responses, found = rollout.responses, rollout.metrics
    assert responses.valid.tolist() == [True] * 6 + [False] * 2
    rows = range(6)
    number, length = (10 + responses.row_index).tolist(), responses.response_lengths.tolist()
    scored = [n for n in rows if number[n] != 11]
    model, (name, *functions) = loop.judged[:, 0].tolist(), [one.name for one in loop.ppo.rewards]
    assert len(scored) == 4 and functions == ["fails_for_one", "always"] and model[6:] != [0.0, 0.0]
    assert found["reward_failures/fails_for_one"] == pytest.approx(2 / 6) and found["reward_failures/always"] == 0
    assert found["rows_masked"] == 2
    assert found[f"reward/{name}"] == pytest.approx(fmean(model[n] for n in rows), rel=1e-5)
    assert found["reward/always"] == 3.0
    texts = loop.ppo.models.tokenizer.batch_decode(
        [responses.sequences[n, start : start + length[n]] for n, start in enumerate(responses.prompt_lengths[:6])],
        skip_special_tokens=True,
    )
    value = [number[n] + len(texts[n].strip()) for n in rows]
    assert found["reward/fails_for_one"] == pytest.approx(fmean(value[n] for n in scored), rel=1e-5)
    sums = [model[n] + value[n] + 0.5 * 3 for n in scored]
    assert found["objective/scores"] == pytest.approx(fmean(sums), rel=1e-5)
    assert found["completions/mean_length"] == pytest.approx(fmean(length[n] for n in scored))
    ended = [float(responses.finished[n]) for n in scored]
    assert found["completions/eos_fraction"] == fmean(ended) == 1 - found["completions/truncated_fraction"]
    entropy = [x for n in scored for x in loop.scores.entropy[n, : length[n]].tolist()]
    assert found["objective/entropy"] == pytest.approx(fmean(entropy), rel=1e-5)
    num_tokens = sum(length[n] + int(responses.prompt_lengths[n]) for n in rows)
    assert found["num_tokens"] == num_tokens and found["generate_tokens_per_s"] == sum(length[:6])
    assert found["epoch"] == 1.0
    tally_before = loop.state.tallies["with"]
    assert tally_before["failures"] == {"fails_for_one": [{"responses": 6, "raised": 2}], "always": [{"responses": 6}]}
    for (count, mean, squares), values in zip(
        tally_before["spreads"], (model[:6], [value[n] for n in scored], [3.0] * 6), strict=True
    ):
        assert (count, mean) == (len(values), pytest.approx(fmean(values), rel=1e-5))
        assert squares == pytest.approx(sum((x - fmean(values)) ** 2 for x in values), rel=1e-4, abs=1e-9)


def test_tokens_are_counted_over_rollouts_without_padding(world, trained_folders, tmp_path):
    loop, counted = loop_on_random_prompts(world, tmp_path, ppo_config(trained_folders), num_prompts=3), 0
    for _ in range(2):
        rollout = loop.collect()
        both = rollout.responses.prompt_lengths + rollout.responses.response_lengths
        counted += sum(both[rollout.responses.valid].tolist())
        loop.update(rollout)
        assert loop.state.num_tokens == rollout.metrics["num_tokens"] == counted < both.sum() * 2
