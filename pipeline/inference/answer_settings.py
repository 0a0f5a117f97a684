"""How answers are chosen: the flags that chat.py and prompt_eval.py share. Imports no torch: --help is quick."""

from typing import Self

from pydantic import Field, model_validator

from pipeline.configuration.groups import Group


class ReplySettings(Group):
    """Sampling"""

    max_new_tokens: int = Field(256, ge=1, description="Tokens of an answer, its end token included")
    temperature: float = Field(0.0, ge=0, description="Divides the logits; 0: greedy, the most likely token each time")
    top_p: float = Field(1.0, gt=0, le=1, description="Sample from the most likely tokens of this total probability")
    top_k: int = Field(0, ge=0, description="Sample from this many most likely tokens; 0: all")
    repetition_penalty: float = Field(1.0, gt=0, description="Divides the logits of tokens already seen; 1: none")


class AnswerSettings(ReplySettings):
    """Sampling"""

    num_beams: int = Field(1, ge=1, description="Beams of beam search; 1: none")
    num_return_sequences: int = Field(1, ge=1, description="Answers to each prompt")

    @model_validator(mode="after")
    def _answers_can_differ(self) -> Self:
        if self.num_return_sequences > self.num_beams and (self.temperature == 0 or self.num_beams > 1):
            count = self.num_return_sequences
            other = "" if self.num_beams > 1 else " or a --temperature above 0"
            raise ValueError(f"--num_return_sequences: {count} answers need --num_beams of at least {count}{other}")
        return self
