#!/usr/bin/env bash
# Several machines over ssh and pdsh: bash launch/multi_node.sh --hostfile hosts 3 --actor_zero_stage 3 ...
# Each machine needs the same paths, the same environment and the output folder on shared storage. NCCL_* and PYTHON*
# variables are passed on by DeepSpeed; others go into a file .deepspeed_env, in this or the home folder.
exec bash "$(dirname -- "${BASH_SOURCE[0]}")/_run.sh" multi_node "$@"
