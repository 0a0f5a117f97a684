"""The metrics of stage 3. Those of a rollout are in the line of its first optimizer step, those of updates in all."""

from collections.abc import Iterable
from dataclasses import replace

from pipeline.training.metrics import SHARED, Metric

METRICS: dict[str, Metric] = SHARED | {
    "objective/kl": Metric(
        "mean over sequences of the sum of log pi - log pi_ref (k1) over tokens; absent without a reference, like "
        "kl_k3 and kl_coef; at --kl-coef 0 only --log-kl true loads a reference",
        better=0,
        title="KL to the reference",
    ),
    "objective/kl_k3": Metric("the same by the k3 estimator", better=0),
    "objective/teacher_kl": Metric(
        "mean over sequences of the mean of log pi - log teacher over their tokens, with --method distill",
        better=-1,
        title="KL to the teacher",
    ),
    "objective/entropy": Metric("mean entropy of the policy per response token", better=0, title="entropy"),
    "objective/scores": Metric(
        "mean raw score; with several rewards their weighted sum; without any, minus objective/teacher_kl",
        "score",
        better=1,
        title="score",
    ),
    "objective/sampled_scores": Metric(
        "the same over all sampled responses, with --replace-equal-groups; objective/scores leaves out replaced ones",
        "score",
        better=1,
    ),
    "objective/score_clipfrac": Metric(
        "share of responses with a normalised score that --reward-clip clipped", "share"
    ),
    "objective/rlhf_reward": Metric(
        "mean over responses of the sum of their tokens' rewards: the score minus the penalty for a missing EOS, and "
        "minus that for the KL unless the loss has it",
        "score",
        better=1,
        title="total reward",
    ),
    "objective/kl_coef": Metric("weight of the KL penalty in this rollout", "number", better=0, title="KL coefficient"),
    "policy/ratio_mean": Metric("mean over response tokens of new over old probability", "number", "policy", better=0),
    "policy/ratio_max": Metric("largest of these ratios", "number", "policy", better=0),
    "policy/first_ratio_error": Metric(
        "largest |log ratio| before the first update of the rollout; 0 when nothing drifted; null where that update "
        "trained no policy (critic warm-up, no finite reward); with old_log_probs sampler: policy/sampler_error, as "
        "the ratio itself is 1 by construction",
        "nats",
        "policy",
    ),
    "policy/sampler_error": Metric("largest |trainer's - sampler's log-probability| of a token", "nats", "policy"),
    "policy/sampler_mean_error": Metric("mean of this over response tokens", "nats", "policy"),
    "policy/sampler_kl": Metric("KL(sampler || trainer) per token, by the k3 estimator", "nats", "policy"),
    "policy/effective_share": Metric(
        "effective sample size over the number of tokens, by the trainer's over the sampler's probability",
        "share",
        "policy",
        better=1,
    ),
    "policy/weights_cut": Metric(
        "share of tokens whose off-policy weight is capped or 0; absent with --old-log-probs sampler", "share", "policy"
    ),
    "policy/weights_rejected": Metric(
        "share of responses whose off-policy weights are all 0; absent with --old-log-probs sampler", "share", "policy"
    ),
    "policy/clipfrac": Metric(
        "share of tokens without a gradient of the policy loss, because their ratio is beyond the clip range or above "
        "--dual-clip (cispo: share of tokens with a ratio above --ratio-cap, which have a gradient); 0 in a rollout's "
        "first optimizer step",
        "share",
        "policy",
        better=0,
        title="clipped tokens",
    ),
    "policy/approx_kl": Metric(
        "estimate of KL(old || new) per token", "nats", "policy", better=0, title="KL of the update"
    ),
    "loss/policy": Metric(
        "policy loss in the mean of --loss-aggregation, times off-policy weights, without the other terms below",
        "number",
        better=0,
        title="policy loss",
    ),
    "loss/kl": Metric(
        "KL of the loss (--kl-in-loss), or another divergence of --kl-estimator, in the mean of --loss-aggregation, "
        "times --kl-coef",
        better=0,
        title="KL in the loss",
    ),
    "loss/entropy_bonus": Metric(
        "entropy that is subtracted from the loss, in the mean of --loss-aggregation, times --entropy-coef",
        better=0,
        title="entropy bonus",
    ),
    "loss/value": Metric("value loss per response token", "squared score", title="value loss"),
    "loss/ptx": Metric("language-model loss per token of the ptx text"),
    "value/clipfrac": Metric(
        "share of response tokens whose clipped value loss was larger", "share", "value", better=0
    ),
    "value/explained_variance": Metric(
        "1 - Var(returns - values) / Var(returns) over tokens",
        "number",
        "value",
        better=1,
        title="explained variance of the critic",
    ),
    "advantages/mean": Metric("mean of the advantages before whitening", "score", "value", better=0),
    "advantages/std": Metric("standard deviation of the advantages before whitening", "score", "value", better=0),
    "completions/mean_length": Metric(
        "mean response tokens, EOS included", "tokens", "completions", better=0, title="response length"
    ),
    "completions/truncated_fraction": Metric(
        "share of responses truncated at --max-answer-seq-len", "share", "completions", title="responses cut"
    ),
    "completions/eos_fraction": Metric(
        "share of responses that ended with an EOS or a stop string", "share", "completions", better=1
    ),
    "completions/empty_fraction": Metric(
        "share of responses that consist of an EOS or a stop string of one token", "share", "completions"
    ),
    "actor/grad_norm": Metric("L2 norm of the actor's gradient before clipping", "number", "optimizer", better=0),
    "critic/grad_norm": Metric("L2 norm of the critic's gradient before clipping", "number", "optimizer", better=0),
    "actor/learning_rate": Metric(
        "rate of the actor's first parameter group in this step", "number", "optimizer", better=0
    ),
    "critic/learning_rate": Metric(
        "rate of the critic's first parameter group in this step", "number", "optimizer", better=0
    ),
    "groups/equal": Metric(
        "share of the prompts whose responses all have the same reward, before the KL penalty", "share", "completions"
    ),
    "groups/further_prompts": Metric(
        "prompts that were sampled instead of these, with --replace-equal-groups", "number", "completions"
    ),
    "tools/turns": Metric("mean turns of a response, with tools", "number", "completions", better=0, title="turns"),
    "tools/calls": Metric(
        "mean calls of tools in a response", "number", "completions", better=0, title="calls of tools"
    ),
    "tools/failed_calls": Metric(
        "share of calls that were wrong, or whose tool raised an error", "share", "completions", title="failed calls"
    ),
    "tools/seconds": Metric("mean seconds of a response's calls", "s", "completions"),
    "tools/lost": Metric(
        "share of responses left out because a call took longer than --reward-timeout-s, or its process died",
        "share",
        "completions",
    ),
    "rows_masked": Metric(
        "responses left out because a call of a tool lost them, or their reward or values were not finite, or, with "
        "--replace-equal-groups, because all rewards of their prompt are equal",
        "rows",
        "progress",
    ),
    "time/generate_s": Metric("seconds of sampling", "s", "speed", title="sampling"),
    "time/score_s": Metric(
        "seconds of reference, reward, value and old log-probability passes, and of waiting for reward functions",
        "s",
        "speed",
        title="scoring",
    ),
    "time/train_s": Metric("seconds of the updates", "s", "speed", title="updates"),
    "generate_tokens_per_s": Metric("response tokens sampled per second, all ranks", "tokens/s", "speed", better=1),
    "memory/generate_gib": Metric("as memory/train_gib, while the rollout was sampled", "GiB", "memory"),
    "memory/score_gib": Metric("as memory/train_gib, while it was scored", "GiB", "memory"),
}


def of_rewards(names: Iterable[str]) -> dict[str, Metric]:
    """Return the metrics of the rewards of a run, by their names."""
    raw = "mean raw value of this reward, over the responses that it applies to"
    failed = "share of responses for which the calls of this reward function failed"
    passed = "share of held-out {0} whose value by this function is 1 or more"
    declared = {
        "reward": Metric(raw, "score", better=1, title="reward"),
        "reward_failures": Metric(failed, "share", "progress", title="failed calls of"),
        "pass_at_1": Metric(passed.format("responses"), "share", better=1, title="pass at 1 by"),
        "pass_at_k": Metric(passed.format("prompts with a response"), "share", better=1, title="pass at k by"),
    }
    kinds = [(name, kind, metric) for name in names for kind, metric in declared.items()]
    return {f"{kind}/{name}": replace(metric, title=f"{metric.title} {name}") for name, kind, metric in kinds}


# Metrics of the progress line.
SHOWN = (
    "objective/scores", "objective/kl", "objective/teacher_kl", "objective/entropy", "completions/mean_length",
    "loss/value",
)  # fmt: skip
