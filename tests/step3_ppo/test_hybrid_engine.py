"""The hybrid engine's fused backend under DeepSpeed in a world of one: after a step it samples from the new weights.

Every parameter changes between two rollouts; the second is compared with the eager loop on the weights as they are.
"""

from typing import Any

import pytest
import torch
from support.decode_models import EOS, PAD, assert_same, llama, opt, poll_often, random_prompts, shaken_all
from support.engines import engine_of
from support.messages import naming

from pipeline.engine.engine import TrainingEngine
from pipeline.errors import InputError
from pipeline.generation.options import GenerationOptions
from pipeline.generation.rollouts import GenerationStopped, RandomKey, Rollout, Sampling, Vocabulary
from pipeline.models.lora import add_lora, merged_weight
from pipeline.models.partitions import gathered
from pipeline.training.steps import step_together
from step3_ppo.config import PPOConfig
from step3_ppo.models.hybrid_engine import HybridEngine
from step3_ppo.rollout import generation_options

pytestmark = pytest.mark.usefixtures("world")
FUSED = GenerationOptions(backend="fused")
PROMPTS = random_prompts((3, 1))
SETTINGS: dict[str, Any] = {"num_samples": 1, "sampling": Sampling(3), "key": RandomKey(3, "rollout")}
MAKERS = {"opt": opt, "llama": llama}
CASES = [("opt", 0), ("opt", 1), ("opt", 2), ("opt", 3), ("llama", 3)]


@pytest.fixture(autouse=True)
def polls_often(monkeypatch: pytest.MonkeyPatch) -> None:
    poll_often(monkeypatch)


def trained(engine: TrainingEngine) -> None:
    """One optimizer step on random rows."""
    device = next(engine.module.parameters()).device
    ids = torch.randint(3, 300, (4, 9), generator=torch.Generator().manual_seed(2)).to(device)
    chosen = torch.ones(4, 8, dtype=torch.bool, device=device)
    loss = -engine(ids, attention_mask=torch.ones_like(ids, dtype=torch.bool), selected=chosen).log_probs.mean()
    engine.backward(loss, last=True)
    assert step_together([engine], 1.0, loss=loss)


def weights(engine: TrainingEngine) -> dict[str, torch.Tensor]:
    parameters = dict(engine.module.named_parameters())
    with gathered(parameters.values()):
        return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def change_everything(engine: TrainingEngine) -> None:
    """A step of the optimizer, and then every number, also those that a step leaves alone."""
    before = weights(engine)
    trained(engine)
    stepped = weights(engine)
    assert sum(bool((stepped[name] != value).any()) for name, value in before.items()) > len(before) / 3
    parameters = list(engine.module.parameters())
    with gathered(parameters, writer=True):
        shaken_all(parameters)
    after = weights(engine)
    assert all((after[name] != before[name]).any() and (after[name] != stepped[name]).any() for name in before)


def hybrid_of(engine: TrainingEngine, options: GenerationOptions = FUSED) -> HybridEngine:
    return HybridEngine(engine, Vocabulary(frozenset({EOS}), PAD), options=options)


def rollout(hybrid: HybridEngine) -> Rollout:
    with hybrid.generation():
        return hybrid.generate(PROMPTS, **SETTINGS)


def eager(engine: TrainingEngine) -> Rollout:
    return rollout(hybrid_of(engine, GenerationOptions(backend="eager")))


def far_apart(first: Rollout, second: Rollout) -> bool:
    return any(abs(a[0] - b[0]) > 1e-2 for a, b in zip(first.log_probs, second.log_probs, strict=True))


def assert_rollouts_follow(engine: TrainingEngine, *, tolerance: float) -> None:
    """A rollout after a change is of the new weights, which stay as they are to the bit."""
    hybrid = hybrid_of(engine)
    first = rollout(hybrid)
    assert_same(first, eager(engine))
    buffers = hybrid._generator._buffers
    change_everything(engine)
    before = weights(engine)
    second = rollout(hybrid)
    assert_same(second, eager(engine), tolerance=tolerance)
    assert far_apart(first, second)
    assert hybrid._generator._buffers is buffers, "addresses stay: a graph would"
    after = weights(engine)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "zero_stage"), CASES)
