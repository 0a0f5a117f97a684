"""MFU's matrix work against torch's own count of the operations that a forward pass makes."""

import pytest
import torch
from support.tiny_models import NAMES
from torch.utils.flop_counter import FlopCounterMode

from pipeline.models.loading import load_causal_lm
from pipeline.training.flops import forward_work, peak_flops, training_mfu


@pytest.mark.parametrize("name", NAMES)
def test_work_of_a_forward_pass_equals_torchs_count(tiny_folders, name):
    model = load_causal_lm(tiny_folders[name], dtype=torch.float32, attn_implementation="eager")
    ids = torch.randint(5, 60, (3, 16))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(ids)
    work = forward_work(model)
    found = work.flops(num_tokens=48, num_rows=3, num_head_tokens=48)
    # Eager attention computes the whole square; a causal one needs half of it, which is what is counted.
    hidden, layers = model.config.hidden_size, model.config.num_hidden_layers
    whole_square = found + 48 * 2.0 * layers * hidden * 16
    assert whole_square == pytest.approx(counter.get_total_flops(), rel=1e-6)


def test_mfu_counts_three_passes_over_all_devices(monkeypatch):
    monkeypatch.setattr("pipeline.training.flops.peak_flops", lambda device: 100.0)
    assert training_mfu(50.0, seconds=3.0, world_size=2, device=torch.device("cpu")) == {"mfu": 0.25}


def test_an_unknown_device_has_no_mfu():
    assert peak_flops(torch.device("cpu")) is None
    assert training_mfu(50.0, seconds=3.0, world_size=2, device=torch.device("cpu")) == {}
