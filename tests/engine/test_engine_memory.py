"""What an engine holds, byte by byte, where it waits during a rollout, and the norm that its step is given.

Tiny: weights 6 x 4 and 4 x 1 (28 numbers, decayed), biases 4 and 1 (5 numbers, not decayed); 33 in all. ZeRO-1 and -2
lay each group out in a buffer of an even number of elements: 28 + 6.
"""

import pytest
import torch
from safetensors.torch import load_file
from support.command_run import run_command
from support.ds_arguments import PARTITIONED, built
from support.tiny_run import make_folder
from torch import nn

from pipeline.configuration.groups import ModelConfig
from pipeline.engine.engine import FrozenEngine, TrainingEngine
from pipeline.engine.memory import ModelMemory, Peaks, memory_table, model_memory, optimizer_tensors
from pipeline.engine.optimizer_offload import optimizer_states_on_host, return_from_host
from pipeline.engine.parameter_groups import parameter_groups
from pipeline.models.forward.causal_lm import CausalLM
from pipeline.models.loading import load_causal_lm
from pipeline.models.lora import add_lora
from pipeline.training.steps import step_together

pytestmark = pytest.mark.usefixtures("world")
CPU = torch.device("cpu")
NUMBERS, PADDED = 33, 34
STAGES = [(0, "fp32"), (0, "bf16"), (1, "fp32"), (1, "bf16"), (2, "bf16"), (3, "fp32"), (3, "bf16")]


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.first, self.second = nn.Linear(6, 4), nn.Linear(4, 1)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(rows).tanh()).float().square().sum()


def engine_of(module: nn.Module, stage: int, dtype: str, *, clip: float = 0.5) -> TrainingEngine:
    settings = built(
        user_json=PARTITIONED, zero_stage=stage, dtype=dtype,
        micro_batch_size=2, gradient_accumulation_steps=2, world_size=1, max_grad_norm=clip,
        device="cpu",
    )  # fmt: skip
    settings["zero_optimization"]["stage"] = stage  # one rank would be given stage 1 for 2
    groups = parameter_groups(module, ModelConfig(learning_rate=1e-2, weight_decay=0.1, lora_learning_rate=1e-2))
    return TrainingEngine(module.train(), groups, settings, betas=(0.9, 0.95), eps=1e-8)


def tiny_engine(stage: int, dtype: str, **settings: float) -> TrainingEngine:
    return engine_of(Tiny().to(torch.bfloat16 if dtype == "bf16" else torch.float32), stage, dtype, **settings)


def accumulate(engine: TrainingEngine, number: int = 0) -> None:
    """The gradients of one step: two micro-batches."""
    generator = torch.Generator().manual_seed(number)
    dtype = torch.bfloat16 if engine.deepspeed.bfloat16_enabled() else torch.float32
    for last in (False, True):
        engine.backward(engine(torch.randn(3, 6, generator=generator).to(dtype)), last=last)


def take_steps(engine: TrainingEngine, count: int, first: int = 0) -> list[float]:
    norms = []
    for number in range(first, first + count):
        accumulate(engine, number)
        assert step_together([engine], 1.0, loss=0.0)
        norms.append(engine.last_gradient_norm)
    return norms


def states(engine: TrainingEngine) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in (*optimizer_tensors(engine), *engine.module.state_dict().values())]


# --- what is held ---


def expected(stage: int, dtype: str) -> ModelMemory:
    """By hand: a number of the model and of its gradient is 2 or 4 bytes, its fp32 copy 4, its two moments 8."""
    size = 2 if dtype == "bf16" else 4
    if stage == 0:
        # In fp32 the optimizer updates the weights themselves.
        return ModelMemory(NUMBERS * size, NUMBERS * size, NUMBERS * (12 if dtype == "bf16" else 8), on_host=0)
    numbers = PADDED if stage < 3 else NUMBERS
    return ModelMemory(numbers * size, numbers * size, numbers * 12, on_host=0)


