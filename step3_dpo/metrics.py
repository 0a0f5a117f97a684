"""The metrics of stage 3 by DPO or IPO; a response's implicit reward is beta times its log-ratio to the reference."""

from pipeline.training.metrics import SUPERVISED, Metric

METRICS: dict[str, Metric] = SUPERVISED | {
    "accuracy": Metric(
        "share of pairs whose chosen response has the higher implicit reward; ties count half",
        "share",
        better=1,
        title="accuracy on pairs",
    ),
    "margin": Metric(
        "mean of chosen minus rejected implicit reward", "nats", better=1, title="margin of chosen over rejected"
    ),
    "mean_chosen_reward": Metric("mean implicit reward of chosen responses", better=0, title="reward of chosen"),
    "mean_rejected_reward": Metric("mean implicit reward of rejected responses", better=0, title="reward of rejected"),
}
# Metrics of the progress line.
SHOWN = ("loss", "eval_accuracy", "eval_margin", "grad_norm")
