"""The flags of stage 3, PPO, and the checks of generation that need no model."""

import math
from dataclasses import fields
from pathlib import Path
from typing import Literal, Self

from pydantic import model_validator

from pipeline.configuration.ds_config import Json, Placement, frozen_json, is_on_nvme, offloads, training_json
from pipeline.configuration.flag_table import flag
from pipeline.configuration.flags import Resolved
from pipeline.configuration.groups import DataConfig, DeepSpeedConfig, Group, ModelConfig, Offload, OptimizerConfig
from pipeline.configuration.run_flags import RunConfig
from pipeline.configuration.stage import StageConfig
from pipeline.errors import InputError, counted
from pipeline.generation.options import MAX_SAMPLES, BackendChoice, StopTexts, why_not_streamed
from pipeline.generation.rollout_size import RolloutSize
from pipeline.models.paths import read_adapter_config
from step3_ppo.models.roles import Role, all_roles, frozen_roles, trained_roles

LENGTH_FLAGS = "--max_prompt_seq_len + --max_answer_seq_len"  # the flags of `PPOConfig.max_sequence_length`


class PromptDataConfig(DataConfig):
    """Data"""

    max_prompt_seq_len: int = flag(256, "Tokens of a prompt", ge=1, other_tools="max_prompt_length")
    long_prompts: Literal["drop", "truncate_left"] = flag(
        "drop", "Prompts above max_prompt_seq_len: dropped, or cut on their left"
    )
    unsupervised_data_path: list[str] = flag(
        [],
        "Plain text for the ptx loss; empty: no ptx loss",
        kind="path",
        on_resume="data",
        aliases=("unsupervised_dataset_name",),
        refused={"unsupervised_dataset_config_name": "give --unsupervised_data_path a hub id or a file"},
    )
    unsup_coef: float = flag(27.8, "Weight of the ptx loss (InstructGPT, section 3.4)", ge=0)


class SamplingConfig(Group):
    """Rollout"""

    rollout_batch_size: int = flag(
        0,
        "Responses of a rollout over all GPUs (OpenRLHF's flag of this name counts prompts); 0: one optimizer step's",
        ge=0,
        on_resume="rounding",
        instead_of="generation_batches",
        refused={
            "per_device_mini_train_batch_size": "--per_device_train_batch_size is that of training here: use it, and "
            "--rollout_batch_size for rollouts"
        },
    )
    per_device_generation_batch_size: int = flag(
        16,
        "Prompts sampled at once on a device, up to a rollout's; given by hand without --rollout_batch_size, times "
        "--generation_batches the prompts of its rollout; auto: as many as have memory",
        ge=1,
        on_resume="rounding",
        auto=True,
        other_tools="generation_batch_size",
    )
    generation_batches: int = flag(
        0,
        "Batches of prompts sampled at once that make a device's rollout; 0: as --rollout_batch_size says",
        ge=0,
        on_resume="rounding",
        instead_of="rollout_batch_size",
        aliases=("generation_batch_numbers",),
    )
    num_samples_per_prompt: int = flag(
        1, "Responses sampled for each prompt", ge=1, le=MAX_SAMPLES, other_tools="num_generations rloo_k"
    )
    max_answer_seq_len: int = flag(
        256,
        "Tokens of a response, EOS included",
        ge=1,
        other_tools="max_new_tokens response_length max_completion_length",
    )
    temperature: float = flag(1.0, "Divides the logits of sampling and of every log-probability", gt=0)
    top_p: float = flag(1.0, "Sample from the most likely tokens of this total probability", gt=0, le=1)
    top_k: int = flag(0, "Sample from this many most likely tokens; 0: all", ge=0)
    stop_strings: StopTexts = flag(
        [], "Texts that end a response as an EOS does, with the token that completes one", other_tools="stop"
    )
    generation_engine: BackendChoice = flag(
        "auto",
        "Generation backend; auto: the fastest that knows the model and the device",
        on_resume="rounding",
        ignored=dict.fromkeys(("enable_hybrid_engine", "unpin_actor_parameters"), "the hybrid engine is always on"),
    )
    merge_lora_for_generation: bool = flag(
        True, "Sample from a copy of the weights plus adapters; false: with adapters apart", on_resume="rounding"
    )
    release_inference_cache: bool = flag(
        False,
        "Give the memory of generation (cache, graph, copied weights) back after each rollout; false: only where an "
        "update lacks memory beside it",
        on_resume="free",
    )
    rollout_weights: Literal["auto", "whole", "streamed"] = flag(
        "auto",
        "The actor under ZeRO-3 while it generates: whole on each GPU, or streamed: a few layers at a time; "
        "auto: whole where it fits",
        on_resume="rounding",
    )
    inference_tp_size: int = flag(1, "GPUs that share the actor's weights in a rollout", ge=1, on_resume="rounding")
    offload_optimizer_during_rollout: bool = flag(
        False, "Optimizer states are in host memory during a rollout; its cache is released after it", on_resume="free"
    )


