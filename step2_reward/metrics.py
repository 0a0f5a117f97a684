"""The metrics of stage 2."""

from pipeline.training.metrics import SUPERVISED, Metric

METRICS: dict[str, Metric] = SUPERVISED | {
    "accuracy": Metric(
        "share of pairs whose chosen response scores higher; ties count half",
        "share",
        better=1,
        title="accuracy on pairs",
    ),
    "margin": Metric("mean of chosen minus rejected score", "score", better=1, title="margin of chosen over rejected"),
    "mean_chosen_score": Metric("mean raw score of chosen responses", "score", better=0),
    "mean_rejected_score": Metric("mean raw score of rejected responses", "score", better=0),
}
# Metrics of the progress line.
SHOWN = ("loss", "eval_accuracy", "eval_margin", "grad_norm")
