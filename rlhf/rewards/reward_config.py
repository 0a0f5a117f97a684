"""The flags of `rlhf reward`."""

from typing import Self

from pydantic import model_validator

from pipeline.configuration.flag_table import flag
from pipeline.rewards.worker_flags import WorkerFlags

MAX_GROUP = 256  # responses to one prompt in a trial


class RewardTrialConfig(WorkerFlags):
    """Try reward functions on rows of a data set: `rlhf reward rewards.py:length --data prompts.jsonl`."""

    reward_function: list[str] = flag(
        [], "FILE.py:NAME or a built-in NAME; a :WEIGHT after it multiplies its scores", positional=True, required=True
    )
    data: str = flag("", "Hub id, file or folder, read as for training", kind="path", required=True)
    n: int = flag(0, "Number of rows to read; also -n; 0: 20, with --model 64 from all of the data", ge=0)
    completion: str = flag("", "A response to score for each row, in addition to its own", kind="text")
    num_samples_per_prompt: int = flag(
        8,
        "Responses per call, as in training: a row's repeated, or those of --model",
        ge=1,
        le=MAX_GROUP,
    )
    model: str = flag(
        "", "Folder or hub id of the model to train: it answers rows, and a verdict says if it can learn",
        kind="path", aliases=("actor_model", "model_name_or_path"),
    )  # fmt: skip
    max_answer_seq_len: int = flag(
        512,
        "With --model: most tokens of an answer, its end token included",
        ge=1,
        other_tools="max_completion_length max_new_tokens",
    )
    max_prompt_seq_len: int = flag(
        0,
        "With --model: most tokens of a prompt, longer ones are dropped as in training; 0: what --max-answer-seq-len "
        "leaves",
        ge=0,
    )
    output: str = flag(
        "", "With --model: the output folder of the run to come, whose report shows the trial; none: print", kind="path"
    )
    seed: int = flag(1234, "With --model: seed of its answers", ge=0)
    column_map: str = flag("", "Column names in your data: prompt=question,chosen=best")

    @model_validator(mode="after")
    def _flags_belong_to_the_mode(self) -> Self:
        if self.model and self.completion:
            raise ValueError("completion: got it with --model, whose answers are scored; give one of both")
        if self.model and self.num_samples_per_prompt < 2:
            raise ValueError("num_samples_per_prompt: got 1 with --model, which compares answers; expected 2 or more")
        names = ("max_answer_seq_len", "max_prompt_seq_len", "output", "seed")
        others = {name: type(self).model_fields[name].default for name in names}
        if not self.model and (given := [name for name, default in others.items() if getattr(self, name) != default]):
            raise ValueError(f"{given[0]}: got it without --model, which answers the rows; give both or neither")
        return self
