"""Flags of step 3."""

import math
from typing import Literal, Self

from pydantic import Field, model_validator

from pipeline.configuration.groups import DataConfig, DeepSpeedConfig, Group, ModelConfig, OptimizerConfig, RunConfig
from pipeline.errors import InputError
from pipeline.generation.options import why_not_streamed


class PromptDataConfig(DataConfig):
    """Data"""

    max_prompt_seq_len: int = Field(256, ge=1, description="Tokens of a prompt")
    long_prompts: Literal["drop", "truncate_left"] = Field(
        "drop", description="Prompts above max_prompt_seq_len: dropped, or cut on their left"
    )
    unsupervised_data_path: list[str] = Field([], description="Plain text for the ptx loss; empty: no ptx loss")
    unsup_coef: float = Field(27.8, ge=0, description="Weight of the ptx loss (InstructGPT, section 3.4)")


class PPOOptimizerConfig(OptimizerConfig):
    """Optimizer"""

    adam_eps: float = Field(1e-5, gt=0, description="AdamW epsilon")
    min_learning_rate_ratio: float = Field(0.1, ge=0, le=1, description="Floor of the rate as a share of its peak")


class SamplingConfig(Group):
    """Rollout"""

    per_device_generation_batch_size: int = Field(16, ge=1, description="Prompts generated at once on one device")
    generation_batches: int = Field(1, ge=1, description="Generation batches per update phase")
    num_samples_per_prompt: int = Field(1, ge=1, description="Responses sampled for each prompt")
    max_answer_seq_len: int = Field(256, ge=1, description="Tokens of a response, EOS included")
    temperature: float = Field(1.0, gt=0, description="Divides the logits of sampling and of every log-probability")
    top_p: float = Field(1.0, gt=0, le=1, description="Sample from the most likely tokens of this total probability")
    top_k: int = Field(0, ge=0, description="Sample from this many most likely tokens; 0: all")
    generation_engine: Literal["auto", "fused", "static", "eager"] = Field(
        "auto", description="How responses are made; auto: the fastest that knows the model and the device"
    )
    merge_lora_for_generation: bool = Field(
        True, description="Sample from a copy of the weights with the adapters added; false: base and adapters apart"
    )
    release_inference_cache: bool = Field(
        False, description="Give the memory of generation (cache, graph, copied weights) back after each rollout"
    )
    rollout_weights: Literal["auto", "whole", "streamed"] = Field(
        "auto",
        description="The actor under ZeRO-3 while it generates: whole on each GPU, or streamed: layers come in turn; "
        "auto: whole where it fits",
    )
    inference_tp_size: int = Field(1, ge=1, description="GPUs that share the actor's weights while they generate")
    offload_optimizer_during_rollout: bool = Field(
        False, description="Optimizer states wait in host memory during a rollout, whose cache is given back after it"
    )


class PPOCoefficients(Group):
    """PPO"""

    ppo_epochs: int = Field(1, ge=1, description="Passes over the rollouts of one update phase")
    policy_clip: float = Field(0.2, gt=0, description="Clip range of the probability ratio")
    value_clip: float = Field(0.2, ge=0, description="Clip range of the new value around the old one; 0: no clip")
    gamma: float = Field(1.0, ge=0, le=1, description="Discount per token")
    gae_lambda: float = Field(0.95, ge=0, le=1, description="Lambda of generalised advantage estimation")
    whiten_advantages: bool = Field(True, description="Advantages get mean 0 and variance 1 over all ranks")
    kl_coef: float = Field(0.1, ge=0, description="Weight of the KL penalty; the start value where it is adaptive")
    kl_estimator: Literal["k1", "k2", "k3"] = Field("k1", description="Estimator of the KL per token")
    kl_in_loss: bool = Field(False, description="Put the KL into the policy loss (k2 or k3) instead of the reward")
    kl_target: float = Field(0.0, ge=0, description="Nats per sequence that an adaptive kl_coef aims at; 0: fixed")
    kl_horizon: int = Field(10_000, ge=1, description="Sequences over which the adaptive kl_coef moves")
    old_log_probs: Literal["trainer", "sampler"] = Field(
        "trainer", description="Whose log-probabilities the KL takes; sampler: no extra pass, one step per rollout"
    )
    approx_kl_stop: float = Field(0.0, ge=0, description="Skip the rest of an update phase above this KL; 0: never")
    reward_clip: float = Field(5.0, gt=0, description="Normalised scores are cut to plus and minus this")
    missing_eos_penalty: float = Field(1.0, ge=0, description="Subtracted from the reward of a response without EOS")
    normalise_scores: bool = Field(True, description="Use the mean and std of scores stored by step 2")
    critic_warmup_steps: int = Field(0, ge=0, description="First steps in which only the critic learns")
    enable_ema: bool = Field(False, description="Keep an exponential moving average of the actor (actor_ema/)")
    ema_decay: float = Field(0.992, ge=0, lt=1, description="Decay of that average per optimizer step")

    @model_validator(mode="after")
    def _k1_has_no_gradient(self) -> Self:
        if self.kl_in_loss and self.kl_estimator == "k1":
            raise ValueError("kl_in_loss: k1 has no useful gradient as a loss; use --kl_estimator k2 or k3")
        return self


