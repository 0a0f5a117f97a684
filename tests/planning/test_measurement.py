"""Passes on the meta device take the bytes that the same passes take of the CPU's allocator."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.tiny_models import tiny_config
from support.tiny_t5 import t5_config
from torch.profiler import ProfilerActivity, profile
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    MistralConfig,
)

from pipeline.configuration.groups import ModelConfig
from pipeline.models.forward import causal_lm, fused_layers
from pipeline.models.forward.causal_lm import CausalLM, Comparison
from pipeline.models.forward.fused_layers import MIN_ELEMENTS
from pipeline.models.forward.seq2seq_lm import Seq2SeqLM
from pipeline.models.loading import base_model, use_gradient_checkpointing
from pipeline.models.lora import add_lora
from pipeline.models.reward_model import FloatLinear, TokenValueModel
from pipeline.planning.counting import Kernel, PassCounter
from pipeline.planning.measurement import (
    build_shape,
    count_pass,
    count_pass_of_shape,
    counted_model,
    model_size,
    peak_bytes,
    run_counted,
)
from pipeline.planning.needs import ModelUse, Pass
from pipeline.planning.stand_ins import KeepsGate, KeepsInput, KeepsLogits

ROWS, LENGTH, LORA = 4, 64, 4
SHAPE = {"hidden_size": 128, "num_hidden_layers": 3}


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    for name in ("opt", "llama"):
        tiny_config(name, **SHAPE).save_pretrained(tmp_path / name)
    return tmp_path


def real_peak(model: torch.nn.Module, *, accumulates: bool, trains: bool, **named: torch.Tensor) -> int:
    """The highest sum of what the CPU's allocator has given out in a pass, as torch's profiler sees it."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool)
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    inputs = () if named else (ids, mask, torch.arange(LENGTH).unsqueeze(0))
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter) if accumulates else None
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, torch.set_grad_enabled(trains):
        out = model(*inputs, **named)
        if trains:
            out.sum().backward()
    now = peak = 0
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def real_model(name: str, settings: ModelConfig) -> TokenValueModel:
    config = tiny_config(name, **SHAPE, dropout=0.0, attention_dropout=0.0, layerdrop=0.0, num_labels=1)
    model = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager")
    model.score.__class__ = FloatLinear
    if settings.lora_dim:
        model = add_lora(
            model, dim=LORA, alpha=16, dropout=0, module_name="all-linear", only_lora=True, task="SEQ_CLS", seed=1
        )
    if settings.gradient_checkpointing:
        use_gradient_checkpointing(base_model(model))
    return TokenValueModel(model).train()


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "name, flags, work",
    [
        ("opt", {}, Pass("critic", ROWS, LENGTH, trains=True, accumulates=True)),
        ("opt", {}, Pass("critic", ROWS, LENGTH, trains=True)),
        ("llama", {}, Pass("critic", ROWS, LENGTH, trains=True, accumulates=True)),
        ("llama", {"gradient_checkpointing": True}, Pass("critic", ROWS, LENGTH, trains=True, accumulates=True)),
        ("llama", {"lora_dim": LORA}, Pass("critic", ROWS, LENGTH, trains=True, accumulates=True)),
        ("llama", {}, Pass("critic", ROWS, LENGTH)),
    ],
    ids=["opt", "first gradients", "llama", "checkpointing", "LoRA", "forward"],
)
def test_a_pass_takes_what_the_allocator_gives_out(folders, name, flags, work):
    settings = ModelConfig(attn_implementation="eager", **flags)
    use = ModelUse("critic", str(folders / name), settings, has_values=True)
    real = real_peak(real_model(name, settings), accumulates=work.accumulates, trains=work.trains)
    # Without gradients some products of torch's own on the CPU need a tensor less than on the meta device.
    assert peak_bytes(use, "fp32", work) == pytest.approx(real, rel=0.02 if work.trains else 0.1)


@pytest.mark.parametrize("window", [None, 512])
def test_what_a_pass_takes_grows_with_the_length_where_no_mask_is_made(tmp_path, window):
    """Without a window nothing of length x length; with one, masks of a byte for each pair, and no positions."""
    MistralConfig(**SHAPE, intermediate_size=128, vocab_size=99, sliding_window=window).save_pretrained(tmp_path)
    use, peaks = ModelUse("critic", str(tmp_path), ModelConfig(), has_values=True), list[int]()
    for length in (4096, 8192):
        peaks.append(peak_bytes(use, "bf16", Pass("critic", 1, length)))
    masks = 2 * (8192**2 - 2 * 4096**2) if window else 0
    assert peaks[1] == pytest.approx(2 * peaks[0] + masks, rel=0.01)


