"""The flags of `rlhf sample`."""

from typing import Self

from pydantic import model_validator

from pipeline.configuration.flag_table import flag
from pipeline.configuration.groups import Dtype
from pipeline.inference.answer_settings import SampleSettings
from pipeline.inference.sample_rows import RowLayout
from pipeline.rewards.functions import folder_and_weight
from pipeline.rewards.worker_flags import WorkerFlags


class SampleConfig(WorkerFlags):
    """Sample answers of a model: `rlhf sample output/sft --data prompts.jsonl -n 8 --output answers.jsonl`."""

    model: str = flag(
        "", "Folder (a merged model or a LoRA adapter) or hub id", kind="path", positional=True, required=True,
        aliases=("model_name_or_path",),
    )  # fmt: skip
    data: list[str] = flag(
        [],
        "Files, folders or hub ids with prompts, read as for training",
        kind="path",
        required=True,
        aliases=("data_path",),
    )
    column_map: str = flag("", "Column names in your data: prompt=question,chosen=best")
    max_prompt_seq_len: int = flag(
        0, "Most tokens of a prompt, longer ones are dropped; 0: what --max-new-tokens leaves", ge=0
    )
    output: str = flag(
        "",
        "File of JSON lines, which the same command resumes and all ranks of torchrun write to; none: standard output",
        kind="path",
    )
    overwrite: bool = flag(False, "Replace --output instead of resuming it")
    write_as: RowLayout = flag(
        "answers",
        "Content of a row; answers: all to a prompt; sft: the best one, for stage 1; pairs: the best and the worst, "
        "for stage 2 or DPO",
        aliases=("as",),
    )
    reward_function: list[str] = flag(
        [],
        "Functions that score answers, FILE.py:NAME or a built-in NAME; a :WEIGHT after it multiplies its scores",
        aliases=("reward",),
    )
    reward_model: list[str] = flag(
        [],
        "Reward models that score answers, folders or hub ids; a :WEIGHT after one multiplies its raw scores",
        aliases=("reward_model_name_or_path",),
    )
    batch_size: int = flag(16, "Prompts whose answers are sampled at once", ge=1)
    seed: int = flag(1234, "Seed of the answers; an answer does not depend on its batch", ge=0)
    dtype: Dtype = flag("auto", "Data type of the weights; auto: bf16 if the device supports it, else fp32")
    sampling: SampleSettings = SampleSettings(temperature=1.0)

    @model_validator(mode="after")
    def _answers_are_told_apart(self) -> Self:
        n, is_scored = self.sampling.n, bool(self.reward_function or self.reward_model)
        if self.write_as == "pairs" and (n == 1 or not is_scored):
            raise ValueError("--write-as pairs: needs --n of at least 2, and --reward-function or --reward-model")
        if self.write_as == "sft" and n > 1 and not is_scored:
            which = f"that tells the best of {n} answers"
            raise ValueError(f"--write-as sft: needs a --reward-function or --reward-model {which}")
        self.reward_models()
        return self

    def reward_models(self) -> list[tuple[str, float]]:
        """Return folder or hub id and weight of each reward model. Raises ValueError: see `folder_and_weight`."""
        return [folder_and_weight(entry, "--reward-model") for entry in self.reward_model]
