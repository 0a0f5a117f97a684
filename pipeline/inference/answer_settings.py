"""Sampling settings that `rlhf chat`, `compare` and `sample` share. It imports no torch, so that --help is quick."""

from typing import Self

from pydantic import model_validator

from pipeline.configuration.flag_table import flag
from pipeline.configuration.groups import Group
from pipeline.configuration.run_flags import OTHER_TRAINERS
from pipeline.generation.options import MAX_SAMPLES, StopTexts


class DrawSettings(Group):
    """Sampling"""

    max_new_tokens: int = flag(
        256, "Most tokens of an answer, its end token included", ge=1,
        other_tools="max_tokens max_completion_length max_length max_answer_seq_len",
        refused={
            "chat_template": OTHER_TRAINERS["chat_template"],
            "use_vllm": "omit it: this program samples answers; docs/guides/chat_and_serve.md shows vLLM",
        },
    )  # fmt: skip
    temperature: float = flag(0.0, "Divides the logits; 0: greedy, the most likely token each time", ge=0)
    top_p: float = flag(1.0, "Sample from the most likely tokens of this total probability", gt=0, le=1)
    top_k: int = flag(0, "Sample from this many most likely tokens; 0: all", ge=0)
    stop_strings: StopTexts = flag([], "Texts that end an answer, which includes them", other_tools="stop")


class ReplySettings(DrawSettings):
    """Sampling"""

    repetition_penalty: float = flag(1.0, "Divides the logits of tokens already seen; 1: none", gt=0)


class AnswerSettings(ReplySettings):
    """Sampling"""

    num_beams: int = flag(1, "Number of beams; 1: no beam search", ge=1)
    num_return_sequences: int = flag(1, "Answers to each prompt", ge=1, le=MAX_SAMPLES)

    @model_validator(mode="after")
    def _answers_can_differ(self) -> Self:
        if self.num_return_sequences > self.num_beams and (self.temperature == 0 or self.num_beams > 1):
            count = self.num_return_sequences
            other = "" if self.num_beams > 1 else " or a --temperature above 0"
            raise ValueError(f"--num-return-sequences: {count} answers need --num-beams of at least {count}{other}")
        return self


class SampleSettings(DrawSettings):
    """Sampling"""

    n: int = flag(
        1, "Answers to each prompt; also -n", ge=1, le=MAX_SAMPLES, aliases=("num_return_sequences",),
        other_tools="num_generations num_samples_per_prompt n_samples_per_prompt num_samples",
    )  # fmt: skip

    @model_validator(mode="after")
    def _answers_can_differ(self) -> Self:
        if self.n > 1 and self.temperature == 0:
            raise ValueError(f"--n: {self.n} greedy answers would be the same; give a --temperature above 0")
        return self