class SelectingAllLM(CausalLM):
    """A causal language model, all of whose tokens pass through its head."""

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        selected = torch.ones(ROWS, LENGTH - 1, dtype=torch.bool)
        out = super().forward(ids, attention_mask=mask, selected=selected, position_ids=positions)
        return out.log_probs


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("trains", [True, False])
def test_a_pass_on_a_cpu_keeps_logits_as_torch_does(tmp_path, trains):
    """Without a kernel of a GPU: log-probabilities of the whole vocabulary, and two gradients of that size."""
    shape = {**SHAPE, "vocab_size": 2000}
    config = tiny_config("opt", **shape, dropout=0.0, attention_dropout=0.0, layerdrop=0.0)
    config.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    real = real_peak(SelectingAllLM(model).train(), accumulates=True, trains=trains)
    settings = ModelConfig(attn_implementation="eager")
    work = Pass("model", ROWS, LENGTH, ROWS * (LENGTH - 1), trains=trains, accumulates=True)
    on_gpu, on_cpu = (peak_bytes(ModelUse("model", str(tmp_path), settings, on_cpu=cpu), "fp32", work)
                      for cpu in (False, True))  # fmt: skip
    assert on_cpu == pytest.approx(real, rel=0.02 if trains else 0.1) and on_gpu < 0.7 * on_cpu


class ComparedLM(CausalLM):
    """A causal language model whose distributions at all tokens are compared with its own."""

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        selected = torch.ones(ROWS, LENGTH - 1, dtype=torch.bool)
        hidden = torch.zeros(ROWS * (LENGTH - 1), self.model.get_output_embeddings().in_features)
        comparison = Comparison("reverse_kl", hidden, self, LENGTH - 1)
        out = super().forward(
            ids, attention_mask=mask, selected=selected, position_ids=positions, comparison=comparison
        )
        return out.log_probs + out.divergence


