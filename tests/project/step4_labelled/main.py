"""Command line of stage 4: `python -m step4_labelled.main --model-name-or-path output/sft ...`."""

from pipeline.preparation.stage_entry import program_of
from step4_labelled.stage import STAGE

main = program_of(STAGE, __name__)
