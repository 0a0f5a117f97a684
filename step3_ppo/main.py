"""Command line of stage 3: `python -m step3_ppo.main --actor-model-name-or-path output/sft ...`."""

from pipeline.preparation.stage_entry import program_of
from step3_ppo.stage import STAGE

main = program_of(STAGE, __name__)
