"""The size of a rollout: its prompts over all ranks, how many of them a rank samples at once, and its optimizer steps.

The module imports no torch.
"""

from dataclasses import dataclass
from math import gcd, lcm

from pipeline.errors import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSize:
    """The flags that decide the size of a rollout on a number of ranks, and what follows from them.

    ranks: ranks of the run.
    rollout_batch_size: responses over all ranks; 0: it follows from generation_batches, or else the optimizer step.
    per_device_generation_batch_size: prompts that a rank samples at once, at most.
    generation_batches: number of such batches in a rank's rollout; 0: rollout_batch_size gives the size.
    num_samples_per_prompt: responses to a prompt.
    per_device_train_batch_size: rows of a micro-batch on a rank.
    gradient_accumulation_steps: micro-batches of an optimizer step.
    ppo_epochs: passes over a rollout.
    old_log_probs: --old-log-probs; "sampler" allows only one optimizer step a rollout.
    """

    ranks: int
    rollout_batch_size: int
    per_device_generation_batch_size: int
    generation_batches: int
    num_samples_per_prompt: int
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    ppo_epochs: int
    old_log_probs: str

    @property
    def step_rows(self) -> int:
        """Responses of an optimizer step over all ranks."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * self.ranks

    @property
    def unit(self) -> int:
        """The smallest number of responses over all ranks that is whole prompts on each, and whole optimizer steps."""
        return lcm(self.step_rows, self.num_samples_per_prompt * self.ranks)

    @property
    def prompts(self) -> int:
        """Prompts of a rollout over all ranks."""
        if self.generation_batches:
            return self.per_device_generation_batch_size * self.generation_batches * self.ranks
        return (self.rollout_batch_size or self.unit) // self.num_samples_per_prompt

    @property
    def responses(self) -> int:
        """Responses of a rollout over all ranks."""
        return self.prompts * self.num_samples_per_prompt

    @property
    def at_once(self) -> int:
        """Prompts that a rank samples at once."""
        return min(self.per_device_generation_batch_size, max(1, self.prompts // self.ranks))

    @property
    def slots(self) -> int:
        """Responses that a rank samples at once."""
        return self.at_once * self.num_samples_per_prompt

    @property
    def steps(self) -> int:
        """Optimizer steps of a rollout, in all its epochs."""
        return self.responses // self.step_rows * self.ppo_epochs

    @property
    def product(self) -> str:
        """The flags, with their values, whose product is the prompts of a rank: those that DeepSpeed-Chat has."""
        batch = f"--per-device-generation-batch-size {self.per_device_generation_batch_size}"
        return f"{batch} x --generation-batches {self.generation_batches}"

    @property
    def line(self) -> str:
        """The arithmetic of a rollout in words; with --generation-batches, also the flag that replaces it."""
        samples, responses = counted(self.num_samples_per_prompt, "sample"), counted(self.responses, "response")
        said = f"{counted(self.prompts, 'prompt')} x {samples} = {responses} a rollout"
        product = f"; from {self.product} on each rank, which --rollout-batch-size {self.responses} can replace"
        at_once = f"; {counted(self.at_once, 'prompt')} at once on a rank"
        return said + at_once + (product if self.generation_batches else "")

    @property
    def fault(self) -> str:
        """Return a line on flags that contradict, or on a rollout that steps do not divide evenly; "" for neither."""
        given = f"--rollout-batch-size {self.rollout_batch_size}" if self.rollout_batch_size else ""
        if given and self.generation_batches:
            return f"--generation-batches {self.generation_batches}: with {given}; give one of them"
        if (self.rollout_batch_size or self.responses) % self.unit:
            return self._uneven() if given else self._uneven_batches()
        if self.old_log_probs != "sampler" or self.steps == 1:
            return ""
        # Later steps need the log-probabilities of the policy before the first one, from the trainer's own pass.
        rows = f"--rollout-batch-size {self.step_rows}" if given else "--gradient-accumulation-steps"
        return (
            f"--old-log-probs: sampler needs one optimizer step per rollout, got {self.steps}; use trainer, or set "
            f"--ppo-epochs 1 and {rows} to take all rows of a rollout in one step"
        )

    def _uneven(self) -> str:
        below = self.rollout_batch_size // self.unit * self.unit
        fitting = " or ".join(f"--rollout-batch-size {size}" for size in (below, below + self.unit) if size)
        return (
            f"--rollout-batch-size: got {self.rollout_batch_size}, expected a multiple of an optimizer step's "
            f"{counted(self.step_rows, 'row')} and of --num-samples-per-prompt {self.num_samples_per_prompt} x "
            f"{counted(self.ranks, 'rank')}; the nearest: {fitting}"
        )

    def _uneven_batches(self) -> str:
        batch, rows = self.per_device_generation_batch_size, self.responses // self.ranks
        per_step = self.step_rows // self.ranks
        unit = per_step // gcd(per_step, rows // batch)
        nearest = max(unit, round(batch / unit) * unit)
        whole = max(self.unit, round(self.responses / self.unit) * self.unit)
        return (
            f"--per-device-generation-batch-size: a rollout has {rows} rows a device ({self.product} x "
            f"--num-samples-per-prompt {self.num_samples_per_prompt}), no multiple of an optimizer step's {per_step}; "
            f"the nearest that fit are --per-device-generation-batch-size {nearest}, or --rollout-batch-size {whole} "
            "without --generation-batches"
        )
