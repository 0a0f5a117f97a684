"""The flags of the teacher of `--method distill`."""

from typing import Literal

from pipeline.configuration.flag_table import flag
from pipeline.configuration.groups import Group


class TeacherConfig(Group):
    """Teacher"""

    teacher_model_name_or_path: str = flag(
        "",
        "distill: the model that the policy learns from, with the same tokenizer",
        kind="path",
        on_resume="model",
        aliases=("teacher_model",),
        needs="a teacher",
    )
    teacher_model_zero_stage: Literal["auto", "0", "1", "2", "3"] = flag(
        "auto",
        "ZeRO stage of the teacher: 3 partitions its weights, lower ones do not; auto: the actor's",
        on_resume="rounding",
        needs="a teacher",
    )
    teacher_model_quantization: Literal["auto", "none", "nf4", "int8"] = flag(
        "auto",
        "Store the teacher in 4 bits (nf4, bitsandbytes) or 8 (int8); auto: as the actor's",
        needs="a teacher",
    )