class PPOCoefficients(Group):
    """PPO"""

    ppo_epochs: int = flag(1, "Passes over the rollouts of one update phase", ge=1, other_tools="num_ppo_epochs")
    policy_clip: float = flag(0.2, "Clip range of the probability ratio", gt=0, other_tools="cliprange")
    value_clip: float = flag(
        0.2, "Clip range of the new value around the old one; 0: no clip", ge=0, other_tools="cliprange_value"
    )
    gamma: float = flag(1.0, "Discount per token", ge=0, le=1)
    gae_lambda: float = flag(0.95, "Lambda of generalised advantage estimation", ge=0, le=1, other_tools="lam")
    whiten_advantages: bool = flag(
        True, "Advantages get mean 0 and variance 1 over all ranks", other_tools="whiten_rewards"
    )
    kl_coef: float = flag(
        0.1, "Weight of the KL penalty; the start value where it is adaptive", ge=0, other_tools="init_kl_coef beta"
    )
    kl_estimator: Literal["k1", "k2", "k3"] = flag("k1", "Estimator of the KL per token")
    kl_in_loss: bool = flag(False, "Put the KL into the policy loss (k2 or k3) instead of the reward")
    kl_target: float = flag(0.0, "Nats per sequence that an adaptive kl_coef aims at; 0: fixed", ge=0)
    kl_horizon: int = flag(10_000, "Sequences over which the adaptive kl_coef moves", ge=1)
    old_log_probs: Literal["auto", "trainer", "sampler"] = flag(
        "auto",
        "Whose log-probabilities the KL takes; sampler: no extra pass, one step per rollout; auto: the sampler's "
        "where that is so and its kernels sample as the trainer computes (learning report: within noise)",
    )
    approx_kl_stop: float = flag(0.0, "Skip the rest of an update phase above this KL; 0: never", ge=0)
    reward_clip: float = flag(5.0, "Normalised scores are cut to plus and minus this", gt=0)
    missing_eos_penalty: float = flag(1.0, "Subtracted from the reward of a response that did not end", ge=0)
    normalise_scores: bool = flag(True, "Use the mean and std of scores that stage 2 stored, else the first rollout's")
    critic_warmup_steps: int = flag(0, "First steps in which only the critic learns", ge=0)
    enable_ema: bool = flag(False, "Keep an exponential moving average of the actor (actor_ema/)")
    ema_decay: float = flag(0.992, "Decay of that average per optimizer step", ge=0, lt=1)

    @model_validator(mode="after")
    def _k1_has_no_gradient(self) -> Self:
        if self.kl_in_loss and self.kl_estimator == "k1":
            raise ValueError("kl_in_loss: k1 has no useful gradient as a loss; use --kl_estimator k2 or k3")
        return self


