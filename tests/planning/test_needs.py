"""What stage 3 says of its passes: how often each is made, and with which gradients and adapters."""

from pathlib import Path

from pipeline.configuration.flags import parse
from pipeline.configuration.rank_rules import with_ranks
from step3_ppo.config import PPOConfig
from step3_ppo.models.needs import needs

FOLDER_SIZES = {"num_train": 8, "num_test": 2}


def phases(folder: Path, words: str):
    models = f"--actor-model-name-or-path {folder / 'base'} --critic-model-name-or-path {folder / 'scorer'}"
    rollout = "--rollout-batch-size 16 --per-device-train-batch-size 4 --old-log-probs trainer"
    config = with_ranks(parse(PPOConfig, f"{models} {rollout} {words}".split(), section="ppo"), 1).config
    return needs(config, {}, "bf16", 1).phases


def test_updates_pass_over_a_rollout_once_an_epoch_and_text_behind_the_responses(folder):
    """16 responses, 3 epochs, micro-batches of 4: 12 passes of each model, each an optimizer step of its own."""
    text = f"--unsupervised-data-path {folder / 'text.jsonl'}"
    words = f"--ppo-epochs 3 --gradient-accumulation-steps 1 {text}"
    train = phases(folder, words)["train"]
    assert [(one.role, one.times, one.rows) for one in train] == [("actor", 12, 4), ("critic", 12, 4), ("actor", 12, 4)]
    assert [one.accumulates for one in train] == [False, False, True], "its gradients add to the policy's"


def test_models_that_adapters_are_switched_off_for_are_scored_without_them(folder):
    lora = phases(folder, "--gradient-accumulation-steps 4 --actor-lora-dim 2 --critic-lora-dim 2")["score"]
    assert [(one.role, one.without_adapters) for one in lora] == [
        ("actor", False), ("actor", True), ("critic", False), ("critic", True),
    ]  # fmt: skip
    whole = phases(folder, "--gradient-accumulation-steps 4")["score"]
    assert [(one.role, one.without_adapters) for one in whole] == [
        ("actor", False), ("reference", False), ("critic", False), ("reward model", False),
    ]  # fmt: skip
