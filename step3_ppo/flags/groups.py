"""The groups of flags that only stage 3 has: prompts, rollouts, coefficients of its methods."""

from typing import Literal, Self

from pydantic import model_validator

from pipeline.configuration.flag_table import Removed, flag
from pipeline.configuration.groups import DataConfig, Group
from pipeline.errors import InputError, counted
from pipeline.generation.options import MAX_SAMPLES, BackendChoice, StopTexts
from pipeline.rewards.functions import RewardFunction, function_of_file
from step3_ppo.flags.methods import METHODS, MethodName

# The last commit with VAPO's pieces and the veto of off-policy responses.
LAST_WITH_VAPO = "f693daee"
GAINED_NOTHING = "it gained nothing when it was measured"
OVER_SAMPLE = Removed(0.0, "5029b7a4", "leave it out; where long responses were many it gained 1.18 times at most")
KL_STOP = Removed(0.0, "3ce830e6", "give fewer --ppo-epochs, or your own loss by --policy-loss FILE.py:NAME")
POLICY_LOSSES = ("clipped", "cispo")  # the built-in ones
CISPO = "--policy-loss cispo"
Estimator = Literal["k1", "k2", "k3"]
ESTIMATORS: tuple[Estimator, ...] = ("k1", "k2", "k3")
Divergence = Literal["reverse_kl", "forward_kl", "jsd"]
DIVERGENCES: tuple[Divergence, ...] = ("reverse_kl", "forward_kl", "jsd")


class PromptDataConfig(DataConfig):
    """Data"""

    max_prompt_seq_len: int = flag(256, "Most tokens of a prompt", ge=1, other_tools="max_prompt_length")
    long_prompts: Literal["drop", "truncate_left"] = flag(
        "drop", "Prompts above --max-prompt-seq-len: drop them, or truncate them on the left"
    )
    unsupervised_data_path: list[str] = flag(
        [],
        "Plain text for the ptx loss; empty: no ptx loss",
        kind="path",
        on_resume="data",
        aliases=("unsupervised_dataset_name",),
        refused={"unsupervised_dataset_config_name": "give --unsupervised-data-path a hub id or a file"},
    )
    unsup_coef: float = flag(
        27.8, "Weight of the ptx loss (InstructGPT, section 3.4)", ge=0, read_if="--unsupervised-data-path"
    )


class SamplingConfig(Group):
    """Rollout"""

    rollout_batch_size: int = flag(
        0,
        "Responses sampled before a policy update, over all GPUs (OpenRLHF counts prompts); 0: one optimizer step's",
        ge=0,
        on_resume="rounding",
        instead_of="generation_batches",
        other_tools="generation_batch_size",
        refused={
            "per_device_mini_train_batch_size": "--per-device-train-batch-size is that of training here: use it, and "
            "--rollout-batch-size for rollouts"
        },
    )
    per_device_generation_batch_size: int = flag(
        16,
        "Prompts that a device samples at once, at most those of its rollout; given without --rollout-batch-size, it "
        "sets the rollout too, see --generation-batches; auto: as many as fit into memory",
        ge=1,
        on_resume="rounding",
        auto=True,
    )
    generation_batches: int = flag(
        0,
        "Generation batches in a device's rollout; 0: --rollout-batch-size decides",
        ge=0,
        on_resume="rounding",
        instead_of="rollout_batch_size",
        aliases=("generation_batch_numbers",),
    )
    num_samples_per_prompt: int = flag(
        1,
        "Responses sampled for each prompt",
        ge=1,
        le=MAX_SAMPLES,
        other_tools="num_generations rloo_k",
        removed={"over_sample": OVER_SAMPLE},
    )
    max_answer_seq_len: int = flag(
        256,
        "Most tokens of a response, EOS included",
        ge=1,
        auto_is="256, or 512 where functions alone reward",
        other_tools="max_new_tokens response_length max_completion_length",
    )
    temperature: float = flag(1.0, "Divisor of the logits in sampling and in all log-probabilities", gt=0)
    top_p: float = flag(1.0, "Sample from the most likely tokens of this total probability", gt=0, le=1)
    top_k: int = flag(0, "Sample from this many most likely tokens; 0: all", ge=0)
    stop_strings: StopTexts = flag(
        [], "Texts that end a response as an EOS does; the token that completes one is its last", other_tools="stop"
    )
    generation_engine: BackendChoice = flag(
        "auto",
        "Generation backend; auto: the fastest that supports the model and the device",
        on_resume="rounding",
        ignored=dict.fromkeys(("enable_hybrid_engine", "unpin_actor_parameters"), "the hybrid engine is always on"),
    )
    merge_lora_for_generation: bool = flag(
        True, "Sample from weights with merged adapters; false: adapters stay separate", on_resume="rounding"
    )
    release_inference_cache: bool = flag(
        False,
        "Free the memory of generation (KV cache, graph, copied weights) after each rollout; false: only if an update "
        "runs out of memory; auto: if the plan predicts that",
        on_resume="free",
        auto=True,
    )
    rollout_weights: Literal["auto", "whole", "streamed"] = flag(
        "auto",
        "The actor's weights under ZeRO-3 during generation: whole on each GPU, or streamed a few layers at a time; "
        "auto: whole if they fit",
        on_resume="rounding",
    )
    inference_tp_size: int = flag(1, "Tensor-parallel size of rollouts, in GPUs", ge=1, on_resume="rounding")
    offload_optimizer_during_rollout: bool = flag(
        False, "Move optimizer states to host memory during a rollout; the KV cache is freed after it", on_resume="free"
    )


