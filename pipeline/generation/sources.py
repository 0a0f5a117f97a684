"""Sessions on a model that is whole on its device, whether it is trained or only loaded."""

from torch import nn

from pipeline.generation.backends import CachedForward, check_copies_fit, choose_backend
from pipeline.generation.eager import EagerGenerator
from pipeline.generation.forwards.static import StaticCacheForward
from pipeline.generation.options import GenerationOptions
from pipeline.generation.rollouts import Vocabulary
from pipeline.generation.session import SessionSource
from pipeline.models.decoders.families import read_architecture
from pipeline.models.loading import base_model


def session_source(model: nn.Module, vocabulary: Vocabulary) -> SessionSource:
    """Return a source of sessions on a loaded model, by the fastest backend that supports it.

    A model whose layers are on several devices is sampled from by its own forward pass.
    """
    devices = {parameter.device for parameter in model.parameters()}
    backend, _ = choose_backend(model, GenerationOptions(), next(iter(devices)))
    if backend == "eager" or len(devices) > 1:
        return EagerGenerator(base_model(model), vocabulary)
    from pipeline.generation.generator import Generator

    forward: CachedForward = StaticCacheForward(model) if backend == "static" else whole_forward(model)
    forward.refresh()
    return Generator(forward, vocabulary)


def whole_forward(model: nn.Module) -> CachedForward:
    """Return the forward passes of the fused backend on whole weights, before their first `refresh`.

    Raises:
        InputError: copies of the weights do not fit in memory.
    """
    from pipeline.generation.forwards.fused import FusedForward
    from pipeline.generation.forwards.fused_weights import DecodeWeights

    weights = DecodeWeights(read_architecture(model))
    check_copies_fit(weights.num_bytes_to_copy, next(model.parameters()).device)
    return FusedForward(weights)