def test_after_a_step_the_rollout_uses_the_new_weights(name, zero_stage):
    assert_rollouts_follow(engine_of(MAKERS[name](), zero_stage), tolerance=1e-5)


@pytest.mark.few(1)
@pytest.mark.parametrize(("zero_stage", "only_lora"), [(0, True), (2, False), (3, True), (3, False)])
def test_after_a_step_the_rollout_uses_the_new_adapters(zero_stage, only_lora):
    """Sampled from a merged copy: equal to base and adapters apart, and the base is as it was to the bit."""
    wrapped = add_lora(
        opt(), dim=3, alpha=12, dropout=0.0, module_name="all-linear", only_lora=only_lora, task="CAUSAL_LM", seed=1
    )
    assert_rollouts_follow(engine_of(wrapped, zero_stage), tolerance=1e-4)


def test_merged_weights_are_those_of_peft():
    wrapped = add_lora(
        llama(), dim=3, alpha=7, dropout=0.0, module_name="all-linear", only_lora=True, task="CAUSAL_LM", seed=1
    )
    shaken_all(list(wrapped.parameters()))
    layer = wrapped.base_model.model.model.layers[0].self_attn.v_proj
    expected = layer.get_base_layer().weight + layer.get_delta_weight("default")
    torch.testing.assert_close(merged_weight(layer), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_in_deepspeeds_flat_buffer_nothing_is_copied(zero_stage):
    hybrid = hybrid_of(engine_of(llama(), zero_stage))
    rollout(hybrid)
    assert hybrid._generator.forward.weights.num_copied_bytes == 0


def test_zero_3_copies_each_number_once():
    engine = engine_of(llama(), 3)
    hybrid = hybrid_of(engine)
    rollout(hybrid)
    numbers = sum(value.numel() for value in weights(engine).values())
    assert hybrid._generator.forward.weights.num_copied_bytes == 4 * numbers


@pytest.mark.slow
def test_the_cache_is_given_back_where_wanted():
    engine = engine_of(opt(), 0)
    kept, released = hybrid_of(engine), hybrid_of(engine, GenerationOptions(FUSED.backend, release_cache=True))
    first = rollout(kept)
    assert kept._generator._buffers is not None
    with released.generation():
        assert_same(released.generate(PROMPTS, **SETTINGS), first)
        assert released._generator._buffers is not None
    assert released._generator is None
    assert_same(rollout(released), first)


@pytest.mark.few(1)
@pytest.mark.parametrize(("share", "stays"), [(0.2, False), (0.5, True)])
def test_the_cache_is_given_back_where_an_update_would_lack_memory(monkeypatch, share, stays):
    monkeypatch.setattr("step3_ppo.models.hybrid_engine.memory_of", lambda device: (share, 1))
    hybrid = hybrid_of(engine_of(opt(), 0))
    first = rollout(hybrid)
    assert (hybrid._generator is not None) == stays
    assert_same(rollout(hybrid), first)


@pytest.mark.few(1)
@pytest.mark.parametrize("stays", [False, True])
def test_the_rule_of_the_cache_is_asked_with_what_is_measured(monkeypatch, stays):
    """Before the first update, and later with what the largest took."""
    calls: list[tuple[int, ...]] = []
    monkeypatch.setattr("step3_ppo.models.hybrid_engine.memory_of", lambda device: (7, 9))
    monkeypatch.setattr(
        "step3_ppo.models.hybrid_engine.keeps_cache", lambda *given, taken: calls.append((*given, taken)) or stays
    )
    hybrid = hybrid_of(engine_of(opt(), 0))
    for hybrid._update_bytes in (0, 5):
        rollout(hybrid)
        assert hybrid.holds_buffers == stays
    assert calls == [(7, 9, 0), (7, 9, 5)]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("cycles", "expected"),
    [
        pytest.param([(38, [])], 0, id="no update yet"),
        pytest.param([(38, []), (53, [65])], 12, id="the first update leaves its states"),
        pytest.param([(38, []), (53, [65]), (53, [60])], 12, id="the largest of two rollouts"),
        pytest.param([(38, []), (53, [40, 65, 60])], 12, id="the largest of one"),
        pytest.param([(38, []), (53, [65]), (53, [69])], 16, id="a later one is the largest"),
        pytest.param([(38, []), (38, [65, 60])], 27, id="states come from the host for each update"),
        pytest.param([(38, []), (53, [65]), (53, [])], 12, id="an evaluation between"),
    ],
)
def test_what_an_update_takes_is_counted_without_what_it_leaves(monkeypatch, cycles, expected):
    """Bytes as on one GPU: for each rollout, those held when it begins and the most that updates before it held."""
    monkeypatch.setattr("step3_ppo.models.hybrid_engine.memory_of", lambda device: (1, 1))
    calls: list[int] = []
    monkeypatch.setattr("step3_ppo.models.hybrid_engine.keeps_cache", lambda *given, taken: calls.append(taken) or True)
    hybrid = hybrid_of(engine_of(opt(), 0))
    for held, peaks in cycles:
        hybrid._device = torch.device("cuda")
        for peak in peaks:
            monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device, peak=peak: peak)
            hybrid.note_update()
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device, held=held: held)
        hybrid._device = torch.device("cpu")
        rollout(hybrid)
    assert calls[-1] == expected