class PPOConfig(StageConfig):
    """Stage 3: PPO of an actor against a reward model."""

    actor: ModelConfig = ModelConfig(learning_rate=1e-6)
    critic: ModelConfig = ModelConfig(learning_rate=5e-6)
    reward_model_name_or_path: str = flag(
        "",
        "Reward model; empty: the folder the critic starts from",
        kind="path",
        on_resume="model",
        aliases=("reward_model",),
    )
    reward_model_zero_stage: Literal["auto", "0", "1", "2", "3"] = flag(
        "auto",
        "ZeRO stage of the reward model: 3 partitions its weights, others nothing; auto: the critic's",
        on_resume="rounding",
    )
    reward_model_quantization: Literal["auto", "none", "nf4", "int8"] = flag(
        "auto", "Reward weights in 4 bits (nf4, by bitsandbytes), 8 (int8) or none; auto: the critic's"
    )
    reward_model_attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2"] = flag(
        "auto", "Attention kernel of the reward model; auto: the critic's", on_resume="rounding"
    )
    reward_model_offload_weights: Offload = flag(
        "auto",
        "Where the reward weights are kept: none (on its device) or cpu (ZeRO stage 3); auto: as "
        "--offload_reward_model says",
        on_resume="rounding",
    )
    offload_reference_model: bool = flag(False, "Reference weights in host memory (ZeRO stage 3)", on_resume="rounding")
    offload_reward_model: bool = flag(False, "As --reward_model_offload_weights cpu", on_resume="rounding")
    data: PromptDataConfig = PromptDataConfig()
    sampling: SamplingConfig = SamplingConfig()
    ppo: PPOCoefficients = PPOCoefficients()
    optimizer: OptimizerConfig = OptimizerConfig(adam_eps=1e-5, min_learning_rate_ratio=0.1)
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    run: RunConfig = RunConfig(output_dir="output")

    @property
    def max_sequence_length(self) -> int:
        """Tokens of the longest prompt and response together."""
        return self.data.max_prompt_seq_len + self.sampling.max_answer_seq_len

    @property
    def reward_path(self) -> str:
        """The folder or hub id of the reward model."""
        return self.reward_model_name_or_path or self.critic.model_name_or_path

    def flags_of(self, role: Role) -> ModelConfig:
        """Return the flags of a model: its own, and those of the model that learns with which it shares the rest."""
        # Without the model that it shares its flags with, the actor's.
        shares = any(trained.flags == role.flags for trained in trained_roles())
        flags: ModelConfig = getattr(self, role.flags if shares else "actor")
        own = own_flags(self, role)
        return flags.model_validate({**flags.model_dump(), **own}) if own else flags

    def start_of(self, role: Role) -> str:
        """Return the folder or hub id that a model starts from."""
        path: str = getattr(self, role.path) if role.path else self.flags_of(role).model_name_or_path
        return path

    @property
    def held_roles(self) -> list[Role]:
        """The models that the run holds: those that learn, and those of the others that none of them serves as."""
        return [role for role in all_roles() if role.is_trained or not self._is_served(role)]

    def _is_served(self, role: Role) -> bool:
        """Tell whether switching the adapters of the trained model with the same flags gives this one."""
        twin = next((twin for twin in trained_roles() if twin.flags == role.flags), None)
        if twin is None or self.flags_of(twin) != self.flags_of(role):
            return False
        return self.holds_start(twin) and self.start_of(role) == self.start_of(twin)

    def holds_start(self, role: Role) -> bool:
        """Tell whether switching adapters gives the model that training began with, so that no second one is loaded.

        An adapter that goes on is copied for that, which ZeRO stage 3 has partitioned.
        """
        model = self.flags_of(role)
        is_copied = read_adapter_config(Path(model.model_name_or_path).expanduser()) is not None
        switches = bool(model.lora_dim) and self.deepspeed.only_optimize_lora
        return switches and not (is_copied and model.partitioned == "weights")

    @property
    def actor_accumulation(self) -> int:
        """Micro-batches of an optimizer step of the actor: twice as many with ptx text."""
        return self.optimizer.gradient_accumulation_steps * (2 if self.data.unsupervised_data_path else 1)

    def engine_jsons(self, origins: dict[str, str], placement: Placement) -> dict[str, Json]:
        """Return the DeepSpeed JSON of each engine by name. Raises InputError for settings that contradict."""
        check_generation(self, placement.ranks)
        resolved = Resolved(self, origins)
        jsons = {
            role.title: training_json(
                resolved,
                self.flags_of(role),
                placement,
                accumulation=self.actor_accumulation if role.name == "actor" else None,
            )
            for role in trained_roles()
        }
        if self.ppo.enable_ema and is_on_nvme(jsons["actor"], "offload_param"):
            raise InputError(
                "--enable_ema: the average is taken in memory, found the actor's weights on NVMe; give"
                " --actor_offload_weights cpu, or leave --enable_ema out"
            )
        return jsons | {
            role.title: frozen_json(
                self.deepspeed, self.flags_of(role), placement, offload=is_offloaded(self, role), role=role.name
            )
            for role in frozen_roles()
        }

    @model_validator(mode="after")
    def _no_dropout(self) -> Self:
        # The ratio of the first update must be 1: forward passes have to be the same each time.
        for role in trained_roles():
            if dropout := self.flags_of(role).lora_dropout:
                raise ValueError(f"{role.flags}_lora_dropout: found {dropout}; stage 3 has no dropout, wanted 0")
        return self

    @model_validator(mode="after")
    def _states_leave_the_device_once(self) -> Self:
        learning = [self.flags_of(role) for role in trained_roles()]
        always = [offloads(self.deepspeed, model)["offload_optimizer"] for model in learning]
        if self.sampling.offload_optimizer_during_rollout and all(always):
            raise ValueError("--offload_optimizer_during_rollout: with --offload the states never are on the device")
        return self

    @model_validator(mode="after")
    def _rollouts_of_a_device_divide(self) -> Self:
        if self.sampling.generation_batches and (fault := self.rollout_size(1).fault):
            raise ValueError(fault)
        return self

    def may_take_sampled_log_probs(self, dtype: str, ranks: int) -> bool:
        """Tell whether `--old_log_probs auto` is the sampler's, if the fused backend samples, in a dtype of weights.

        Not those of cut distributions, of adapters that are merged in 16 bits, and in fp32, where the pass that they
        save is not what takes time.
        """
        sampling, actor = self.sampling, self.actor
        merges = actor.lora_dim and actor.quantization == "none" and sampling.merge_lora_for_generation
        cuts = sampling.top_p < 1.0 or sampling.top_k
        return dtype != "fp32" and not merges and not cuts and self.rollout_size(ranks).steps == 1

    def rollout_size(self, ranks: int) -> RolloutSize:
        """Return the size of a rollout over all ranks; everything that counts its prompts or responses asks this."""
        values = self.sampling.model_dump() | self.optimizer.model_dump() | self.ppo.model_dump() | {"ranks": ranks}
        return RolloutSize(**{field.name: values[field.name] for field in fields(RolloutSize)})