@pytest.mark.parametrize(("stage", "dtype"), STAGES)
def test_bytes_are_those_worked_out_by_hand(stage, dtype):
    engine = tiny_engine(stage, dtype)
    take_steps(engine, 2)
    assert model_memory(engine, CPU) == expected(stage, dtype)


def test_before_a_step_there_are_no_moments_and_elsewhere_than_the_device_is_the_host():
    engine = tiny_engine(1, "bf16")
    found = model_memory(engine, torch.device("cuda"))
    assert found == ModelMemory(PADDED * 2, 0, PADDED * 4, on_host=PADDED * 6)


def test_lora_holds_states_of_its_own_weights_only(tiny_folders):
    model = add_lora(
        load_causal_lm(tiny_folders["opt"], dtype=torch.float32), dim=2, alpha=4, dropout=0.0, module_name="all-linear",
        only_lora=True, task="CAUSAL_LM", seed=1,
    )  # fmt: skip
    engine = engine_of(CausalLM(model), 0, "fp32")
    ids = torch.arange(3, 15).reshape(2, 6)
    mask = torch.ones_like(ids, dtype=torch.bool)
    engine.backward(engine(ids, attention_mask=mask, selected=mask[:, 1:]).log_probs.sum(), last=True)
    assert step_together([engine], 1.0, loss=0.0)
    # Two layers of width 32: q, k, v, out, and 32 x 64 twice; each of them gets 2 x (rows + columns) numbers.
    adapters = 2 * (4 * 2 * (32 + 32) + 2 * 2 * (32 + 64))
    base = sum(parameter.numel() for name, parameter in model.named_parameters() if "lora_" not in name)
    assert model_memory(engine, CPU) == ModelMemory(4 * (base + adapters), 4 * adapters, 8 * adapters, on_host=0)


def test_a_frozen_model_holds_weights_alone():
    frozen = FrozenEngine(Tiny(), {"zero_optimization": {"stage": 0}}, CPU)
    assert model_memory(frozen, CPU) == ModelMemory(NUMBERS * 4, 0, 0, on_host=0)


