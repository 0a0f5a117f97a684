"""The metrics of stage 3 by DPO, IPO or KTO; an implicit reward is beta times a log-ratio to the reference.

The log-ratio is a response's, summed over its tokens; of IPO with the log-ratios `mean` it is their mean.
"""

from pipeline.training.metrics import SUPERVISED, Metric

METRICS: dict[str, Metric] = SUPERVISED | {
    "accuracy": Metric(
        "share of pairs whose chosen response has the higher implicit reward; of KTO share of responses whose "
        "log-ratio is above z0 where the label is true, below it where it is false; ties within rounding count half",
        "share",
        better=1,
        title="accuracy",
    ),
    "margin": Metric(
        "mean implicit reward of chosen minus that of rejected responses; of ipo with ipo_log_ratios mean per token",
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
        "mean over the tokens of all responses of log pi - log pi_ref (k1); they are the data's, not the policy's: "
        "below 0 where the policy leaves them",
        better=0,
        title="KL to the reference on the data",
    ),
    "z0": Metric(
        "KTO: mean over the rows of the step of the log-ratio of another row's response, 0 where it is below",
        better=0,
        title="KL of mismatched responses",
    ),
}
# Metrics of the progress line.
SHOWN = ("loss", "eval_accuracy", "eval_margin", "grad_norm")
