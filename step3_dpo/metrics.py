"""The metrics of stage 3 by DPO, IPO or KTO. An implicit reward is beta times the log-ratio of a response.

The log-ratio to the reference is summed over a response's tokens. With `--ipo-log-ratios mean` it is their mean.
"""

from pipeline.training.metrics import SUPERVISED, Metric

METRICS: dict[str, Metric] = SUPERVISED | {
    "accuracy": Metric(
        "share of pairs whose chosen response has the higher implicit reward; with KTO: share of responses whose "
        "log-ratio is above z0 if the label is true, below z0 if it is false; ties within rounding count half",
        "share",
        better=1,
        title="accuracy",
    ),
    "margin": Metric(
        "mean implicit reward of chosen minus that of rejected responses; per token with --ipo-log-ratios mean",
        "nats",
        better=1,
        title="margin of chosen over rejected",
    ),
    "mean_chosen_reward": Metric(
        "mean implicit reward of chosen responses, as in margin", better=0, title="reward of chosen"
    ),
    "mean_rejected_reward": Metric(
        "mean implicit reward of rejected responses, as in margin", better=0, title="reward of rejected"
    ),
    "kl": Metric(
        "mean of log pi - log pi_ref (k1) over the tokens of all responses; they come from the data, not the policy: "
        "below 0 if the policy makes them less likely than the reference does",
        better=0,
        title="KL to the reference on the data",
    ),
    "z0": Metric(
        "KTO: mean log-ratio of the step's prompts with the response of another row, at least 0",
        better=0,
        title="KL of mismatched responses",
    ),
}
# Metrics of the progress line.
SHOWN = ("loss", "eval_accuracy", "eval_margin", "grad_norm")
