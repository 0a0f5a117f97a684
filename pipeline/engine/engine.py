"""DeepSpeed engines with the few operations that the training loops need. Each loop has its own loss and schedule.

A loop decides where an accumulation ends and whether to step: `backward(loss, last=...)`, then `gradient_norm()`, then
`step()` or `discard()`. The loop scales losses; DeepSpeed divides only by the number of ranks.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Literal

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from pipeline import dist
from pipeline.engine.eight_bit import adamw_8bit
from pipeline.engine.zero3 import Gather, Zero3Weights, remove_hooks, set_gathering
from pipeline.models.flops import TrainingWork, training_work
from pipeline.models.forward.fused_layers import fuse_layers
from pipeline.models.partitions import gathered
from pipeline.tensor_ops import tensor_norms


class FrozenEngine:
    """A frozen model: a ZeRO-3 engine if `config` has ZeRO stage 3, else the plain model on a device."""

    def __init__(
        self, module: nn.Module, config: dict[str, Any], device: torch.device, *, gather: Gather = "auto"
    ) -> None:
        module.requires_grad_(False)
        fuse_layers(module, device)
        self.module = module.eval()
        self.weights: Zero3Weights | None = None
        if config["zero_optimization"]["stage"] < 3:
            self._forward: Any = module.to(device)
            return
        dist.meet()  # ranks may read weights at very different speeds
        once = set_gathering(module, config, gather)
        self._forward = deepspeed.initialize(model=module, config=config)[0]
        self._forward.eval()
        self.weights = Zero3Weights(module, self._forward.optimizer, once=once)

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.weights is not None:
            self.weights.gather()
        return self._forward(*args, **kwargs)

    def release_gathered(self) -> None:
        """Release the weights that ZeRO-3 gathered for the last phase."""
        if self.weights is not None:
            self.weights.release_gathered()

    def recover(self) -> None:
        """Release all weights that a failed forward pass gathered."""
        if self.weights is not None:
            self.weights.release_all()

    def discard(self) -> None:
        """Free all weights for good; the module itself stays alive, since DeepSpeed's ZeRO-3 hooks refer to it."""
        self.release_gathered()
        for parameter in self.module.parameters():
            nothing = parameter.new_empty(0)
            parameter.data = nothing
            if hasattr(parameter, "ds_tensor"):
                parameter.ds_tensor = nothing


