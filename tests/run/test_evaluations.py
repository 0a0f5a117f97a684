"""Samples and numbers of the evaluation that they are of, which is not always the last one."""

import json

from pipeline.reporting.records import RunRecord
from pipeline.reporting.tables import changes
from pipeline.run.evaluations import samples


def test_the_samples_of_an_earlier_model_are_those_of_its_last_evaluation(tmp_path):
    """A checkpoint that is exported, or the best model that is kept, is older than the last evaluation."""
    rows = [{"step": step, "prompt": f"p{n}", "response": f"{step}-{n}"} for step in (0, 4, 8) for n in range(2)]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for step, found in ((8, 8), (7, 4), (4, 4), (3, 0)):
        assert [row["response"] for row in samples(tmp_path, step)] == [f"{found}-0", f"{found}-1"]


def test_a_number_has_the_rows_of_the_evaluation_that_it_is_of(tmp_path):
    lines = [{"step": 0, "eval_loss": 2.0, "eval_rows": 5.0}, {"step": 4, "eval_loss": 1.0, "eval_rows": 7.0},
             {"step": 8, "eval_bleu": 3.0, "eval_rows": 9.0}]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (found,) = changes(RunRecord(tmp_path, "sft"), ["eval_loss"])
    assert (found.first, found.last, found.num_rows) == (2.0, 1.0, 7.0)
