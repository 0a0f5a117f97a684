"""The work of kernels by hand: operations of products, and the bytes that operations read and write."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import flop_registry

from pipeline.kernels.int8_linear import dequantise_rows
from pipeline.planning.counting import Kernel, PassCounter


def kernels_of(function, *tensors: Tensor) -> dict[Kernel, int]:
    with PassCounter(list(tensors)) as counter:
        function(*tensors)
    return dict(counter.kernels)


def meta(*shape: int, dtype=torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    "function, shapes, kernels",
    [
        (torch.mm, [(4, 8), (8, 16)], {(2 * 4 * 8 * 16, 2 * (32 + 128 + 64)): 1}),
        (torch.add, [(4, 8), (4, 8)], {(0, 2 * 3 * 32): 1}),
        (lambda x, y: x.add_(y), [(4, 8), (4, 8)], {(0, 2 * 3 * 32): 1}),
        (lambda x, y: torch.add(x, y, out=torch.empty_like(x)), [(4, 8), (4, 8)], {(0, 2 * 3 * 32): 1}),
        (lambda x: x.float() * 2, [(4, 8)], {(0, 2 * 32 + 4 * 32): 1, (0, 4 * 2 * 32): 1}),
        (lambda x: (x.view(8, 4).T.expand(3, 4, 8), x.detach(), torch.empty_like(x)), [(4, 8)], {}),
        (lambda x: x.expand(4, 8) + 1, [(1, 8)], {(0, 2 * (8 + 32)): 1}),
    ],
)
def test_the_work_of_operations_by_hand(function, shapes, kernels):
    assert kernels_of(function, *(meta(*shape) for shape in shapes)) == {
        Kernel(*work): n for work, n in kernels.items()
    }


def test_a_look_up_reads_what_it_gives_out():
    ids = torch.zeros(3, dtype=torch.int64, device="meta")
    assert kernels_of(lambda x: functional.embedding(ids, x), meta(1000, 8)) == {Kernel(0.0, 2 * 2 * 3 * 8): 1}


def test_a_kernel_that_reads_int8_codes_is_told_apart():
    codes, scale = meta(16, 8, dtype=torch.int8), meta(16, 1, dtype=torch.float32)
    counted = kernels_of(lambda x, y: dequantise_rows(x, y, torch.bfloat16), codes, scale)
    assert counted == {Kernel(0.0, 128 + 4 * 16 + 2 * 128, dequantises=True): 1}


@pytest.mark.parametrize("heads", [3, 1])
def test_attention_is_counted_for_the_pairs_that_are_not_masked(heads, monkeypatch):
    """2 rows, 3 heads of queries, 16 tokens, 8 channels: products over half of 16 x 16 pairs, 2 forward and 5 back.

    By no formula of torch's, which take no grouped queries before torch 2.12.
    """
    attend = torch.ops.aten._scaled_dot_product_flash_attention
    for operation in (attend, torch.ops.aten._scaled_dot_product_flash_attention_backward):
        monkeypatch.delitem(flop_registry, operation)
    query, key, value = (meta(2, number, 16, 8).requires_grad_() for number in (3, heads, heads))

    def both(*tensors: Tensor) -> None:
        attend(*tensors, 0.0, True, False)[0].backward(meta(2, 3, 16, 8))

    counted = kernels_of(both, query, key, value)
    product = 2 * 2 * 3 * 16 * 16 * 8 / 2
    assert [kernel.operations for kernel in counted if kernel.operations] == [2 * product, 5 * product]