def test_training_goes_on_after_a_rollout_that_was_broken_off():
    engine = engine_of(opt(), 3)
    hybrid = hybrid_of(engine)
    with pytest.raises(GenerationStopped), hybrid.generation():
        assert not engine.module.training
        hybrid.generate(PROMPTS, **SETTINGS, should_stop=lambda: True)
    assert engine.module.training
    with pytest.raises(RuntimeError, match="outside generation"):
        hybrid.generate(PROMPTS, **SETTINGS)
    trained(engine)
    assert_same(rollout(hybrid), eager(engine))


def test_prompts_at_once_are_slots():
    engine = engine_of(opt(), 0)
    for options in (FUSED, GenerationOptions(backend="static")):
        hybrid = hybrid_of(engine, options)
        with hybrid.generation():
            actual = hybrid.generate(PROMPTS, **(SETTINGS | {"num_samples": 2}), batch_size=1)
        assert hybrid._generator._buffers.num_slots == 2 and len(actual.responses) == 4


def test_ranks_that_do_not_divide_are_refused():
    options = GenerationOptions(FUSED.backend, tensor_parallel_size=2)
    with pytest.raises(InputError, match=naming("--inference-tp-size 2 ... 1 ranks")):
        hybrid_of(engine_of(opt(), 0), options)


def test_flags_become_options():
    config = PPOConfig.model_validate(
        {
            "actor": {"model_name_or_path": "a"}, "critic": {"model_name_or_path": "c"},
            "data": {"data_path": ["d"], "max_prompt_seq_len": 30},
            "sampling": {
                "max_answer_seq_len": 12, "generation_engine": "static", "merge_lora_for_generation": False,
                "release_inference_cache": True, "inference_tp_size": 4, "rollout_weights": "whole",
                "per_device_generation_batch_size": 16, "generation_batches": 1, "num_samples_per_prompt": 2,
            },
        }
    )  # fmt: skip
    assert generation_options(config, 1) == GenerationOptions("static", False, 42, True, 4, "whole", min_slots=32)
    optimizer = config.optimizer.model_copy(update={"per_device_eval_batch_size": 40})
    assert generation_options(config.model_copy(update={"optimizer": optimizer}), 1).min_slots == 40
