"""Packed rows on a CUDA device: the flash kernel against dense masks and padding, in real steps 1 and 3 as well."""

from pathlib import Path

import pytest
import torch
from support.command_run import run_command
from support.tiny_models import EOS, random_rows, randomise, tiny_config
from support.tiny_run import make_folder, read_metrics
from transformers import AutoModelForCausalLM, MistralConfig

from pipeline.data.batching import packed_sft_batch
from pipeline.data.loader import to_device
from pipeline.models.forward import packed_attention
from pipeline.models.forward.causal_lm import CausalLM
from pipeline.models.forward.shared_prompts import SharedPrompts
from pipeline.models.loading import without_dropout
from pipeline.tensor_ops import lengths_to_mask
from step1_sft.eval import forward_log_probs

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
BF16_TOLERANCE = 0.03  # relative to the largest number
SAMPLES = [
    {"ids": row.tolist(), "trained": [False] + [True] * (len(row) - 1)}
    for row in random_rows(3, (19, 4, 17, 25, 33, 6, 1))
]


def apart(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((mine.float() - theirs.float()).abs().max() / theirs.float().abs().max().clamp(min=1e-3)).item()


@pytest.mark.parametrize("name", ["opt", "llama"])
def test_kernel_equals_dense_masks(name):
    """Log-probabilities and gradients; padding at the end of rows, a row of padding, samples of one token."""
    inner = AutoModelForCausalLM.from_config(without_dropout(tiny_config(name)), attn_implementation="sdpa")
    randomise(inner, 1)
    model = CausalLM(inner.to(CUDA, torch.bfloat16)).train()
    batch = to_device(packed_sft_batch([SAMPLES[:3], SAMPLES[3:6], SAMPLES[6:], None], pad_id=EOS), CUDA)
    found = []
    for by_bounds in (False, True):
        if by_bounds:
            assert packed_attention.enable_packed_attention(inner, device=CUDA), "torch 2.11 has the kernel"
        model.zero_grad()
        log_probs, trained = forward_log_probs(model, batch, packed=True)
        (-log_probs.sum()).backward()
        gradients = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
        found.append((log_probs[trained].detach(), gradients))
    assert apart(found[1][0], found[0][0]) < BF16_TOLERANCE
    assert all(bool(gradient.isfinite().all()) for gradient in found[1][1].values())
    for key, gradient in found[1][1].items():
        if not key.endswith("k_proj.bias"):  # a shift of all keys changes no softmax: its gradient is rounding
            assert apart(gradient, found[0][1][key]) < 2 * BF16_TOLERANCE, key


@pytest.mark.parametrize("window", [-1, 20])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 64), (12, 2, 128), (8, 1, 32), (4, 4, 128)])
def test_grouped_heads_give_what_repeated_ones_give(heads, kv_heads, size, window):
    """Output and gradients of the flash kernel, whose gradients of keys and values are those of their groups' sums."""
    generator = torch.Generator(CUDA).manual_seed(1)
    bounds = torch.tensor([0, 60, 61, 150, 151, 300], dtype=torch.int32, device=CUDA)
    shapes = [(300, n, size) for n in (heads, kv_heads, kv_heads, heads)]
    *qkv, weights = (torch.randn(shape, device=CUDA, generator=generator).bfloat16() for shape in shapes)

    def outcome(*, repeated: bool) -> list[torch.Tensor]:
        query, *pair = (tensor.clone().requires_grad_() for tensor in qkv)
        given = [tensor.repeat_interleave(heads // kv_heads, 1) if repeated else tensor for tensor in pair]
        out = packed_attention.flash_attention(query, *given, bounds, bounds, longest=149, scale=None, window=window)
        assert out.shape == query.shape
        return [out.detach(), *torch.autograd.grad((out * weights).sum(), (query, *pair))]

    for one, other, tensor in zip(outcome(repeated=False), outcome(repeated=True), [qkv[0], *qkv], strict=True):
        assert one.shape == other.shape == tensor.shape
        assert apart(one, other) < BF16_TOLERANCE


def test_rows_padded_on_the_left_are_refused():
    """On a GPU as on a CPU, with and without the counts that spare the other waits for the device."""
    inner = AutoModelForCausalLM.from_config(without_dropout(tiny_config("llama")), attn_implementation="sdpa")
    model = CausalLM(inner.to(CUDA, torch.bfloat16))
    mask = lengths_to_mask(torch.tensor([9, 4], device=CUDA), 9)
    ids = torch.randint(3, 400, mask.shape, device=CUDA)
    counts = {"num_selected": 11, "num_tokens": 13}
    for options in ({}, counts):
        with pytest.raises(ValueError, match="padded on the right: a real token follows padding"):
            model(ids, attention_mask=mask.flip(1), selected=mask.flip(1)[:, 1:], **options)
    checked, known = (
        model(ids, attention_mask=mask, selected=mask[:, 1:], **counts, right_padded=right_padded).log_probs
        for right_padded in (False, True)
    )
    assert known.equal(checked)


def config_of(name: str):
    if name == "mistral":  # each token sees 40: itself and 39 before it
        return MistralConfig(
            vocab_size=400, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, sliding_window=40,
        )  # fmt: skip
    return without_dropout(tiny_config(name))


@pytest.mark.parametrize("name", ["opt", "opt-350m", "llama", "mistral"])
def test_rows_without_their_padding_equal_padded_rows(name):
    """Log-probabilities and gradients of rows of 1 to 60 tokens."""
    inner = AutoModelForCausalLM.from_config(config_of(name), attn_implementation="sdpa")
    randomise(inner, 1)
    model = CausalLM(inner.to(CUDA, torch.bfloat16)).train()
    lengths = torch.tensor([60, 1, 33, 17, 50, 4, 59], device=CUDA)
    mask = lengths_to_mask(lengths, 60)
    ids = torch.randint(3, 400, mask.shape, device=CUDA, generator=torch.Generator(CUDA).manual_seed(1))
    found = []
    for packed in (False, True):
        if packed:
            assert packed_attention.enable_packed_attention(inner, device=CUDA)
        model.zero_grad()
        selected, count = mask[:, 1:], int(lengths.sum()) if packed else None
        log_probs = model(ids, attention_mask=mask, selected=selected, num_tokens=count).log_probs
        (-log_probs.sum()).backward()
        gradients = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
        found.append((log_probs.detach(), gradients))
    assert apart(found[1][0], found[0][0]) < BF16_TOLERANCE
    for key, gradient in found[1][1].items():
        assert apart(gradient, found[0][1][key]) < 2 * BF16_TOLERANCE, key


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("name", ["opt", "llama", "mistral"])
def test_rows_that_share_their_prompts_equal_rows_of_their_own(name, recomputed):
    """Three rows of a prompt of 300 tokens, two of one of 70, one alone: values, gradients, the same bits twice."""
    config = config_of(name)
    config.max_position_embeddings = 512
    inner = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    randomise(inner, 1)
    model = CausalLM(inner.to(CUDA, torch.bfloat16)).train()
    prompts, lengths = torch.tensor([[300, 70, 300, 12, 70, 300], [301, 200, 370, 100, 71, 430]], device=CUDA)
    groups = torch.tensor([5, 2, 5, 9, 2, 5], device=CUDA)
    mask = lengths_to_mask(lengths, 430)
    ids = torch.randint(3, 400, mask.shape, device=CUDA, generator=torch.Generator(CUDA).manual_seed(1))
    ids[[2, 5], :300], ids[4, :70] = ids[0, :300], ids[1, :70]
    shared = SharedPrompts.of_groups(groups, prompts, num_tokens=670)
    assert packed_attention.enable_packed_attention(inner, device=CUDA)
    if recomputed:
        inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    found = []
    for settings in ({}, {"shared": shared}, {"shared": shared}):
        model.zero_grad()
        log_probs = model(ids, attention_mask=mask, selected=mask[:, 1:], num_tokens=1472, **settings).log_probs
        (-log_probs * torch.linspace(0.5, 2.0, log_probs.numel(), device=CUDA).view_as(log_probs)).sum().backward()
        gradients = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
        found.append((log_probs.detach(), gradients))
    assert apart(found[1][0], found[0][0]) < BF16_TOLERANCE and found[1][0].equal(found[2][0])
    for key, gradient in found[1][1].items():
        if not key.endswith("k_proj.bias"):  # a shift of all keys changes no softmax: its gradient is rounding
            assert apart(gradient, found[0][1][key]) < 2 * BF16_TOLERANCE, key


def test_ppo_packs_its_rows(tmp_path: Path):
    folder = make_folder(tmp_path)
    words = [
        *("--actor-model-name-or-path", "base", "--critic-model-name-or-path", "scorer", "--data-path", "train.jsonl"),
        *("--data-split", "none", "--eval-fraction", "0", "--max-steps", "3", "--max-prompt-seq-len", "48"),
        *("--max-answer-seq-len", "24", "--per-device-generation-batch-size", "8", "--dtype", "bf16"),
        *("--per-device-train-batch-size", "4", "--gradient-accumulation-steps", "2", "--output-dir", "out"),
        *("--old-log-probs", "trainer"),
    ]
    ended = run_command("step3_ppo", words, folder=folder)
    assert ended.code == 0, ended.stderr[-2000:]
    run_dir = folder / "out" / "runs" / "ppo"
    assert "rows are packed" in (run_dir / "log.txt").read_text()
    lines = [line for line in read_metrics(run_dir) if "step_s" in line]
    assert len(lines) == 3 and all(line["policy/first_ratio_error"] == 0.0 for line in lines)


@pytest.mark.parametrize("recomputed", ["false", "true"])
def test_packed_training_uses_the_kernel(tmp_path: Path, recomputed: str):
    folder = make_folder(tmp_path)
    words = [
        *("--model-name-or-path", "base", "--data-path", "train.jsonl", "--data-split", "none", "--max-steps", "4"),
        *("--max-seq-len", "96", "--per-device-train-batch-size", "4", "--dtype", "bf16", "--packing"),
        *("--learning-rate", "1e-3", "--gradient-checkpointing", recomputed, "--output-dir", "out"),
    ]
    ended = run_command("step1_sft", words, folder=folder)
    assert ended.code == 0, ended.stderr[-2000:]
    assert "variable-length flash kernel" in (folder / "runs" / "out" / "log.txt").read_text()
    losses = [line["loss"] for line in read_metrics(folder / "runs" / "out") if "step_s" in line]
    assert len(losses) == 4 and losses[-1] < losses[0]
