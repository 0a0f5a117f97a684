"""Command line of stage 3 by DPO: `python -m step3_dpo.main --model-name-or-path output/sft --data-path ...`."""

from pipeline.preparation.stage_entry import program_of
from step3_dpo.stage import STAGE

main = program_of(STAGE, __name__)
