"""The moving average against its closed form."""

import pytest
import torch
from torch import nn

from pipeline.engine.fragments import FragmentReader, write_fragments
from pipeline.engine.moving_average import MovingAverage

DECAY = 0.9


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    layers = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(dtype)
    layers[1].bias.requires_grad_(False)
    return layers


@torch.no_grad()
def move(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))


def snapshot(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def after_updates(module: nn.Module, count: int) -> tuple[MovingAverage, list[dict[str, torch.Tensor]]]:
    """(average, the weights at the start and after each update)."""
    move(module, 0)
    average, history = MovingAverage(module, decay=DECAY), [snapshot(module)]
    for step in range(count):
        move(module, step + 1)
        average.update()
        history.append(snapshot(module))
    return average, history


def test_it_equals_the_closed_form():
    """d^n w_0 + (1 - d) sum_k d^(n-k) w_k."""
    average, history = after_updates(model(), 6)
    for name, value in average.averages.items():
        expected = DECAY**6 * history[0][name].double()
        expected += (1 - DECAY) * sum(DECAY ** (6 - k) * history[k][name].double() for k in range(1, 7))
        torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-6)


def test_only_what_is_trained_is_averaged():
    average, _ = after_updates(model(), 1)
    assert set(average.averages) == {"0.weight", "0.bias", "1.weight"}


def test_it_is_kept_in_fp32_for_16_bit_weights():
    module = model(torch.bfloat16)
    move(module, 0)
    average = MovingAverage(module, decay=0.999)
    start = average.averages["0.weight"].clone()
    with torch.no_grad():
        module[0].weight.mul_(1.25)
    average.update()
    moved = average.averages["0.weight"]
    assert moved.dtype == torch.float32
    torch.testing.assert_close(moved - start, 0.001 * (module[0].weight.float() - start), rtol=1e-2, atol=1e-7)
    assert moved.bfloat16().equal(start.bfloat16())  # 16 bits would have lost it


def test_weights_are_swapped_in_and_exactly_back():
    module = model()
    average, history = after_updates(module, 3)
    held = {name: value.clone() for name, value in average.averages.items()}
    with average.swapped_in():
        inside = snapshot(module)
        assert torch.is_grad_enabled()
    assert all(inside[name].equal(held[name]) for name in held)
    assert inside["1.bias"].equal(history[-1]["1.bias"])
    assert all(value.equal(history[-1][name]) for name, value in snapshot(module).items())
    assert all(average.averages[name].equal(held[name]) for name in held)


def test_an_exception_while_swapped_in_restores_the_weights():
    module = model()
    average, history = after_updates(module, 3)
    with pytest.raises(OSError, match="disk"), average.swapped_in():
        raise OSError("disk")
    assert all(value.equal(history[-1][name]) for name, value in snapshot(module).items())


def test_a_checkpoint_restores_it_exactly(tmp_path):
    average, _ = after_updates(model(), 3)
    saved = {name: value.clone() for name, value in average.averages.items()}
    other, _ = after_updates(model(), 1)
    write_fragments(tmp_path / "average.safetensors", list(average.fragments()))
    other.restore(FragmentReader([tmp_path / "average.safetensors"]))
    assert all(other.averages[name].equal(saved[name]) for name in saved)
    other.update()
    assert not other.averages["0.weight"].equal(saved["0.weight"])
