"""An exponential moving average of a model, in fp32, of each rank's ZeRO-3 shards, so that no weight is gathered."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from pipeline import dist
from pipeline.engine.fragments import Fragment, FragmentReader
from pipeline.models.partitions import drop_whole_copy, is_partitioned, local_range, local_share


class MovingAverage:
    """Averages of the trainable parameters, each rank's share: average = decay * average + (1 - decay) * parameter.

    The average is in fp32: in 16 bits, an update of a weight is smaller than its rounding.
    """

    def __init__(self, model: nn.Module, *, decay: float) -> None:
        self.decay = decay
        self.parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.averages = {name: local_share(parameter).float().clone() for name, parameter in self.parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Update the averages after an optimizer step."""
        for name, parameter in self.parameters.items():
            self.averages[name].lerp_(local_share(parameter).float(), 1.0 - self.decay)

    def fragments(self) -> Iterator[Fragment]:
        """Yield this rank's fragments for a checkpoint; rank 0 writes unpartitioned parameters."""
        for name, parameter in self.parameters.items():
            if is_partitioned(parameter) or dist.is_main():
                start, numel = local_range(parameter)
                yield Fragment(name, start, self.averages[name].view(-1)[:numel])

    def restore(self, reader: FragmentReader) -> None:
        """Read the averages of a checkpoint, for any number of ranks that wrote it."""
        for name, parameter in self.parameters.items():
            start, numel = local_range(parameter)
            reader.read_into(name, start, self.averages[name].view(-1)[:numel])

    @contextmanager
    @torch.no_grad()
    def swapped_in(self) -> Iterator[None]:
        """Put the averaged weights into the model inside the context; afterwards its own weights are restored bit by
        bit."""
        trained = {name: local_share(parameter).clone() for name, parameter in self.parameters.items()}
        try:
            self._write(self.averages)
            yield
        finally:
            self._write(trained)

    def _write(self, values: dict[str, torch.Tensor]) -> None:
        for name, parameter in self.parameters.items():
            drop_whole_copy(parameter)
            local_share(parameter).copy_(values[name])
