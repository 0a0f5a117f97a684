"""When ZeRO-3's weights are whole: once a phase, or layer by layer (`pipeline/engine/zero3.py`)."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.ds_arguments import PARTITIONED_FILE, built
from support.messages import refusal

from pipeline import dist
from pipeline.checkpoints.model_folder import adapter_weights, state_dict
from pipeline.configuration.ds_config import Placement, frozen_json
from pipeline.configuration.groups import DeepSpeedConfig, ModelConfig
from pipeline.engine import zero3
from pipeline.engine.engine import FrozenEngine, TrainingEngine
from pipeline.engine.parameter_groups import parameter_groups
from pipeline.engine.start import partitioned_loading
from pipeline.models.forward import fused_layers
from pipeline.models.forward.causal_lm import CausalLM
from pipeline.models.loading import load_causal_lm
from pipeline.models.lora import add_lora
from pipeline.models.source import ModelSource
from pipeline.training.steps import step_together
from step3_ppo.models.engines import Models

pytestmark = pytest.mark.usefixtures("world")
CPU = torch.device("cpu")
SETTINGS = DeepSpeedConfig(dtype="fp32", deepspeed_config=str(PARTITIONED_FILE))
IDS = torch.randint(3, 300, (2, 9), generator=torch.Generator().manual_seed(5))


def trained_engine(folder: Any, gather: zero3.Gather, *, lora: bool = False, **zero: int) -> TrainingEngine:
    config = built(
        SETTINGS, zero_stage=3, dtype="fp32", micro_batch_size=2, gradient_accumulation_steps=2,
        world_size=1, max_grad_norm=0.0, device="cpu",
    )  # fmt: skip
    config["zero_optimization"] |= zero
    with partitioned_loading(config, ModelSource(str(folder))):
        module = CausalLM(load_causal_lm(folder, dtype=torch.float32))
    if lora:
        shape: dict[str, Any] = {"dim": 4, "alpha": 8.0, "dropout": 0.0, "module_name": "all-linear"}
        module.model = add_lora(module.model, **shape, only_lora=True, task="CAUSAL_LM", seed=0)
    groups = parameter_groups(module, ModelConfig(learning_rate=0.01, weight_decay=0.0, lora_learning_rate=0.01))
    return TrainingEngine(module.train(), groups, config, betas=(0.9, 0.95), eps=1e-8, gather=gather)


def frozen_engine(folder: Any, gather: zero3.Gather) -> FrozenEngine:
    place = Placement(device="cpu", dtype="fp32", ranks=1, run_dir=Path("unused"))
    config = frozen_json(SETTINGS, ModelConfig(zero_stage=3), place, offload=False)
    with partitioned_loading(config, ModelSource(str(folder))):
        model = load_causal_lm(folder, dtype=torch.float32)
    return FrozenEngine(CausalLM(model), config, CPU, gather=gather)


def forward(engine: Any) -> torch.Tensor:
    selected = torch.ones(2, 8, dtype=torch.bool)
    return engine(IDS, attention_mask=torch.ones_like(IDS, dtype=torch.bool), selected=selected).log_probs


def away(engine: Any) -> set[bool]:
    return {zero3.is_released(parameter) for parameter in engine.module.parameters()}


def in_flight(engine: Any) -> int:
    return sum(parameter.ds_status.name == "INFLIGHT" for parameter in engine.module.parameters())


def test_once_keeps_weights_whole_until_the_step(tiny_folders: Any) -> None:
    engine = trained_engine(tiny_folders["opt"], "once")
    assert away(engine) == {True}
    for last in (False, True):
        loss = -forward(engine).mean()
        assert away(engine) == {False}
        engine.backward(loss, last=last)
        assert away(engine) == {False}, "the second micro-batch would gather again"
    assert step_together([engine], 1.0, loss=loss)
    assert away(engine) == {True}
    assert (-forward(engine).mean() - loss).abs() > 1e-4, "the old copy was read after the step"


@pytest.mark.parametrize("leave", ["discard", "generation", "release_gathered"])
def test_once_lets_weights_go_at_the_end_of_a_phase(tiny_folders: Any, leave: str) -> None:
    engine = trained_engine(tiny_folders["opt"], "once")
    if leave == "discard":
        engine.backward(-forward(engine).mean(), last=True)
        engine.drop_gradients()
    else:
        with torch.no_grad():
            forward(engine)
        if leave == "release_gathered":
            engine.release_gathered()
        else:
            with engine.generation(gather=False):
                assert away(engine) == {True}
            with engine.generation():
                assert away(engine) == {False}
    assert away(engine) == {True}
    forward(engine)
    assert away(engine) == {False}, "generation left DeepSpeed's hooks behind"


def test_a_frozen_model_is_whole_between_its_passes(tiny_folders: Any) -> None:
    once, layers = (frozen_engine(tiny_folders["llama"], gather) for gather in ("once", "layers"))
    expected = forward(FrozenEngine(CausalLM(load_causal_lm(tiny_folders["llama"], dtype=torch.float32)),
                                    {"zero_optimization": {"stage": 0}}, CPU))  # fmt: skip
    for engine, between in ((once, False), (layers, True)):
        assert torch.allclose(forward(engine), expected, atol=1e-6)
        assert away(engine) == {between}
        engine.release_gathered()
        assert away(engine) == {True}


def test_layer_by_layer_remembers_no_values(tiny_folders: Any) -> None:
    """DeepSpeed's linear layer is there for it alone: torch's own would keep what a layer lets go of."""
    once, layers = (trained_engine(tiny_folders["opt"], gather) for gather in ("once", "layers"))
    for engine, name in ((once, "AddmmBackward0"), (layers, "LinearFunctionForZeroStage3Backward")):
        weight, bias = engine.module.model.model.decoder.layers[0].fc1.parameters()
        with torch.enable_grad():
            weight.all_gather(), bias.all_gather()
            found = torch.nn.functional.linear(torch.ones(2, weight.shape[1]), weight, bias).grad_fn
            weight.partition(), bias.partition()
        assert type(found).__name__ == name
        loss = -forward(engine).mean()
        assert away(engine) == {engine is layers}
        engine.backward(loss, last=True)
    assert once.gradient_norm() == pytest.approx(layers.gradient_norm(), rel=1e-5)


@pytest.mark.parametrize("then", ["save", "save_adapter", "generate"])
def test_nothing_is_in_flight_without_a_backward_pass(tiny_folders: Any, then: str) -> None:
    """Too much for these limits is whole at a time: at its end, a forward pass gathers ahead for the backward pass."""
    limits = {"stage3_max_live_parameters": 20_000, "stage3_max_reuse_distance": 0}
    engine = trained_engine(tiny_folders["llama"], "layers", lora=True, **limits)
    for _ in range(3):  # the first ones make the trace that DeepSpeed follows
        loss = -forward(engine).mean()
        ahead = in_flight(engine)
        engine.backward(loss, last=True)
        assert step_together([engine], 1.0, loss=loss) and in_flight(engine) == 0
    assert ahead > 0
    with torch.no_grad():
        forward(engine)
    assert in_flight(engine) == 0
    if then == "generate":
        with engine.generation():
            assert away(engine) == {False}
    else:
        values = adapter_weights if then == "save_adapter" else state_dict
        found = values(engine.module, dtype=torch.float32)
        engine.weights.release_all()  # type: ignore[union-attr]
        again = values(engine.module, dtype=torch.float32)
        assert found and found.keys() == again.keys()
        assert all(found[name].equal(again[name]) for name in found)
    assert away(engine) == {True}


def test_adapters_are_fused_where_weights_are_whole(tiny_folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer by layer DeepSpeed lets weights go before the backward pass: peft's own forward pass stays."""
    losses, calls, function = {}, [], fused_layers.AdaptedLinear.apply
    monkeypatch.setattr(fused_layers.AdaptedLinear, "apply", lambda *inputs: (calls.append(1), function(*inputs))[1])
    monkeypatch.setattr(fused_layers, "is_of_one_type", lambda *_: True)
    for case in ("as on a CPU", "once", "layers"):
        gather: Any = "once" if case == "as on a CPU" else case
        with monkeypatch.context() as patch:
            if gather == case:
                patch.setattr("pipeline.engine.engine.fuse_layers", lambda module, _: [
                    fused_layers._fuse(one) for one in module.modules() if isinstance(one, fused_layers.PeftLinear)
                ])  # fmt: skip
            engine = trained_engine(tiny_folders["opt"], gather, lora=True)
        calls.clear()
        losses[case] = []
        for _ in range(3):
            loss = -forward(engine).mean()
            engine.backward(loss, last=True)
            losses[case] += [loss.item(), engine.gradient_norm()]
            assert step_together([engine], 1.0, loss=loss)
        assert len(calls) == (3 * 2 * 6 if case == "once" else 0)
    assert len(set(losses["once"])) == 6
    assert losses["once"] == pytest.approx(losses["as on a CPU"], rel=1e-5)
    assert losses["layers"] == pytest.approx(losses["as on a CPU"], rel=1e-5)