@pytest.mark.parametrize("num_pieces", [1, 3])
def test_two_distributions_of_each_token_are_held_for_a_piece(tmp_path, monkeypatch, num_pieces):
    shape = {**SHAPE, "vocab_size": 2000}
    config = tiny_config("opt", **shape, dropout=0.0, attention_dropout=0.0, layerdrop=0.0)
    config.save_pretrained(tmp_path)
    monkeypatch.setattr(causal_lm, "COMPARED_BYTES", -(-ROWS * (LENGTH - 1) * 2000 * 4 // num_pieces))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    real = real_peak(ComparedLM(model).train(), accumulates=True, trains=True)
    settings = ModelConfig(attn_implementation="eager")
    work = Pass("actor", ROWS, LENGTH, ROWS * (LENGTH - 1), trains=True, accumulates=True)
    compared = replace(work, divergence="reverse_kl")
    on_cpu = ModelUse("actor", str(tmp_path), settings, on_cpu=True)
    assert peak_bytes(on_cpu, "fp32", compared) == pytest.approx(real, rel=0.02)
    on_gpu = replace(on_cpu, on_cpu=False)
    more = peak_bytes(on_gpu, "fp32", compared) - peak_bytes(on_gpu, "fp32", work)
    assert more > 3 * ROWS * (LENGTH - 1) * 2000 * 4 / num_pieces


class SelectingLM(Seq2SeqLM):
    """The selection of `Seq2SeqLM`, with the stand-in for the kernel that follows it on a GPU."""

    def label_log_probs(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return KeepsLogits.apply(logits.flatten(0, 1).index_select(0, torch.arange(labels.numel()))).view_as(labels)


@pytest.mark.few(1)
@pytest.mark.parametrize("flags", [{}, {"gradient_checkpointing": True}, {"lora_dim": LORA}], ids=str)
def test_a_pass_of_an_encoder_decoder_takes_what_the_allocator_gives_out(tmp_path, flags):
    """Half of a row's tokens are the encoder's, the others the decoder's."""
    config = t5_config(500, d_model=64, d_ff=256, num_layers=3, dropout_rate=0.0)
    config.save_pretrained(tmp_path)
    settings = ModelConfig(attn_implementation="eager", **flags)
    model = AutoModelForSeq2SeqLM.from_config(config, attn_implementation="eager")
    if settings.lora_dim:
        model = add_lora(model, dim=LORA, alpha=16, dropout=0, module_name="all-linear", only_lora=True,
                         task="SEQ_2_SEQ_LM", seed=1)  # fmt: skip
    if settings.gradient_checkpointing:
        use_gradient_checkpointing(base_model(model))
    ids = torch.zeros(ROWS, LENGTH // 2, dtype=torch.int64)
    inputs = {"input_ids": ids, "attention_mask": torch.ones(1, 1, *[LENGTH // 2] * 2, dtype=torch.bool), "labels": ids}
    real = real_peak(SelectingLM(model).train(), accumulates=True, trains=True, **inputs)
    use = ModelUse("model", str(tmp_path), settings)
    work = Pass("model", ROWS, LENGTH, trains=True, accumulates=True)
    assert peak_bytes(use, "fp32", work) == pytest.approx(real, rel=0.03)
    size = model_size(use, "bf16")
    whole = sum(parameter.numel() for parameter in base_model(model).parameters())
    assert size.weights == whole and size.trained == sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("name", ["opt", "llama"])
def test_passes_without_gradients_are_counted_once_as_they_recompute_nothing(folders, name):
    settings, work = ModelConfig(gradient_checkpointing=True), Pass("actor", ROWS, LENGTH, ROWS * 9, trains=False)
    use = ModelUse("actor", str(folders / name), settings)
    assert run_counted(use, "bf16", work) == count_pass(use, "bf16", work)
    before = count_pass_of_shape.cache_info().misses
    count_pass(ModelUse("actor", str(folders / name), ModelConfig()), "bf16", work)
    assert count_pass_of_shape.cache_info().misses == before


def test_an_attention_bias_that_is_learned_is_kept_for_each_row(tmp_path):
    """By sdpa, 3 layers on each side: (1, 2, S, S) biases are kept as (B, 2, S, S); eager keeps scores besides."""
    t5_config(500, num_layers=3).save_pretrained(tmp_path)
    works = [Pass("model", rows, 512, trains=True, accumulates=True) for rows in (2, 4)]
    few, many = (peak_bytes(ModelUse("model", str(tmp_path), ModelConfig()), "bf16", work) for work in works)
    eager = ModelUse("model", str(tmp_path), ModelConfig(attn_implementation="eager"))
    scores = 2 * 256**2 * 2 * 2  # of two rows, two heads, in bf16
    assert many - few > 6 * scores and peak_bytes(eager, "bf16", works[1]) > many


@pytest.mark.parametrize("name", ["opt", "llama"])
def test_weights_are_counted_by_kind(folders, name):
    real = AutoModelForCausalLM.from_config(tiny_config(name, **SHAPE))
    whole = sum(parameter.numel() for parameter in real.parameters())
    size = model_size(ModelUse("model", str(folders / name), ModelConfig()), "bf16")
    assert (size.weights, size.trained) == (whole, whole)
    inside = [p for key, p in real.named_parameters() if "embed" not in key and "lm_head" not in key]
    assert size.weights - size.embeddings == sum(map(torch.Tensor.numel, inside))
    assert size.num_bytes - 2 * whole < 1000  # rotary frequencies
    adapters = model_size(ModelUse("model", str(folders / name), ModelConfig(lora_dim=LORA)), "bf16")
    linear = [m for key, m in real.named_modules() if isinstance(m, torch.nn.Linear) and key != "lm_head"]
    assert adapters.trained == sum(LORA * (m.in_features + m.out_features) for m in linear)
    int8 = model_size(ModelUse("model", str(folders / name), ModelConfig(lora_dim=LORA, quantization="int8")), "bf16")
    scales = sum(4 * m.out_features for m in linear)
    norms = sum(parameter.numel() for key, parameter in real.named_parameters() if "norm" in key)  # in fp32
    assert adapters.num_bytes - int8.num_bytes == sum(m.weight.numel() for m in linear) - scales - 2 * norms


def test_logits_count_once_and_in_pieces(tmp_path):
    """V = 20,000 in bf16: a piece has up to 13,421 tokens, 512 MiB; 14,000 and 26,000 tokens are two pieces.

    All of them are stored, or one is there at a time.
    """
    tiny_config("llama", **SHAPE, vocab_size=20_000).save_pretrained(tmp_path)

    def growth(rows: int, few: int, many: int, *, stores: bool = True) -> float:
        """Bytes of peak for each further token that passes through the head."""
        use = ModelUse("model", str(tmp_path), ModelConfig(), stores_logits=stores)
        works = [Pass("model", rows, LENGTH, count, trains=True, accumulates=True) for count in (few, many)]
        first, second = (peak_bytes(use, "bf16", work) for work in works)
        return (second - first) / (many - few)

    assert growth(8, 100, 300) == pytest.approx(20_000 * 2, rel=0.02)
    assert growth(64, 14_000, 26_000) == pytest.approx(20_000 * 2, rel=0.02)
    # Hidden states are kept whole.
    assert 20_000 * 2 / 2 < growth(64, 14_000, 26_000, stores=False) < 20_000 * 2 / 1.9


def test_fused_norms_keep_their_input_alone(folders, monkeypatch):
    """As `FusedNorm` does: without fp32 copies of it, where there are enough tokens for the kernel."""
    use = ModelUse("critic", str(folders / "llama"), ModelConfig(), has_values=True)
    work = Pass("critic", ROWS, LENGTH, trains=True, accumulates=True)
    plain = count_pass(use, "bf16", work)
    assert ROWS * LENGTH * SHAPE["hidden_size"] < MIN_ELEMENTS
    monkeypatch.setattr(fused_layers, "MIN_ELEMENTS", 1)
    fused = count_pass_of_shape.__wrapped__(use, "bf16", work)
    tokens, norms = ROWS * LENGTH * SHAPE["hidden_size"], 2 * SHAPE["num_hidden_layers"] + 1
    assert plain.peak - fused.peak > 3 * norms * tokens  # at least a rounded copy and a part of the fp32 ones for each
    assert sum(plain.kernels.values()) - sum(fused.kernels.values()) > 5 * norms
    x = torch.randn(3, 4, requires_grad=True)
    out = KeepsInput.apply(x, torch.ones(4))
    saved = out.grad_fn.saved_tensors
    assert saved[0] is x and len(saved) == 2
    with PassCounter([x]) as counter:
        KeepsInput.apply(x, torch.ones(4)).backward(torch.ones(3, 4))
    # Forwards it reads input and weight, backwards input and gradient, and writes as much as its input.
    assert counter.kernels[Kernel(0.0, 4 * (12 + 4 + 12))] == counter.kernels[Kernel(0.0, 4 * 3 * 12)] == 1


def test_fused_gates_keep_gate_and_up_alone(folders, monkeypatch):
    """As `FusedGate` does: without the activation, and in one kernel each way, like rotary positions."""
    use = ModelUse("critic", str(folders / "llama"), ModelConfig(), has_values=True)
    work = Pass("critic", ROWS, LENGTH, trains=True, accumulates=True)
    monkeypatch.setattr(fused_layers, "MIN_ELEMENTS", 1)
    fused = count_pass_of_shape.__wrapped__(use, "bf16", work)
    with monkeypatch.context() as patch:
        patch.setattr(fused_layers, "GATED_MLPS", frozenset())
        patch.setattr(fused_layers, "ROTARY_ATTENTIONS", frozenset())
        build_shape.cache_clear()
        counted_model.cache_clear()
        of_norms = count_pass_of_shape.__wrapped__(use, "bf16", work)
    build_shape.cache_clear()
    counted_model.cache_clear()
    layers = SHAPE["num_hidden_layers"]
    activation = 2 * ROWS * LENGTH * tiny_config("llama", **SHAPE).intermediate_size
    assert of_norms.peak - fused.peak == layers * activation
    # Of a gate one kernel is left of two, and backwards of three; of rotary positions two of ten, and of more.
    assert sum(of_norms.kernels.values()) - sum(fused.kernels.values()) >= layers * (1 + 2 + 8 + 8)
    gate, up = (torch.randn(3, 4, requires_grad=True) for _ in range(2))
    out = KeepsGate.apply(gate, up)  # torch 2.11 frees what is saved with the output
    assert all(a is b for a, b in zip(out.grad_fn.saved_tensors, (gate, up), strict=True))
    with PassCounter([gate, up]) as counter:
        KeepsGate.apply(gate, up).backward(torch.ones(3, 4))
    # Forwards it reads two tensors and writes one, backwards it reads three and writes two.
    assert counter.kernels[Kernel(0.0, 4 * 3 * 12)] == counter.kernels[Kernel(0.0, 4 * 5 * 12)] == 1


@pytest.mark.slow
def test_fused_norms_of_a_quantised_model_keep_their_input_in_fp32(folders, monkeypatch):
    """As under `keep_norms_in_fp32`; below MIN_ELEMENTS transformers' norms keep it in fp32 with either base."""

    def peak(quantization: str) -> int:
        use = ModelUse("critic", str(folders / "llama"), ModelConfig(lora_dim=LORA, quantization=quantization), True)
        return count_pass_of_shape.__wrapped__(
            use, "bf16", Pass("critic", ROWS, LENGTH, trains=True, accumulates=True)
        ).peak

    assert peak("int8") == peak("none")
    monkeypatch.setattr(fused_layers, "MIN_ELEMENTS", 1)
    inputs = (2 * SHAPE["num_hidden_layers"] + 1) * ROWS * LENGTH * SHAPE["hidden_size"]
    assert peak("int8") - peak("none") == pytest.approx((4 - 2) * inputs, rel=0.2)