def test_the_table_by_hand():
    gib = 2**30
    actor = ModelMemory(weights=2 * gib, gradients=gib, optimizer=12 * gib, on_host=4 * gib)
    models = {"actor": actor, "reward": ModelMemory(gib // 2, 0, 0, 0)}
    lines = memory_table(models, {"memory/generate_gib": 30.0, "memory/train_gib": 11.0, "gpu_memory_gib": 30.0})
    numbers = [[word for word in line.split() if word.replace(".", "").isdigit()] for line in lines]
    assert numbers[1:3] == [["2.000", "1.000", "12.000", "4.000"], ["0.500", "0.000", "0.000", "0.000"]]
    # On the device: 2 + 12 - 4 + 0.5.
    assert numbers[3:] == [["30.000", "19.500"], ["11.000", "0.500"]]
    waiting = {"actor": ModelMemory(2 * gib, gib, 12 * gib, on_host=0, offloaded=12 * gib)}
    lines_away = memory_table(waiting, {"memory/generate_gib": 30.0, "memory/train_gib": 16.0})
    assert "28.000 above" in lines_away[2] and "2.000 above" in lines_away[3], "the optimizer is there to train only"
    assert "cache" in lines[3] and "gradients" in lines[4]
    assert len({len(line) for line in lines[:3]}) == 1, "columns stand under their names"


class Meter:
    """Stands for torch.cuda's memory statistics, in GiB; 1 GiB stays allocated."""

    def __init__(self) -> None:
        self.peak = 1.0

    def use(self, peak: float) -> None:
        self.peak = max(self.peak, peak)

    def max_memory_allocated(self, device: torch.device) -> int:
        return int(self.peak * 2**30)

    def max_memory_reserved(self, device: torch.device) -> int:
        return int(self.peak * 2**31)

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.peak = 1.0


def test_peaks_are_those_of_each_phase(monkeypatch):
    meter = Meter()
    for name in ("max_memory_allocated", "max_memory_reserved", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, getattr(meter, name))
    peaks = Peaks(torch.device("cuda"))
    meter.use(9.0)  # before the first phase: loading, an evaluation
    for phase, peak in (("generate", 5.0), ("score", 3.0), ("train", 4.0), ("train", 2.0)):
        peaks.begin(phase)
        meter.use(peak)
    assert peaks.taken() == {
        "memory/generate_gib": 5.0, "memory/score_gib": 3.0, "memory/train_gib": 4.0, "gpu_memory_gib": 9.0,
        "gpu_reserved_gib": 18.0,
    }  # fmt: skip
    peaks.begin("train")
    meter.use(6.0)
    assert peaks.taken() == {"memory/train_gib": 6.0, "gpu_memory_gib": 6.0, "gpu_reserved_gib": 12.0}
    on_cpu = Peaks(CPU)
    on_cpu.begin("train")
    assert on_cpu.taken() == {}


# --- where it waits during a rollout ---


@pytest.mark.parametrize(("stage", "dtype"), STAGES)
def test_states_come_back_bit_by_bit(stage, dtype):
    """The steps after the round trip equal those of an engine whose states stayed."""
    engine, other = tiny_engine(stage, dtype), tiny_engine(stage, dtype)
    for each in (engine, other):
        take_steps(each, 2)
    tensors, before = list(optimizer_tensors(engine)), states(engine)
    addresses = {parameter.data_ptr() for parameter in engine.module.parameters()}
    with optimizer_states_on_host([engine]):
        gone = [tensor for tensor in tensors if not tensor.untyped_storage().nbytes()]
        # In fp32 at stage 0 the weights are the optimizer's own, and generation needs them.
        moments_alone = (stage, dtype) == (0, "fp32")
        assert len(gone) == len(tensors) * (2 if moments_alone else 3) // 3
        assert {parameter.data_ptr() for parameter in engine.module.parameters()} == addresses
        assert model_memory(engine, CPU).optimizer == 0
    assert all(torch.equal(mine, kept) for mine, kept in zip(states(engine), before, strict=True))
    assert take_steps(engine, 2, first=2) == take_steps(other, 2, first=2)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(states(engine), states(other), strict=True))


def test_states_come_back_where_sampling_fails_and_before_there_are_any():
    engine = tiny_engine(1, "bf16")
    with optimizer_states_on_host([engine]):
        pass
    take_steps(engine, 1)
    before = states(engine)
    with pytest.raises(KeyError), optimizer_states_on_host([engine]):
        raise KeyError
    assert all(torch.equal(mine, kept) for mine, kept in zip(states(engine), before, strict=True))
    buffers = engine.host_buffers
    assert model_memory(engine, CPU).offloaded == PADDED * 12
    with optimizer_states_on_host([engine]):
        pass
    assert engine.host_buffers is buffers, "host memory is made once"


def test_states_wait_on_the_host_where_sampling_ran_out_of_memory():
    """They come back when what failed has given its memory back, also after a second failure."""
    engine = tiny_engine(1, "bf16")
    take_steps(engine, 1)
    before = states(engine)
    for _ in range(2):
        with pytest.raises(MemoryError), optimizer_states_on_host([engine]):
            raise MemoryError
        assert model_memory(engine, CPU).optimizer == 0
        return_from_host([engine])
        assert all(torch.equal(mine, kept) for mine, kept in zip(states(engine), before, strict=True))
    return_from_host([engine])
    assert all(torch.equal(mine, kept) for mine, kept in zip(states(engine), before, strict=True))


def test_views_of_the_states_stay_views():
    """DeepSpeed keeps a view of each parameter's stretch of the fp32 weights and of the moments."""
    engine = tiny_engine(2, "bf16")
    take_steps(engine, 1)
    mapping = engine.module.first.weight._hp_mapping
    views = [mapping.hp_fragment, *mapping.optim_fragment.values()]
    before = [view.clone() for view in views]
    with optimizer_states_on_host([engine]):
        pass
    now = [mapping.hp_fragment, *mapping.optim_fragment.values()]
    assert all(mine is view and torch.equal(mine, kept) for mine, view, kept in zip(now, views, before, strict=True))
    take_steps(engine, 1, first=1)
    assert not any(torch.equal(view, kept) for view, kept in zip(views, before, strict=True)), "they see the next step"


@pytest.mark.slow
def test_a_run_goes_the_same_way_with_and_without(tmp_path):
    folder = make_folder(tmp_path, num_train=16, num_test=4)
    common = {
        "actor_model_name_or_path": folder / "base", "critic_model_name_or_path": folder / "scorer",
        "data_path": folder / "train.jsonl", "eval_data_path": folder / "test.jsonl", "data_split": "none",
        "max_prompt_seq_len": 48, "max_answer_seq_len": 6, "per_device_generation_batch_size": 4,
        "per_device_train_batch_size": 4, "max_steps": 3, "dtype": "bf16", "actor_zero_stage": 1,
        "eval_interval": 2, "actor_learning_rate": 1e-3, "keep_checkpoints": 0, "enable_tensorboard": "false",
    }  # fmt: skip
    found = []
    for flag in ("false", "true"):
        given = common | {"offload_optimizer_during_rollout": flag, "output_dir": f"out-{flag}"}
        words = [str(word) for name, value in given.items() for word in (f"--{name}", value)]
        ended = run_command("step3_ppo", words, folder=folder)
        assert ended.code == 0, ended.stderr
        log = (folder / f"out-{flag}" / "runs" / "ppo" / "log.txt").read_text()
        assert "memory of this rank" not in log, "the table is of a GPU's memory"
        found.append(load_file(folder / f"out-{flag}" / "actor" / "model.safetensors"))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


# --- the norm that a step is given ---


def stepped_apart(engine: TrainingEngine, count: int) -> list[float]:
    """As `take_steps`, but DeepSpeed finds the norm itself."""
    norms = []
    for number in range(count):
        accumulate(engine, number)
        norms.append(engine.gradient_norm())
        engine._norms = None
        engine.step(1.0)
    return norms


@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize(("stage", "dtype"), STAGES)
def test_a_norm_that_is_known_gives_the_step_that_deepspeed_takes(stage, dtype, clip):
    engine, other = tiny_engine(stage, dtype, clip=clip), tiny_engine(stage, dtype, clip=clip)
    assert take_steps(engine, 3) == pytest.approx(stepped_apart(other, 3), rel=1e-5)
    # DeepSpeed adds the squares up in another order and in fp64: the factor that clips differs in its last bits.
    for mine, theirs in zip(states(engine), states(other), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_norm_is_found_once_a_step(stage, monkeypatch):
    """Once by DeepSpeed at stage 3, group by group; below it by one call of ours, and never by DeepSpeed."""
    engine = tiny_engine(stage, "bf16")
    theirs, ours = [], []
    name = "get_grad_norm_direct"
    real, real_ours = getattr(type(engine.optimizer), name), torch._foreach_norm
    monkeypatch.setattr(type(engine.optimizer), name, lambda *args: theirs.append(1) or real(*args))
    monkeypatch.setattr(torch, "_foreach_norm", lambda *args, **kwargs: ours.append(1) or real_ours(*args, **kwargs))
    take_steps(engine, 1)
    expected = (len(engine.optimizer.fp16_groups), 0) if stage == 3 else (0, 1)
    assert (len(theirs), len(ours)) == expected
    assert {"scaled_global_norm", "_get_norm_groups", "check_overflow"} & vars(engine.optimizer).keys() == set()


def test_a_norm_is_forgotten_with_its_gradients():
    engine = tiny_engine(1, "bf16")
    accumulate(engine)
    engine.last_gradient_norm = engine.gradient_norm()
    engine.discard()
    accumulate(engine, 1)
    engine.step(1.0)
    other = tiny_engine(1, "bf16")
    accumulate(other, 1)
    other.step(1.0)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(states(engine), states(other), strict=True))
