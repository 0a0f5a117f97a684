"""Count live bytes and GPU kernels of operations on the meta device, where tensors have shapes and no values.

An operation that writes a tensor is a kernel; a view is not. The work of a kernel is its arithmetic operations (of
matrix products and attention), and the bytes that it reads and writes.
"""

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

ALLOCATION_UNIT = 512  # bytes; torch's CUDA allocator rounds up to multiples of this
# Operations that write nothing.
WITHOUT_KERNEL = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
# Operations that read only as many bytes as they return.
LOOK_UPS = frozenset({"embedding", "gather", "index", "index_select"})
# Prefix of the names of attention operations, and those that mask half of their pairs.
ATTENTION = "_scaled_dot_product_"
CAUSAL = frozenset({"_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"})


class Kernel(NamedTuple):
    """The work of a kernel.

    operations: operations of a matrix product or of attention; 0 for other kernels.
    num_bytes: bytes that it reads and writes.
    dequantises: it reads int8 codes.
    head_width: width of a head, of attention; 0 for other kernels.
    """

    operations: float
    num_bytes: int
    dequantises: bool = False
    head_width: int = 0


@dataclass(frozen=True, slots=True)
class PassCount:
    """The peak of live bytes of a pass, and how often it launches each kernel."""

    peak: int
    kernels: Mapping[Kernel, int]


class PassCounter(TorchDispatchMode):
    """Counts kernels and the live bytes of new tensors, with their peak, while the mode is on.

    Args:
        existing: tensors that are not counted, such as weights and inputs.
    """

    def __init__(self, existing: list[Tensor]) -> None:
        super().__init__()
        self._live = {id(tensor.untyped_storage()): 0 for tensor in existing}  # ids stay valid: tensors hold storages
        self.now = self.peak = self.earlier_peak = 0
        self.kernels = Counter[Kernel]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if kernel := kernel_of(func, args, kwargs or {}, out):
            self.kernels[kernel] += 1
        for tensor in out if isinstance(out, (list, tuple)) else (out,):
            if isinstance(tensor, Tensor) and id(storage := tensor.untyped_storage()) not in self._live:
                size = -(-storage.nbytes() // ALLOCATION_UNIT) * ALLOCATION_UNIT
                self._live[id(storage)] = size
                self.now += size
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._free, id(storage)).atexit = False
        return out

    def divide(self) -> None:
        """Begin the second part of the pass: from now on `peak` is its peak, and `earlier_peak` that of the first."""
        self.earlier_peak, self.peak = self.peak, self.now

    def _free(self, key: int) -> None:
        self.now -= self._live.pop(key)


def with_layers(two: PassCounter, three: PassCounter, *, more: int) -> PassCount:
    """Return the count of a pass through three layers and `more` of them, from passes through two and three layers.

    In the first part, up to the backward pass of the lowest layer, the peak grows by a layer's saved activations. In
    the second part it grows by a layer's gradients. The larger of both is the peak.
    """
    peaks = ((two.earlier_peak, three.earlier_peak), (two.peak, three.peak))
    kernels = {key: count + more * (count - two.kernels[key]) for key, count in three.kernels.items()}
    return PassCount(max(last + more * (last - first) for first, last in peaks), Counter(kernels))


def kernel_of(func: Any, args: Any, kwargs: Mapping[str, Any], out: Any) -> Kernel | None:
    """Return the work of an operation that returned `out`; None if it only allocates or makes a view."""
    name, is_mutable = described(func)
    if name in WITHOUT_KERNEL:
        return None
    read = list(tensors_in((*args, *(kwargs[key] for key in kwargs if key != "out"))))
    results = list(tensors_in((out,)))
    storages = {id(tensor.untyped_storage()) for tensor in read}
    if not is_mutable and all(id(tensor.untyped_storage()) in storages for tensor in results):  # a view
        return None
    written = sum(map(num_bytes, results))
    if name in LOOK_UPS:
        return Kernel(0.0, 2 * written)
    head_width = 0
    if name.startswith(ATTENTION):
        operations, head_width = attention_operations(name, args), results[0].shape[-1]
    else:
        count = flop_registry.get(func._overloadpacket)
        operations = float(count(*args, **kwargs, out_val=out)) if count else 0.0
    return Kernel(
        operations,
        sum(map(num_bytes, read)) + written,  # a tensor that is changed in place is among both
        any(tensor.dtype == torch.int8 for tensor in read),
        head_width,
    )


@cache
def described(func: Any) -> tuple[str, bool]:
    """Return the name of an operation, and whether it may change a tensor."""
    return func._schema.name.removeprefix("aten::"), func._schema.is_mutable


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among arguments or results, including those in lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def attention_operations(name: str, args: Any) -> float:
    """Return the arithmetic operations of attention between unmasked pairs.

    torch's own counter ignores grouped queries before 2.12. The forward pass has two products: scores and output. The
    backward pass computes the scores again, and two gradients of each product.
    """
    is_backward = name.endswith("_backward")
    query, key, value = args[is_backward : is_backward + 3]  # backward: after the gradient of the output
    width = 3 * query.shape[-1] + 2 * value.shape[-1] if is_backward else query.shape[-1] + value.shape[-1]
    return (1.0 if name in CAUSAL else 2.0) * query.shape[:-1].numel() * key.shape[-2] * width


def num_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor in memory; an expanded tensor has fewer than its shape says."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())
