"""The arithmetic of a PPO run."""

import re

import pytest

from step3_ppo.config import PPOConfig
from step3_ppo.flags.groups import PPOCoefficients, SamplingConfig
from step3_ppo.rollout import Schedule, make_schedule


def config(*, generated=4, batches=1, samples=1, micro=2, accumulation=1, epochs=1, max_steps=0, train_epochs=1.0):
    made = PPOConfig()
    return PPOConfig(
        sampling=SamplingConfig(
            per_device_generation_batch_size=generated, generation_batches=batches, num_samples_per_prompt=samples
        ),
        optimizer=made.optimizer.replace(per_device_train_batch_size=micro, gradient_accumulation_steps=accumulation),
        ppo=PPOCoefficients(ppo_epochs=epochs),
        run=made.run.replace(max_steps=max_steps, num_train_epochs=train_epochs),
    )


def test_counts_by_hand():
    # 4 prompts x 2 batches x 2 ranks = 16 prompts, 48 rows; a step has 2 x 3 x 2 = 12; 4 steps x 2 epochs = 8.
    # 50 prompts: 4 rollouts an epoch, the last of 2 prompts.
    found = make_schedule(config(batches=2, samples=3, accumulation=3, epochs=2), num_prompts=50, world_size=2)
    assert found == Schedule(
        prompts_per_rollout=16,
        prompts_at_once=4,
        rows_per_step=12,
        steps_per_rollout=8,
        rollouts_per_epoch=4,
        total_steps=32,
        num_rollouts=4,
    )


def test_max_steps_and_fractional_epochs():
    assert make_schedule(config(max_steps=5), num_prompts=50, world_size=1).total_steps == 5
    assert make_schedule(config(train_epochs=0.5), num_prompts=40, world_size=1).total_steps == 5 * 2
    assert make_schedule(config(train_epochs=0.01), num_prompts=40, world_size=1).total_steps == 2


@pytest.mark.parametrize(
    ("generated", "micro", "accumulation"), [(4, 3, 1), (16, 3, 1), (10, 4, 1), (6, 4, 2), (5, 2, 3), (1, 64, 2)]
)
def test_rows_that_do_not_divide_are_refused_with_the_nearest_numbers_that_do(generated, micro, accumulation):
    """All sizes up to 200 are tried: no other one that fits is nearer to what was given."""
    with pytest.raises(ValueError, match="the nearest that fit") as error:
        config(generated=generated, micro=micro, accumulation=accumulation)
    at_once, rollout = map(int, re.findall(r"(?:generation|rollout)-batch-size (\d+)(?:,| without)", str(error.value)))
    step = micro * accumulation
    nearest = min(abs(other - generated) for other in range(step, 200, step))
    assert at_once % step == rollout % step == 0 and abs(at_once - generated) == abs(rollout - generated) == nearest


def test_an_epoch_visits_every_prompt_once_and_the_next_in_another_order():
    found = make_schedule(config(), num_prompts=10, world_size=1)
    assert found.rollouts_per_epoch == 3
    epochs = []
    for epoch in (0, 1):
        planned = [found.prompts(4 * (3 * epoch + n), 4, seed=1, num_prompts=10) for n in range(3)]
        assert [key.epoch for key, _ in planned] == [epoch] * 3
        rows = [row for _, chosen in planned for row in chosen]
        assert len(rows) == 12 and rows.count(None) == 2 and set(rows) == {*range(10), None}
        epochs.append(rows)
    assert epochs[0] != epochs[1]
    assert found.prompts(0, 4, seed=2, num_prompts=10) != found.prompts(0, 4, seed=1, num_prompts=10)


def test_a_run_ends_after_its_epochs_even_if_updates_were_cut_short():
    plan = make_schedule(config(), num_prompts=50, world_size=2)
    assert not plan.is_done(step=3, position=plan.prompts_per_rollout * plan.num_rollouts - 1)
    assert plan.is_done(step=plan.num_rollouts, position=plan.prompts_per_rollout * plan.num_rollouts)
    limited = make_schedule(config(max_steps=5), num_prompts=50, world_size=1)
    assert not limited.is_done(step=4, position=10**6)
    assert limited.is_done(step=5, position=1)
