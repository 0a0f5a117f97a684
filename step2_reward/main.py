"""Command line of stage 2: `python -m step2_reward.main --model-name-or-path facebook/opt-350m --data-path ...`."""

from pipeline.preparation.stage_entry import program_of
from step2_reward.stage import STAGE

main = program_of(STAGE, __name__)
