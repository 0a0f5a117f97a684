"""Passes through two and three layers say what a pass through all of them takes, to the byte and the kernel."""

from itertools import product
from pathlib import Path

import pytest
from support.families import FAMILIES, UNTESTED, family_config
from support.marks import slow_but
from torch import nn

from pipeline.configuration.groups import ModelConfig
from pipeline.models.loading import base_model
from pipeline.planning import measurement
from pipeline.planning.counting import PassCount
from pipeline.planning.measurement import FEW_LAYERS, alike_layers, build, run_counted, run_pass, shape_of
from pipeline.planning.needs import ModelUse, Pass

LAYERS = 9
# Families of which layers differ: with windows and without, with rotary positions and without, recurrent ones.
OF_ALL_LAYERS = {"gemma-2", "gemma-3", "smollm3", "modernbert", "jamba", "lfm2", "minimax"}
OF_EACH_LAYER = {
    "gemma-3": {"layer_types": ["sliding_attention", "full_attention", "full_attention"] * 3},
    "smollm3": {"no_rope_layers": [1, 0, 1] * 3},
    "lfm2": {"full_attn_idxs": [1, 4]},
}
NOT_PLANNED = {"mamba", "rwkv", "qwen3-moe", "olmoe"}  # no attention, or passes that depend on values
WORKS = {
    # The gradients of 7 short rows are larger than what a layer keeps, those of 4 long ones smaller.
    "gradients": (ModelConfig(), Pass("model", 1, 7, 6, trains=True)),
    "kept": (ModelConfig(), Pass("model", 4, 64, 4 * 63, trains=True)),
    "accumulated": (ModelConfig(), Pass("model", 4, 64, 4 * 20, trains=True, accumulates=True)),
    "checkpointing": (ModelConfig(gradient_checkpointing=True), Pass("model", 4, 64, 4 * 63, trains=True)),
    "LoRA": (ModelConfig(lora_dim=4), Pass("model", 4, 64, 4 * 63, trains=True)),
    "int8": (
        ModelConfig(lora_dim=4, quantization="int8", gradient_checkpointing=True),
        Pass("model", 2, 32, 2 * 31, trains=True),
    ),
    "no gradients": (ModelConfig(), Pass("model", 4, 64, 4 * 63)),
}


def of_both(use: ModelUse, work: Pass) -> tuple[PassCount, PassCount]:
    """The count that is used, and that of all layers."""
    few = run_counted(use, "bf16", work)
    counter = run_pass(build(use, "bf16"), use, work)  # not the first one, which makes buffers of long rotary positions
    assert not counter.earlier_peak  # it was not divided
    return few, PassCount(counter.peak, counter.kernels)


def use_of(name: str, folder: Path, settings: ModelConfig, **changes: object) -> ModelUse:
    shape = {"num_hidden_layers": LAYERS} | OF_EACH_LAYER.get(name, {}) | changes
    family_config(name, 200, **shape).save_pretrained(folder)
    return shape_of(ModelUse("model", str(folder), settings))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", sorted((FAMILIES.keys() | UNTESTED.keys()) - NOT_PLANNED))
def test_few_layers_say_what_all_layers_take(tmp_path, name):
    settings, work = WORKS["checkpointing"]
    use = use_of(name, tmp_path, settings)
    few, whole = of_both(use, work)
    assert few == whole
    assert (alike_layers(base_model(build(use, "bf16").model)) is None) == (name in OF_ALL_LAYERS)


@pytest.mark.few(2)
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("kind", WORKS)
@pytest.mark.parametrize(("name", "has_values"), slow_but([("opt", True)], product(("opt", "llama-3"), (False, True))))
def test_few_layers_of_every_kind_of_pass(tmp_path, name, has_values, kind):
    settings, work = WORKS[kind]
    use = use_of(name, tmp_path, settings)
    few, whole = of_both(shape_of(ModelUse("model", use.path, settings, has_values=has_values)), work)
    assert few == whole


@pytest.mark.slow
def test_the_peak_moves_from_the_logits_to_the_lowest_layer(tmp_path):
    """30 tokens, vocabulary 3000 beside embeddings of 32: of few layers the peak is at the logits, of 9 at the end."""
    shape = {"hidden_size": 128, "ffn_dim": 512, "word_embed_proj_dim": 32, "tie_word_embeddings": False}
    config = family_config("opt", 3000, num_hidden_layers=LAYERS, **shape)
    config.save_pretrained(tmp_path)
    use = shape_of(ModelUse("model", str(tmp_path), ModelConfig(), on_cpu=True))
    few, whole = of_both(use, Pass("model", 1, 30, 29, trains=True))
    assert few == whole


def test_layers_of_which_one_is_another_are_all_run(tmp_path):
    use = use_of("llama-3", tmp_path, ModelConfig())
    model = base_model(build(use, "bf16").model)
    owner, name = alike_layers(model)
    layers = getattr(owner, name)
    before, layers[4].mlp.up_proj.bias = layers[4].mlp.up_proj.bias, nn.Parameter(layers[4].mlp.up_proj.weight[:, 0])
    assert alike_layers(model) is None
    layers[4].mlp.up_proj.bias = before
    assert alike_layers(model) == (owner, name)


def test_a_pass_runs_two_and_three_layers_and_leaves_the_model_whole(tmp_path, monkeypatch):
    settings, work = WORKS["kept"]
    use, seen = use_of("llama-3", tmp_path, settings), []
    model = base_model(build(use, "bf16").model)
    owner, name = alike_layers(model)

    def watched(*args: object, **named: object) -> object:
        seen.append(len(getattr(owner, name)))
        return run_pass(*args, **named)

    monkeypatch.setattr(measurement, "run_pass", watched)
    run_counted(use, "bf16", work)
    assert seen == list(FEW_LAYERS) and len(getattr(owner, name)) == LAYERS