class TrainingEngine:
    """A model, its AdamW and its gradients under DeepSpeed (ZeRO stages 0 to 3)."""

    def __init__(
        self,
        module: nn.Module,
        groups: Sequence[dict[str, Any]],
        config: dict[str, Any],
        *,
        betas: tuple[float, float],
        eps: float,
        gather: Gather = "auto",
        states: Literal["fp32", "8bit"] = "fp32",
    ) -> None:
        self.module: Any = module
        dist.meet()  # ranks may read weights at very different speeds
        fuse_layers(module, torch.device(get_accelerator().device_name()))
        optimizer = (
            adamw_8bit(groups, betas=betas, eps=eps)
            if states == "8bit"
            else torch.optim.AdamW(list(groups), betas=betas, eps=eps, fused=True)
        )
        trainable = [parameter for group in groups for parameter in group["params"]]
        partitioned = config["zero_optimization"]["stage"] == 3
        once = partitioned and set_gathering(module, config, gather)
        self.deepspeed, self.optimizer, _, _ = deepspeed.initialize(
            model=module, optimizer=optimizer, model_parameters=trainable, config=config
        )
        if hasattr(self.optimizer, "fp32_groups"):  # FP16_UnfusedOptimizer: stage 0 in 16 bits
            # It allocated its states by a step with zero gradients. Undo it: Adam would count from 2, weights decayed.
            self.optimizer.state.clear()
            self.optimizer.refresh_fp32_params()
        self.weights = Zero3Weights(module, self.optimizer.parameter_offload, once=once) if partitioned else None
        synchronise_on_device(self.optimizer)
        self._peak_rates = [group["lr"] for group in self.optimizer.param_groups]
        self.states = states
        self.partitions_weights: bool = partitioned
        self.partitions_optimizer: bool = config["zero_optimization"]["stage"] > 0
        self.last_gradient_norm = 0.0
        self.gradient_bytes = 0  # bytes of gradients on this rank, set in the first step
        self.is_stepping = False  # True from the beginning of a step until it is counted: weights may be new
        self.host_buffers: list[torch.Tensor] = []  # reused by optimizer_offload.py
        self.states_on_host: list[tuple[torch.UntypedStorage, torch.Tensor]] = []  # (emptied device storage, host copy)
        self._norms: torch.Tensor | None = None  # norms of the current gradients, as DeepSpeed's optimizer has them

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.weights is not None:
            self.weights.gather()
        return self.deepspeed(*args, **kwargs)

    @cached_property
    def work(self) -> TrainingWork:
        """The matrix operations of a forward and a backward pass."""
        return training_work(self.module.model)

    def release_gathered(self) -> None:
        """Release the weights that ZeRO-3 gathered since the last release; `step` does this too."""
        if self.weights is not None:
            self.weights.release_gathered()

    @property
    def config(self) -> Any:
        """The configuration of the transformers model inside."""
        return self.module.config

    @property
    def learning_rate(self) -> float:
        return self.optimizer.param_groups[0]["lr"]

    @property
    def loss_scale_can_fall(self) -> bool:
        """True while a dynamic fp16 loss scale is above its floor: an overflow may come from the scale only."""
        if not (self.deepspeed.fp16_enabled() and self.deepspeed.dynamic_loss_scale()):
            return False
        scaler = loss_scaler(self.optimizer)
        floor = getattr(scaler, "min_scale", None) or getattr(scaler, "min_loss_scale", None) or 1.0
        return scaler.cur_scale > floor

    @property
    def loss_scale(self) -> float:
        """The factor of gradients in fp16; 1 in other types."""
        return float(getattr(self.optimizer, "loss_scale", 1.0) or 1.0)

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Add the gradient of `loss` (a scalar) to the accumulated gradients.

        `last` ends the accumulation: gradients are then averaged over ranks.
        """
        self.deepspeed.set_gradient_accumulation_boundary(last)
        self.deepspeed.backward(loss, scale_wrt_gas=False)

    def gradient_norm(self) -> float:
        """Return the global L2 norm of the averaged gradients before clipping; inf if any of them is not finite.

        Call it after the last `backward` and before `step` or `discard`. A collective under ZeRO.
        """
        optimizer = self.optimizer
        if self.partitions_weights:
            norms = torch.stack([torch.as_tensor(norm) for norm in optimizer._get_norm_groups()]).cpu()
        elif self.partitions_optimizer and optimizer.cpu_offload:
            norms = torch.as_tensor(optimizer.scaled_global_norm()).reshape(1).cpu()
        elif self.partitions_optimizer:
            # DeepSpeed's own function launches a kernel and a copy for every parameter.
            rank_norms = tensor_norms([grad for group in optimizer.averaged_gradients.values() for grad in group or ()])
            norms = dist.sum_over_ranks(rank_norms.double().square().sum()).sqrt().float().reshape(1).cpu()
        else:
            norms = tensor_norms([p.grad for p in self.module.parameters() if p.grad is not None]).cpu()
        self._norms = norms
        if not torch.isfinite(norms).all() or (norms < 0).any():
            return float("inf")  # DeepSpeed writes -1 for a norm that is not finite
        return norms.double().norm().item() / self.loss_scale

    def set_rate(self, rate_factor: float) -> None:
        """Set the learning rates to `rate_factor` times their peaks."""
        for group, peak in zip(self.optimizer.param_groups, self._peak_rates, strict=True):
            group["lr"] = peak * rate_factor

    def step(self, rate_factor: float) -> None:
        """Clip, update the weights at `rate_factor` times the peak learning rates, and clear the gradients.

        `is_stepping` is True from here until `Counters.count_step`.
        """
        self.is_stepping = True
        self.set_rate(rate_factor)
        self.deepspeed.set_gradient_accumulation_boundary(True)
        with self._norm_reused():
            self.deepspeed.step()

    @contextmanager
    def _norm_reused(self) -> Iterator[None]:
        """Let DeepSpeed's step reuse the result of `gradient_norm`, without its check of overflow: the norm is finite.

        Otherwise the step reads all gradients two more times, and waits for the device before each group's update.
        """
        owner, norms, replaced = self.optimizer, self._norms, {}
        self._norms = None
        if norms is not None and self.partitions_weights:
            replaced = {"_get_norm_groups": lambda: list(norms), "check_overflow": lambda *_, **__: None}
        elif norms is not None and self.partitions_optimizer:
            replaced = {"scaled_global_norm": lambda: norms[0], "check_overflow": lambda *_, **__: None}
        elif norms is not None and hasattr(owner, "fp32_groups"):
            owner, replaced = owner.overflow_checker, {"check": lambda: False}  # it would wait at every parameter
        vars(owner).update(replaced)
        try:
            yield
        finally:
            for name in replaced:
                del vars(owner)[name]

    def discard(self) -> None:
        """Drop the gradients of this accumulation without a step, as DeepSpeed does after an overflow."""
        optimizer, self._norms = self.optimizer, None
        self.release_gathered()
        if not math.isfinite(self.last_gradient_norm) and hasattr(optimizer, "_update_scale"):
            optimizer._update_scale(True)  # fp16: lower the loss scale, or the next steps overflow too
        if self.partitions_weights:
            optimizer._overflow_clean_up(optimizer.loss_scale)
        elif self.partitions_optimizer:
            optimizer.zero_grad(set_to_none=True)
            optimizer.micro_step_id = deepspeed.runtime.zero.stage_1_and_2.INITIAL_MICRO_STEP_ID
            if optimizer.cpu_offload:
                optimizer.reset_cpu_buffers()
            for group in optimizer.averaged_gradients:
                optimizer.averaged_gradients[group] = None
                optimizer.all_grad_tensors[group] = None
        else:
            self.deepspeed.zero_grad()

    def drop_gradients(self) -> None:
        """Drop the gradients of an interrupted accumulation without changing the loss scale."""
        self.last_gradient_norm = 0.0
        self.deepspeed.set_gradient_accumulation_boundary(True)
        self.discard()

    def recover(self) -> None:
        """Restore the state before an accumulation in which a forward or backward pass of this engine failed."""
        get_accelerator().synchronize()  # other streams may be reading what is dropped here
        self.module.zero_grad(set_to_none=True)
        if self.partitions_optimizer:
            self._end_backward()
        if self.weights is not None:
            self.weights.release_all()
        self.drop_gradients()

    def _end_backward(self) -> None:
        """Clear ZeRO's buckets after a failed backward pass; DeepSpeed does so only at the end of a whole one."""
        optimizer = self.optimizer
        while optimizer._backward_active_depth:
            optimizer.exit_backward()
        for bucket in optimizer.ipg_buckets.values():
            (bucket.clear_params if self.partitions_weights else bucket.clear)()
        reduced = optimizer.params_already_reduced
        for parameter in reduced if self.partitions_weights else range(len(reduced)):
            reduced[parameter] = False
        if not self.partitions_weights:
            optimizer._release_ipg_buffers()
            optimizer.extra_large_param_to_reduce.clear()

    @contextmanager
    def generation(self, *, gather: bool = True) -> Iterator[None]:
        """Keep the weights whole and forward passes without collectives inside the context, for sampling.

        Under ZeRO-3 the weights are gathered once and DeepSpeed's hooks are removed. Then ranks may run different
        numbers of forward passes, with which the hooks would hang.

        Args:
            gather: False for a sampler that copies the weights itself and calls no module: nothing is gathered.
        """
        self.release_gathered()
        self.deepspeed.eval()
        try:
            if not gather or self.weights is None:
                yield
                return
            parameters = list(self.module.parameters())
            offload = self.optimizer.parameter_offload
            try:
                with gathered(parameters):
                    remove_hooks(offload, parameters)
                    yield
            finally:
                if not self.weights.once:
                    offload._register_deepspeed_module(offload.module)
        finally:
            self.deepspeed.train()


