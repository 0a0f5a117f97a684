#!/usr/bin/env bash
# Several machines over ssh: bash launch/multi_node.sh --hostfile hosts 3 --actor-zero-stage 3 ...
# --launcher srun reaches them in another way; with --no-ssh --node-rank N it is started on each by hand.
# Each machine needs the same paths and the same environment. NCCL_* and PYTHON* variables are passed on; others go into
# a file .deepspeed_env, in this or the home folder. --check looks at all hosts and starts nothing.
exec bash "$(dirname -- "${BASH_SOURCE[0]}")/_run.sh" multi_node "$@"