class PPOConfig(Group):
    """Step 3: PPO of an actor against a reward model."""

    actor: ModelConfig = ModelConfig(learning_rate=1e-6)
    critic: ModelConfig = ModelConfig(learning_rate=5e-6)
    reward_model_name_or_path: str = Field("", description="Reward model; empty: the folder the critic starts from")
    offload_reference_model: bool = Field(False, description="Keep the reference weights in host memory (stage 3)")
    offload_reward_model: bool = Field(False, description="Keep the reward weights in host memory (stage 3)")
    data: PromptDataConfig = PromptDataConfig()
    sampling: SamplingConfig = SamplingConfig()
    ppo: PPOCoefficients = PPOCoefficients()
    optimizer: PPOOptimizerConfig = PPOOptimizerConfig()
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    run: RunConfig = RunConfig(output_dir="output")

    @model_validator(mode="after")
    def _no_dropout(self) -> Self:
        # The ratio of the first update must be 1: forward passes have to be the same each time.
        for name, model in (("actor", self.actor), ("critic", self.critic)):
            if model.lora_dropout:
                raise ValueError(f"{name}_lora_dropout: found {model.lora_dropout}; step 3 has no dropout, wanted 0")
        return self

    @model_validator(mode="after")
    def _states_leave_the_device_once(self) -> Self:
        if self.sampling.offload_optimizer_during_rollout and self.deepspeed.offload:
            raise ValueError("--offload_optimizer_during_rollout: with --offload the states never are on the device")
        return self

    @model_validator(mode="after")
    def _rollouts_divide_into_steps(self) -> Self:
        sampling, optimizer = self.sampling, self.optimizer
        batch = sampling.per_device_generation_batch_size
        rows = batch * sampling.generation_batches * sampling.num_samples_per_prompt
        per_step = optimizer.per_device_train_batch_size * optimizer.gradient_accumulation_steps
        if rows % per_step:
            fitting = per_step // math.gcd(per_step, rows) * batch
            raise ValueError(
                f"--per_device_generation_batch_size: a rollout has {rows} rows a device ({batch} prompts x "
                f"{sampling.generation_batches} generation batches x {sampling.num_samples_per_prompt} samples), an "
                f"optimizer step {per_step} (per_device_train_batch_size x gradient_accumulation_steps); rows must be "
                f"a multiple of it: --per_device_generation_batch_size {fitting} is one"
            )
        return self

    @model_validator(mode="after")
    def _sampler_log_probs_serve_one_step(self) -> Self:
        sampling, optimizer = self.sampling, self.optimizer
        prompts = sampling.per_device_generation_batch_size * sampling.generation_batches
        per_step = optimizer.per_device_train_batch_size * optimizer.gradient_accumulation_steps
        steps = prompts * sampling.num_samples_per_prompt // per_step * self.ppo.ppo_epochs
        if self.ppo.old_log_probs == "sampler" and steps != 1:
            # Later steps need the log-probabilities of the policy before the first one, from the trainer's own pass.
            raise ValueError(
                f"--old_log_probs: sampler needs one optimizer step per rollout, found {steps}; use trainer, or set "
                f"--ppo_epochs 1 and --gradient_accumulation_steps to take all rows of a rollout in one step"
            )
        return self


def check_generation(config: PPOConfig, ranks: int | None) -> None:
    """Raise InputError, a line each, for what generation cannot do with any model; `ranks` None: not known yet."""
    sampling, stage = config.sampling, config.actor.zero_stage
    size, rung, errors = sampling.inference_tp_size, sampling.generation_engine, []
    if ranks is not None and ranks % size:
        errors.append(f"--inference_tp_size {size}: must divide the {ranks} ranks")
    if size > 1 and rung not in ("auto", "fused"):
        errors.append(f"--inference_tp_size {size}: needs the fused rung, found {rung}")
    reason = why_not_streamed(zero_stage=stage, ranks=ranks, group_size=size, rung=rung)
    if sampling.rollout_weights == "streamed" and reason:
        errors.append(f"--rollout_weights streamed: {reason}; else give auto")
    if rung == "fused" and config.actor.lora_dim and not sampling.merge_lora_for_generation:
        errors.append(
            "--generation_engine fused: it knows no adapters beside the weights (--merge_lora_for_generation false); "
            "use auto"
        )
    if errors:
        raise InputError("\n".join(errors))