def loss_scaler(optimizer: Any) -> Any:
    """Return the loss scaler of DeepSpeed's optimizer; None if losses are not scaled."""
    return getattr(optimizer, "loss_scaler", None) or getattr(optimizer, "loss_scale_config", None)


def synchronise_on_device(optimizer: Any) -> None:
    """Let a DeepSpeed optimizer's streams, not the host, wait for reduced gradients after a backward pass.

    The host can then enqueue the next model's kernels; small ones take longer to enqueue than to run.
    """
    stream = getattr(optimizer, "reduce_and_partition_stream", None)  # ZeRO stage 3
    if stream is not None and torch.cuda.is_available():
        stream.synchronize = lambda: torch.cuda.current_stream().wait_stream(stream)
    stages_1_2 = hasattr(optimizer, "reduction_stream") and optimizer.contiguous_gradients
    if not stages_1_2 or not optimizer.overlap_comm or optimizer.cpu_offload:
        return
    epilogue = optimizer.independent_gradient_partition_epilogue

    def without_host_wait() -> None:
        optimizer.reduce_ipg_grads()
        torch.cuda.current_stream().wait_stream(optimizer.reduction_stream)
        optimizer.overlap_comm = False  # nothing is left to reduce, so the epilogue has nothing to wait for
        try:
            epilogue()
        finally:
            optimizer.overlap_comm = True

    optimizer.independent_gradient_partition_epilogue = without_host_wait
