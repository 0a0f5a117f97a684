"""The flags of PPO and its other methods in stage 3."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Literal, Self

from pydantic import model_validator

from pipeline.configuration.ds_config import Json, Placement, frozen_json, is_on_nvme, offloads, training_json
from pipeline.configuration.flag_table import Layers, flag
from pipeline.configuration.groups import DeepSpeedConfig, ModelConfig, Offload, OptimizerConfig
from pipeline.configuration.origins import Origin
from pipeline.configuration.resolved import Resolved
from pipeline.configuration.rollout_size import RolloutSize
from pipeline.configuration.run_flags import RunConfig
from pipeline.configuration.stage import StageConfig
from pipeline.errors import InputError
from pipeline.models.paths import read_adapter_config
from pipeline.rewards.functions import RewardFunction, folder_and_weight, parse_reward_functions
from pipeline.rewards.tool_flags import ToolConfig, schemas_of
from step3_ppo.flags.generation import check_generation
from step3_ppo.flags.groups import DIVERGENCES, PPOCoefficients, PromptDataConfig, SamplingConfig
from step3_ppo.flags.methods import LORA_FACTOR, METHODS, PPO_LORA_FACTOR, Method, with_defaults
from step3_ppo.flags.rewards import RewardConfig
from step3_ppo.flags.teacher import TeacherConfig
from step3_ppo.flags.tools import reason_against
from step3_ppo.models.roles import COMPARED, ROLES, Role, roles_without

LENGTH_FLAGS = "--max-prompt-seq-len + --max-answer-seq-len"  # the flags of `PPOConfig.max_sequence_length`


class PPOConfig(StageConfig):
    """Stage 3: train an actor on rewards by PPO, or by another method without a critic."""

    usual = (
        "actor_model_name_or_path", "critic_model_name_or_path", "data_path", "output_dir", "max_prompt_seq_len",
        "max_answer_seq_len", "actor_learning_rate", "kl_coef", "actor_lora_dim", "dry_run",
    )  # fmt: skip
    examples = (
        "--actor-model output/sft --critic-model output/reward",
        "--config my.yaml --show-data 3",
        "--config my.yaml --kl-coef 0.05 --dry-run",
    )
    rows, shares, auto_flags = "prompts", (2,), ("old_log_probs", "off_policy_weights")
    probe_overrides = {"critic_warmup_steps": 0}
    actor: ModelConfig = ModelConfig(learning_rate=1e-6)
    critic: ModelConfig = ModelConfig(learning_rate=5e-6)
    reward_model_name_or_path: str = flag(
        "",
        "Reward model; empty: the model that the critic starts from",
        kind="path",
        on_resume="model",
        aliases=("reward_model",),
    )
    reward_model_zero_stage: Literal["auto", "0", "1", "2", "3"] = flag(
        "auto",
        "ZeRO stage of the reward model: 3 partitions its weights, lower ones do not; auto: the critic's",
        on_resume="rounding",
        needs="a reward model",
    )
    reward_model_quantization: Literal["auto", "none", "nf4", "int8"] = flag(
        "auto",
        "Store the reward model in 4 bits (nf4, bitsandbytes) or 8 (int8); auto: as the critic's",
        needs="a reward model",
    )
    reward_model_attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2"] = flag(
        "auto", "Attention kernel of the reward model; auto: the critic's", on_resume="rounding", needs="a reward model"
    )
    reward_model_offload_weights: Offload = flag(
        "auto",
        "Offload the reward model's weights to cpu (ZeRO stage 3), or none: they stay on the device; auto: as "
        "--offload-reward-model says",
        on_resume="rounding",
        needs="a reward model",
    )
    offload_reference_model: bool = flag(
        False,
        "Keep the weights of the reference, or of the teacher, in host memory (ZeRO stage 3)",
        on_resume="rounding",
        needs="--kl-coef or --log-kl",
    )
    offload_reward_model: bool = flag(
        False, "The same as --reward-model-offload-weights cpu", on_resume="rounding", needs="a reward model"
    )
    data: PromptDataConfig = PromptDataConfig()
    sampling: SamplingConfig = SamplingConfig()
    rewards: RewardConfig = RewardConfig()
    teacher: TeacherConfig = TeacherConfig()
    tools: ToolConfig = ToolConfig()
    ppo: PPOCoefficients = PPOCoefficients()
    optimizer: OptimizerConfig = OptimizerConfig(adam_eps=1e-5, min_learning_rate_ratio=0.1)
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    run: RunConfig = RunConfig(output_dir="output")

    @property
    def max_sequence_length(self) -> int:
        """The tokens of the longest prompt and the longest response together."""
        return self.data.max_prompt_seq_len + self.sampling.max_answer_seq_len

    @property
    def outputs(self) -> list[Path]:
        """The folders of the models that it writes: the actor's first."""
        names = [role.name for role in self.trained_roles] + (["actor_ema"] if self.ppo.enable_ema else [])
        return [Path(self.run.output_dir) / name for name in names]

    @property
    def lora_factor(self) -> float:
        """The factor of the method."""
        return PPO_LORA_FACTOR if self.method.has_critic else LORA_FACTOR

    @classmethod
    def with_method(cls, layers: Layers) -> Layers:
        """Add the defaults of the method as the weakest layer."""
        return with_defaults(layers)

    @property
    def models(self) -> Mapping[str, bool]:
        """The models that flags need; what a reference needs is said by flags."""
        return {f"a {role.title}": role in self.roles for role in ROLES if role.name != "reference"}

    @property
    def compares_in_updates(self) -> bool:
        """True if the updates alone run the teacher over a rollout, for its exact divergence in the loss."""
        return self.method.has_teacher and self.ppo.kl_estimator in DIVERGENCES

    @property
    def reward_functions(self) -> list[RewardFunction]:
        """The reward functions. Raises InputError for an entry that names none."""
        return parse_reward_functions(self.rewards.reward_function)

    @property
    def tool_schemas(self) -> str:
        """The JSON schemas of the tools, which prompts offer; "" without tools. Raises InputError: `Tools.check`."""
        return schemas_of(self.tools, self.rewards)

    @property
    def functions_by_title(self) -> dict[str, RewardFunction]:
        """The reward functions, the tools and the user's policy loss, as messages name them."""
        loss = {f"policy loss {one.name}": one for one in [self.ppo.loss_file] if one}
        return {f"reward function {one.name}": one for one in self.reward_functions} | self.tools.by_title | loss

    @property
    def has_reward_model(self) -> bool:
        """True if a reward model scores responses, as it does whenever nothing else can and no teacher is there."""
        others = self.rewards.reward_function or self.tools.environment or self.method.has_teacher
        return bool(self.reward_model_name_or_path or not others)

    @property
    def has_rewards(self) -> bool:
        """True if a reward model, a function or an environment scores responses; only distillation does without."""
        return bool(self.has_reward_model or self.rewards.reward_function or self.tools.environment)

    @property
    def method(self) -> Method:
        """The method that turns rewards into advantages."""
        return METHODS[self.ppo.method]

    @property
    def roles(self) -> tuple[Role, ...]:
        """The models that the run needs, the actor first."""
        taught = self.method.has_teacher
        there = {"critic": self.method.has_critic, "reference": self.ppo.has_reference and not taught}
        there |= {"teacher": taught, "reward": self.has_reward_model}
        absent = (name for name, is_there in there.items() if not is_there)
        return roles_without(*absent, num_further=len(self.rewards.more_reward_models))

    @property
    def trained_roles(self) -> list[Role]:
        """The models that learn, the actor first."""
        return [role for role in self.roles if role.is_trained]

    @property
    def reward_path(self) -> str:
        """The folder or hub id of the reward model."""
        return self.reward_model_name_or_path or self.critic.model_name_or_path

    @property
    def teacher_path(self) -> str:
        """The folder or hub id of the teacher."""
        return self.teacher.teacher_model_name_or_path

    def flags_of(self, role: Role) -> ModelConfig:
        """Return the flags of a model: its own, and else those of the trained model that it shares flags with."""
        # If the run has no such model, the flags of the actor.
        shares = any(trained.flags == role.flags for trained in self.trained_roles)
        flags: ModelConfig = getattr(self, role.flags if shares else "actor")
        overrides = own_flags(self, role)
        return flags.model_validate({**flags.model_dump(), **overrides}) if overrides else flags

    def start_of(self, role: Role) -> str:
        """Return the folder or hub id that a model starts from."""
        if role.number:
            return self._further_model(role)[0]
        path: str = getattr(self, role.path) if role.path else self.flags_of(role).model_name_or_path
        return path

    @property
    def start_paths(self) -> dict[str, str]:
        """The folders and hub ids of the models, without the reference, which is the start of the actor."""
        return {f"{role.name} model": self.start_of(role) for role in self.roles if role.name != "reference"}

    def weight_of(self, role: Role) -> float:
        """Return the weight of a reward model's score in the sum."""
        return self._further_model(role)[1] if role.number else self.rewards.reward_weight

    def _further_model(self, role: Role) -> tuple[str, float]:
        """Return the folder or hub id of a further reward model, and its weight."""
        return folder_and_weight(self.rewards.more_reward_models[role.number - 2], "--more-reward-models")

    def may_begin_head(self, role: Role) -> bool:
        """Return True for a critic that begins with a new head if its start has none: the run has no reward model."""
        return role.has_values and role.is_trained and not self.has_reward_model

    @property
    def held_roles(self) -> list[Role]:
        """The models in memory: the trained ones, and the others unless a trained one serves as them."""
        return [role for role in self.roles if role.is_trained or not self._is_served(role)]

    def _is_served(self, role: Role) -> bool:
        """Return True if the trained model with the same flags becomes this one by switching its adapters."""
        trained = next((trained for trained in self.trained_roles if trained.flags == role.flags), None)
        if role.number or trained is None or self.flags_of(trained) != self.flags_of(role):
            return False
        if role.name in COMPARED and self.ppo.divergence:  # whose pass stands between the actor's own
            return False
        return self.holds_start(trained) and self.start_of(role) == self.start_of(trained)

    def holds_start(self, role: Role) -> bool:
        """Return True if switching adapters gives the model that training began with, so that no second one is loaded.

        An adapter that training continues has to be copied for this, but ZeRO stage 3 has partitioned it.
        """
        model = self.flags_of(role)
        is_copied = read_adapter_config(Path(model.model_name_or_path).expanduser()) is not None
        switches = bool(model.lora_dim) and self.deepspeed.only_optimize_lora
        return switches and not (is_copied and model.partitioned == "weights")

    @property
    def actor_accumulation(self) -> int:
        """The micro-batches of an optimizer step of the actor, twice as many with ptx text."""
        return self.optimizer.gradient_accumulation_steps * (2 if self.data.unsupervised_data_path else 1)

    def engine_jsons(self, origins: dict[str, Origin], placement: Placement) -> dict[str, Json]:
        """Return the DeepSpeed JSON of each engine by name. Raises InputError for settings that contradict."""
        check_generation(self.sampling, self.actor, placement.ranks)
        jsons = {
            role.title: training_json(
                Resolved(self, origins),
                self.flags_of(role),
                placement,
                accumulation=self.actor_accumulation if role.name == "actor" else None,
            )
            for role in self.trained_roles
        }
        if self.ppo.enable_ema and is_on_nvme(jsons["actor"], "offload_param"):
            raise InputError(
                "--enable-ema: the average is taken in memory, got the actor's weights on NVMe; give"
                " --actor-offload-weights cpu, or leave --enable-ema out"
            )
        return jsons | {
            role.title: frozen_json(
                self.deepspeed, self.flags_of(role), placement, offload=is_offloaded(self, role), role=role.name
            )
            for role in self.roles
            if not role.is_trained  # even if a trained model with its adapters switched off serves as one
        }

    @model_validator(mode="after")
    def _critic_has_a_start(self) -> Self:
        if self.has_reward_model or self.critic.model_name_or_path:
            return self
        start = {"model_name_or_path": self.actor.model_name_or_path}
        return self.model_copy(update={"critic": self.critic.model_copy(update=start)})

    @model_validator(mode="after")
    def _something_rewards(self) -> Self:
        if self.method.has_teacher:
            if not self.teacher_path:
                raise ValueError("teacher_model_name_or_path: missing: the model that --method distill learns from")
            return self
        others = self.reward_functions or self.tools.environment_class
        if not (others or self.method.has_critic or self.reward_model_name_or_path):
            raise ValueError(
                "reward_model_name_or_path: missing: give it, --reward-function or --environment, for rewards"
            )
        return self

    @model_validator(mode="after")
    def _rewards_are_read(self) -> Self:
        if not self.method.has_teacher or self.has_rewards:
            return self
        if self.ppo.missing_eos_penalty and self.sampling.num_samples_per_prompt < 2:
            raise ValueError(
                "missing_eos_penalty: without other rewards it compares the responses to a prompt, got one; leave it "
                "out, or give --num-samples-per-prompt 2 or more"
            )
        if self.compares_in_updates and not self.ppo.missing_eos_penalty:
            names = {"policy_loss", "policy_clip", "policy_clip_high", "dual_clip", "policy_ratio"}
            if changed := self.ppo.model_dump(include=names, exclude_defaults=True):
                why = "without rewards the loss is the divergence from the teacher alone"
                raise ValueError(f"{next(iter(changed))}: {why}; leave it out")
        return self

    @model_validator(mode="after")
    def _responses_can_call_tools(self) -> Self:
        settings = (self.ppo.method, self.sampling, self.data, self.reward_functions)
        if self.tools.by_title and (reason := reason_against(self.tools, *settings)):
            raise ValueError(reason)
        return self

    @model_validator(mode="after")
    def _groups_can_be_compared(self) -> Self:
        compares = self.method.compares or (self.method.has_teacher and self.has_rewards)
        if self.sampling.num_samples_per_prompt < 2 and (compares or self.ppo.group_baseline):
            rule = "--group-baseline" if self.ppo.group_baseline else f"method {self.ppo.method}"
            raise ValueError(f"num_samples_per_prompt: got 1: {rule} compares responses to a prompt; give 2 or more")
        return self

    @model_validator(mode="after")
    def _no_dropout(self) -> Self:
        # The ratio of the first update must be 1, so two forward passes must be equal.
        for role in self.trained_roles:
            if dropout := self.flags_of(role).lora_dropout:
                raise ValueError(f"{role.flags}_lora_dropout: got {dropout}; stage 3 has no dropout, expected 0")
        return self

    @model_validator(mode="after")
    def _states_leave_the_device_once(self) -> Self:
        always = [offloads(self.deepspeed, self.flags_of(role))["offload_optimizer"] for role in self.trained_roles]
        if self.sampling.offload_optimizer_during_rollout and all(always):
            raise ValueError("--offload-optimizer-during-rollout: with --offload the states are never on the device")
        return self

    @model_validator(mode="after")
    def _rollouts_of_a_device_divide(self) -> Self:
        # With --train-batch-size the rows of an optimizer step depend on the ranks, see `with_ranks`.
        is_known = self.sampling.generation_batches and not self.optimizer.train_batch_size
        if is_known and (fault := self.rollout_size(1).fault):
            raise ValueError(fault)
        return self

    def may_take_sampled_log_probs(self, dtype: str, ranks: int) -> bool:
        """Return True if `--old-log-probs auto` may be the sampler's, provided that the fused backend samples.

        It may not with truncated distributions (top_p, top_k) or with adapters merged in 16 bits. Nor may it in fp32,
        where the pass that it saves takes little of the time.

        Args:
            dtype: dtype of the weights.
        """
        cuts = self.sampling.top_p < 1.0 or self.sampling.top_k
        return dtype != "fp32" and not self.merges_adapters and not cuts and self.rollout_size(ranks).steps == 1

    @property
    def merges_adapters(self) -> bool:
        """True if rollouts are sampled from weights with merged adapters, in the dtype of the weights."""
        merges = self.actor.quantization == "none" and self.sampling.merge_lora_for_generation
        return bool(self.actor.lora_dim) and merges

    def weights_off_policy(self, dtype: str) -> str:
        """Return the kind of `--off-policy-weights`, with `auto` resolved for a dtype of the weights."""
        if self.ppo.off_policy_weights != "auto":
            return self.ppo.off_policy_weights
        return "token_truncate" if self.merges_adapters and dtype != "fp32" else "none"

    def rollout_size(self, ranks: int) -> RolloutSize:
        """Return the size of a rollout over all ranks; all counts of its prompts and responses come from it."""
        values = self.sampling.model_dump() | self.optimizer.model_dump() | self.ppo.model_dump() | {"ranks": ranks}
        return RolloutSize(**{field.name: values[field.name] for field in fields(RolloutSize)})


def own_flags(config: PPOConfig, role: Role) -> dict[str, str]:
    """Return the flags that were given for this model alone, by the names of ModelConfig's fields."""
    given: dict[str, str] = {}
    if role.name == "teacher":
        stage, quantization = config.teacher.teacher_model_zero_stage, config.teacher.teacher_model_quantization
        given = {"zero_stage": stage, "quantization": quantization}
    elif role.is_reward_model:
        offload = config.reward_model_offload_weights
        given = {
            "zero_stage": config.reward_model_zero_stage,
            "quantization": config.reward_model_quantization,
            "attn_implementation": config.reward_model_attn_implementation,
            "offload_weights": "cpu" if offload == "auto" and config.offload_reward_model else offload,
        }
    return {name: value for name, value in given.items() if value != "auto"}


def is_offloaded(config: PPOConfig, role: Role) -> bool:
    """Return True if the weights of a model that is not trained stay in host memory."""
    if role.name in COMPARED:
        return config.offload_reference_model
    return own_flags(config, role).get("offload_weights") == "cpu"
