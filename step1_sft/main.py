"""Command line of stage 1: `python -m step1_sft.main --model-name-or-path facebook/opt-1.3b --data-path ...`."""

from pipeline.preparation.stage_entry import program_of
from step1_sft.stage import STAGE

main = program_of(STAGE, __name__)
