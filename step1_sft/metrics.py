"""The metrics of stage 1."""

from pipeline.training.metrics import SUPERVISED, Metric

METRICS: dict[str, Metric] = SUPERVISED | {
    "eval_perplexity": Metric("exp of eval_loss", "number", title="held-out perplexity"),
    "eval_bleu": Metric(
        "corpus BLEU (sacrebleu, default settings) of greedy answers to all held-out prompts, 0 to 100; references are "
        "the tokenised responses, decoded",
        "points",
        better=1,
    ),
    "eval_rougeL": Metric("mean ROUGE-L F-measure (rouge-score) of these answers, 0 to 1", "share", better=1),
}
# Metrics of the progress line.
SHOWN = ("loss", "eval_loss", "grad_norm", "tokens_per_s")