class PPOCoefficients(Group):
    """PPO"""

    method: MethodName = flag(
        "ppo",
        "How rewards become advantages: ppo trains a critic; grpo and rloo compare the responses to a prompt; "
        "reinforce_pp compares those of a batch; distill follows the log-probabilities of a teacher",
    )
    ppo_epochs: int = flag(
        1, "Passes over each rollout", ge=1, other_tools="num_ppo_epochs", removed={"approx_kl_stop": KL_STOP}
    )
    policy_loss: str = flag(
        "clipped",
        "PPO's clipped loss; cispo: each token has a gradient, weighted by its capped ratio; or FILE.py:NAME, a "
        "function of log-probabilities and advantages",
        kind="path",
    )
    policy_ratio: Literal["token", "sequence"] = flag(
        "token",
        "Probability ratio of each token, or its geometric mean over the response (GSPO; its paper has "
        "--loss-aggregation sequence_mean and --policy-clip about 3e-4)",
    )
    policy_clip: float = flag(
        0.2, "Clip range of the probability ratio", gt=0, excludes=CISPO, other_tools="cliprange epsilon"
    )
    policy_clip_high: float = flag(0.0, "Clip range above 1 (DAPO: 0.28); 0: as --policy-clip", ge=0, excludes=CISPO)
    dual_clip: float = flag(
        0.0, "Ratio (say 3) above which a token with negative advantage has no gradient; 0: none", ge=0, excludes=CISPO
    )
    ratio_cap: float = flag(5.0, "cispo: the largest probability ratio", ge=1, excludes="--policy-loss clipped")
    loss_aggregation: Literal["token_mean", "sequence_mean", "constant"] = flag(
        "token_mean",
        "Mean of the policy loss and its further terms: over tokens, over the means of responses, or constant: sums "
        "of responses divided by --max-answer-seq-len (Dr. GRPO)",
    )
    off_policy_weights: Literal[
        "auto", "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_mask"
    ] = flag(
        "auto",
        "Weight of the policy loss, not of its KL and entropy terms: trainer's probability over sampler's, of a token "
        "or a response (sequence). "
        "truncate: at most --off-policy-cap; mask: 0 outside --off-policy-low to the cap; geometric_mask: 1 or 0, by "
        "the geometric mean of a response; auto: token_truncate if adapters are merged in 16 bits, else none",
    )
    off_policy_cap: float = flag(2.0, "Largest off-policy weight", gt=0, excludes="--off-policy-weights none")
    off_policy_low: float = flag(
        0.5,
        "Smallest off-policy weight; lower weights become 0",
        ge=0,
        read_if="--off-policy-weights token_mask or sequence_mask or geometric_mask",
        removed={
            "off_policy_veto": Removed(0.0, LAST_WITH_VAPO, "--off-policy-weights geometric_mask drops responses")
        },
    )
    value_clip: float = flag(
        0.2,
        "Clip range of the new value around the old one; 0: no clip",
        ge=0,
        needs="a critic",
        other_tools="cliprange_value",
    )
    gamma: float = flag(1.0, "Discount per token", ge=0, le=1, excludes="--method grpo or rloo")
    gae_lambda: float = flag(
        0.95,
        "Lambda of generalised advantage estimation",
        ge=0,
        le=1,
        needs="a critic",
        other_tools="lam",
        removed={"lambda_alpha": Removed(0.0, LAST_WITH_VAPO, f"{GAINED_NOTHING}; --gae-lambda is one number")},
    )
    returns_lambda: float = flag(
        -1.0, "Lambda of the critic's target returns (VC-PPO: 1); -1: as --gae-lambda", ge=-1, le=1, needs="a critic"
    )
    whiten_advantages: bool = flag(
        True,
        "Normalise advantages to mean 0 and variance 1 over all ranks",
        refused={"whiten_rewards": "rewards are not whitened; --whiten-advantages is of advantages"},
    )
    scale_by_group: bool = flag(
        True, "Divide by the standard deviation of the prompt's rewards; false: not (Dr. GRPO)", read_if="--method grpo"
    )
    replace_equal_groups: bool = flag(
        False,
        "Replace prompts whose responses all have the same reward by the next ones, up to 3 times, then drop them "
        "(DAPO)",
        read_if="--method grpo or rloo",
        excludes="a reward model",
        other_tools="dynamic_sampling",
    )
    group_baseline: bool = flag(
        False, "First subtract the prompt's mean reward", read_if="--method ppo or reinforce_pp"
    )
    entropy_coef: float = flag(
        0.0,
        "Weight of the policy's entropy, which is subtracted from the loss; 0: none",
        ge=0,
        other_tools="entropy_loss_coef entropy_coeff",
        removed={
            "positive_nll_coef": Removed(
                0.0, LAST_WITH_VAPO, f"{GAINED_NOTHING}; --policy-loss FILE.py:NAME is your own"
            ),
            "positive_score": Removed(1.0, LAST_WITH_VAPO, "it belonged to --positive-nll-coef"),
        },
    )
    kl_coef: float = flag(
        0.1, "Weight of the KL penalty; its initial value with --kl-target", ge=0, other_tools="init_kl_coef beta"
    )
    log_kl: bool = flag(False, "Log objective/kl at --kl-coef 0 too, which loads the reference")
    kl_estimator: Literal["k1", "k2", "k3", "reverse_kl", "forward_kl", "jsd"] = flag(
        "k1",
        "Estimator of the KL per token. reverse_kl, forward_kl and jsd are exact, from the whole distributions: with "
        "--kl-in-loss alone",
    )
    kl_in_loss: bool = flag(False, "Put the KL into the policy loss instead of the reward; not k1")
    kl_target: float = flag(
        0.0,
        "KL in nats per sequence to which --kl-coef adapts; 0: it is fixed",
        ge=0,
        read_if="--kl-coef",
        excludes="a teacher",
    )
    kl_horizon: int = flag(
        10_000, "Sequences in which an adaptive --kl-coef changes by at most a fifth", ge=1, read_if="--kl-target"
    )
    old_log_probs: Literal["auto", "trainer", "sampler"] = flag(
        "auto",
        "Whose log-probabilities of the old policy are used; sampler: saves a pass, needs one step per rollout; auto: "
        "sampler if a rollout has one step and the sampler's kernels agree with the trainer's",
    )
    reward_clip: float = flag(
        5.0, "Clip a reward model's normalised scores to plus and minus this", gt=0, needs="a reward model"
    )
    missing_eos_penalty: float = flag(
        1.0,
        "Penalty on the reward of a response without EOS, in standard deviations of a reward model's scores",
        ge=0,
        auto_is="1, or 0 where functions alone reward",
    )
    normalise_scores: bool = flag(
        True,
        "Normalise scores by the mean and std that stage 2 stored, else the first rollout's",
        needs="a reward model",
    )
    critic_warmup_steps: int = flag(
        0,
        "First steps, which train only the critic; rollouts that begin in them use Monte-Carlo returns, lambda 1 "
        "(VC-PPO)",
        ge=0,
        needs="a critic",
    )
    enable_ema: bool = flag(False, "Save an exponential moving average of the actor too (actor_ema/)")
    ema_decay: float = flag(0.992, "Decay of that average per optimizer step", ge=0, lt=1, read_if="--enable-ema")

    @property
    def has_reference(self) -> bool:
        """True if the KL to the reference, or to a teacher in its place, has a weight or is logged."""
        return bool(self.kl_coef or self.log_kl)

    @property
    def divergence(self) -> Divergence | None:
        """The exact divergence of --kl-estimator; None for an estimate from the sampled tokens."""
        return next((name for name in DIVERGENCES if name == self.kl_estimator), None)

    @property
    def sampled_estimator(self) -> Estimator:
        """The estimator of the KL from sampled tokens; there is one wherever the KL is not an exact one in the loss."""
        return next(name for name in ESTIMATORS if name == self.kl_estimator)

    @property
    def loss_file(self) -> RewardFunction | None:
        """The function of the user that --policy-loss names, not yet imported; None if the loss is a built-in one.

        Raises InputError if the value names neither.
        """
        if self.policy_loss in POLICY_LOSSES:
            return None
        return function_of_file(self.policy_loss, "--policy-loss", POLICY_LOSSES)

    @property
    def weighs_off_policy(self) -> bool:
        """True if the policy loss has importance weights. A run resolves `auto` before it starts."""
        return self.off_policy_weights not in ("none", "auto")

    def check_steps(self, total: int) -> None:
        """Raise InputError if the critic's warm-up lasts as long as the run, `total` steps."""
        if self.critic_warmup_steps >= total:
            raise InputError(
                f"--critic-warmup-steps: got {self.critic_warmup_steps}, and the run has {counted(total, 'step')}: "
                "none would train the policy; give less, or more steps (--max-steps, --num-train-epochs)"
            )

    def at(self, step: int) -> Self:
        """Return the coefficients of a rollout at this step."""
        if step >= self.critic_warmup_steps:
            return self
        return self.model_copy(update={"returns_lambda": 1.0})  # Monte-Carlo returns, not the critic's own guesses

    @model_validator(mode="after")
    def _numbers_fit(self) -> Self:
        if 0 < self.dual_clip <= 1:
            raise ValueError(f"dual_clip: got {self.dual_clip:g}, expected a ratio above 1, as 3, or 0 for none")
        if -1 < self.returns_lambda < 0:
            raise ValueError(f"returns_lambda: got {self.returns_lambda:g}, expected 0 to 1, or -1 for --gae-lambda")
        if self.off_policy_weights.endswith("_mask") and self.off_policy_low > self.off_policy_cap:
            weights = f"got {self.off_policy_low:g}, above --off-policy-cap {self.off_policy_cap:g}"
            raise ValueError(f"off_policy_low: {weights}: each weight would be 0; give less")
        _ = self.loss_file  # which refuses a text that names no loss
        return self

    @model_validator(mode="after")
    def _teaches(self) -> Self:
        if not METHODS[self.method].has_teacher:
            return self
        if not self.kl_coef:
            raise ValueError(
                "kl_coef: got 0, the weight of what --method distill learns from; give 1, or another method"
            )
        if self.kl_in_loss and self.gamma:
            raise ValueError("gamma: with the KL in the loss a token has no reward of the teacher; leave it out")
        if not self.kl_in_loss and self.kl_estimator in ("k2", "k3"):
            why = "whose mean is no reward that leads to the teacher"
            raise ValueError(f"kl_estimator: got {self.kl_estimator} in the reward, {why}; give k1, or leave it out")
        return self

    @model_validator(mode="after")
    def _k1_has_no_gradient(self) -> Self:
        if self.kl_in_loss and self.kl_estimator == "k1":
            why = "which has no useful gradient as a loss (--kl-in-loss, which method grpo sets)"
            raise ValueError(f"kl_estimator: got k1, {why}; use k2 or k3, or --kl-in-loss false")
        if self.divergence and not self.kl_in_loss:
            raise ValueError(f"kl_estimator: got {self.divergence}, a term of the loss; give --kl-in-loss true too")
        if self.divergence and not self.kl_coef:
            raise ValueError(f"kl_estimator: got {self.divergence} at --kl-coef 0, its weight; give --kl-coef too")
        return self