def test_models_let_go_by_name_or_all() -> None:
    gone: list[str] = []

    def engine(name: str) -> Any:
        return SimpleNamespace(release_gathered=lambda: gone.append(name))

    trained, frozen = {name: engine(name) for name in ("actor", "critic")}, {"reward": engine("reward")}
    models = Models(None, trained, frozen, rewards=[])
    models.release_gathered("reference", "reward")
    assert gone == ["reward"]
    models.release_gathered()
    assert gone == ["reward", "actor", "critic", "reward"]


@pytest.mark.parametrize(("gib", "once"), [(7.0, False), (9.0, True)])
def test_auto_looks_at_the_device(monkeypatch: pytest.MonkeyPatch, gib: float, once: bool) -> None:
    """1 GiB of weights against an eighth of the device."""
    module = torch.nn.Linear(2**15, 2**14, bias=False, dtype=torch.bfloat16, device="meta")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**20, int(gib * 2**30)))
    monkeypatch.setattr(dist, "max_over_ranks", lambda value, device: value)
    config: dict[str, Any] = {"zero_optimization": {"stage": 3}}
    assert zero3.gathers_once(module, config, "auto") is once
    assert zero3.gathers_once(module, config, "once") and not zero3.gathers_once(module, config, "layers")
    offloaded = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
    assert not zero3.gathers_once(module, offloaded, "auto")
    (line,) = refusal(zero3.gathers_once, module, offloaded, "once")
    assert line.startswith("--zero3-gather once") and "offloaded" in line
    monkeypatch.setattr(dist, "max_over_ranks", lambda value, device: 1.0)
    assert not zero3.gathers_once(module, config, "auto"), "another rank has a smaller device"


def test_once_and_weights_on_the_host_exclude_each_other() -> None:
    settings = DeepSpeedConfig(offload=True, offload_parameters=True, zero3_gather="once")
    (line,) = refusal(built, settings, zero_stage=3)
    assert line.startswith("--zero3-gather once") and "--offload-parameters" in line


def test_buckets_keep_order_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero3, "BUCKET_NUMEL", 10)
    parameters = [SimpleNamespace(ds_numel=size) for size in (4, 6, 1, 20, 3)]
    assert [[p.ds_numel for p in bucket] for bucket in zero3.buckets(parameters)] == [[4, 6], [1], [20], [3]]