def own_flags(config: PPOConfig, role: Role) -> dict[str, str]:
    """Return the flags that were given to this model alone, by the names of ModelConfig's fields."""
    if role.name != "reward":
        return {}
    offload = config.reward_model_offload_weights
    own = {
        "zero_stage": config.reward_model_zero_stage,
        "quantization": config.reward_model_quantization,
        "attn_implementation": config.reward_model_attn_implementation,
        "offload_weights": "cpu" if offload == "auto" and config.offload_reward_model else offload,
    }
    return {name: value for name, value in own.items() if value != "auto"}


def is_offloaded(config: PPOConfig, role: Role) -> bool:
    """Tell whether the weights of a model that is only read are to be in host memory."""
    if role.name == "reference":
        return config.offload_reference_model
    return own_flags(config, role).get("offload_weights") == "cpu"


def check_generation(config: PPOConfig, ranks: int | None) -> None:
    """Raise InputError, one line per flag, where no model could generate so; `ranks` None: not known yet."""
    sampling, partitioned = config.sampling, config.actor.partitioned == "weights"
    size, backend, errors = sampling.inference_tp_size, sampling.generation_engine, []
    if ranks is not None and ranks % size:
        divisor = math.gcd(size, ranks)
        errors.append(f"--inference_tp_size {size}: must divide the {counted(ranks, 'rank')}; give {divisor}")
    if size > 1 and backend not in ("auto", "fused"):
        errors.append(f"--inference_tp_size {size}: needs the fused backend, found {backend}")
    reason = why_not_streamed(partitioned=partitioned, ranks=ranks, tensor_parallel_size=size, backend=backend)
    if sampling.rollout_weights == "streamed" and reason:
        errors.append(f"--rollout_weights streamed: {reason}; else give auto")
    apart = config.actor.lora_dim and not sampling.merge_lora_for_generation
    if backend == "fused" and apart and config.actor.quantization == "none":
        errors.append(
            "--generation_engine fused: it takes no unmerged adapters (--merge_lora_for_generation false); use auto"
        )
    if backend == "fused" and config.actor.quantization == "nf4":
        errors.append("--generation_engine fused: it reads no 4-bit weights (--actor_quantization nf4); use auto")
    if errors:
        raise InputError("\n".join(errors))
