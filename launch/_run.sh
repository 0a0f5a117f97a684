#!/usr/bin/env bash
# _run.sh DEPLOYMENT [deepspeed launcher flags] STEP [stage flags]: becomes the supervisor of one stage's launcher.
# Works from any folder: relative paths in the flags are those of the caller.
set -euo pipefail

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
deployment="$1"
shift
usage="usage: bash launch/$deployment.sh [deepspeed launcher flags] STEP [stage flags]
  STEP: 1 (SFT), 2 (reward model), 3 (PPO); stage flags: bash launch/$deployment.sh STEP --help"

fail() {
    printf 'error: %s\n%s\n' "$1" "$usage" >&2
    exit 2
}

has_gpu() {
    [[ ${DS_ACCELERATOR:-} != cpu ]] || return 1
    [[ -e /dev/nvidiactl || -e /dev/kfd ]] || { command -v nvidia-smi && nvidia-smi -L; } >/dev/null 2>&1
}

# --- the launcher's flags end at STEP, which is the first word that is neither a flag nor a flag's value -----------
launcher=() num_gpus="" chosen="" port="" step="" backend=ssh
while (($#)); do
    word="$1"
    shift
    case "$word" in
        1 | 2 | 3) step="$word" && break ;;
        --no_ssh | --check) backend=ssh && launcher+=("$word") && continue ;;
        --module | --no_python | --no_local_rank | --no_ssh_check | --force_multi | --save_pid | \
            --bind_cores_to_rank | -q | --quiet)
            launcher+=("$word")
            continue
            ;;
        --*=*) name="${word%%=*}" value="${word#*=}" ;;
        -*)
            (($#)) || fail "$word: found no value"
            name="$word" value="$1"
            shift
            ;;
        *) fail "STEP: found '$word', wanted 1, 2 or 3" ;;
    esac
    case "$name" in
        --num_gpus | --num_accelerators) num_gpus="$value" && continue ;;
        --include | -i | --exclude | -e) chosen=yes ;;
        --master_port)
            [[ $value =~ ^[0-9]{1,5}$ ]] && ((10#$value <= 65535)) || fail "$name: found '$value', wanted 0 to 65535"
            port="$value"
            ;;
        --launcher) backend="${value,,}" && continue ;;
        --hostfile | -H | --num_nodes | --node_rank | --master_addr | --launcher_args | --ssh_port | --venv_script | \
            --bind_core_list | --enable_each_rank_log | --log_level) ;;
        --autotuning) [[ $value == tune || $value == run ]] || fail "$name: found '$value', wanted tune or run" ;;
        *) fail "$name: not a flag of the launcher; those of the stage follow STEP" ;;
    esac
    launcher+=("$name" "$value")
done
for word in "$@"; do
    case "${word%%=*}" in
        --num_gpus | --num_accelerators | --num_nodes | --include | --exclude | --hostfile | --master_port | \
            --master_addr | --node_rank | --launcher | --no_ssh)
            fail "$word: found behind STEP, wanted before it with the other flags of the launcher"
            ;;
    esac
done
case "$step" in
    1) module=step1_sft.main ;;
    2) module=step2_reward.main ;;
    3) module=step3_ppo.main ;;
    *) fail "STEP: found none, wanted 1, 2 or 3" ;;
esac

[[ " ssh srun pdsh openmpi mpich impi slurm mvapich " == *" $backend "* ]] ||
    fail "--launcher: found '$backend', wanted ssh, srun, pdsh or another one of DeepSpeed's"
# The program by which DeepSpeed looks for each of its launchers, as in deepspeed/launcher/multinode_runner.py.
case "$backend" in
    openmpi) needed=ompi_info ;;
    mpich | impi) needed=mpirun ;;
    mvapich) needed=mpiname ;;
    slurm) needed=sinfo ;;
    *) needed="$backend" ;;
esac
if [[ $backend != ssh && $backend != srun && $deployment == multi_node ]] && ! command -v "$needed" >/dev/null; then
    echo "error: --launcher $backend: $needed is not installed on this machine; install its package, or leave it out for ssh" >&2
    exit 3
fi
[[ $num_gpus =~ ^([1-9][0-9]*)?$ ]] || fail "--num_gpus: found '$num_gpus', wanted a number from 1 on"

# --- the Python of the environment ----------------------------------------------------------------------------------
PYTHON="${PYTHON:-$(command -v python || command -v python3)}"
if ! "$PYTHON" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("deepspeed") is None)'; then
    echo "error: deepspeed is not installed for $PYTHON; activate the environment of the project (README.md, Install)" >&2
    exit 3
fi
if [[ -e $root/pyproject.toml ]]; then
    # A checkout; an installed project is found without this.
    export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
fi
# `python -m` must not take a folder of the caller's that is called pipeline or launch for ours.
export PYTHONSAFEPATH=1
# Libraries announce what will change in their next version; nobody who runs a stage can act on it.
export PYTHONWARNINGS="${PYTHONWARNINGS:-ignore::FutureWarning}"

for word in "$@"; do
    # Help needs no ranks.
    [[ $word != --help && $word != -h ]] || exec "$PYTHON" -m "$module" --help
done

# --- devices --------------------------------------------------------------------------------------------------------
[[ $deployment != single_gpu || -n $num_gpus$chosen ]] || num_gpus=1
if [[ $deployment != multi_node ]]; then
    # A host file at the launcher's default place would turn this into a run on several machines.
    launcher=(--hostfile /dev/null ${launcher[@]+"${launcher[@]}"})
    [[ -n $port ]] || launcher+=(--master_port "$("$PYTHON" -c \
        'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')")
    if ! has_gpu; then
        export DS_ACCELERATOR="${DS_ACCELERATOR:-cpu}"
        # The devices are processes then, one if no number says more (DeepSpeed would take one for each NUMA node).
        # They share the cores, and no GPU number hides them.
        [[ -n $num_gpus$chosen ]] || num_gpus=1
        ranks="${num_gpus:-1}"
        export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((ranks < $(nproc) ? $(nproc) / ranks : 1))}"
        unset CUDA_VISIBLE_DEVICES
    elif [[ -n $num_gpus && -n ${CUDA_VISIBLE_DEVICES:-} ]]; then
        # The launcher takes GPUs 0 to N-1 for --num_gpus N, whatever CUDA_VISIBLE_DEVICES says.
        launcher+=(--include "localhost:$(cut -d, -f"1-$num_gpus" <<<"$CUDA_VISIBLE_DEVICES")")
        num_gpus=""
    fi
fi
[[ -z $num_gpus ]] || launcher+=(--num_gpus "$num_gpus")

# The supervisor reads the flags as they are; the launcher's may be quoted below.
supervisor=(-m pipeline.launching.supervisor "$module" "$#" "$@")

# --- several machines: pdsh hands the words to a shell, and DeepSpeed quotes only those with a space ------------------
if [[ $deployment == multi_node && $backend == pdsh ]]; then
    words=()
    for word in "$@"; do
        if [[ $word == *" "* ]]; then
            # DeepSpeed puts "..." around it and a backslash before each " in it.
            words+=("$(sed 's/[\\$`]/\\&/g' <<<"$word")")
        else
            words+=("$(printf %q "$word")")
        fi
    done
    # Quoted words are right for pdsh only: with a single host the launcher would not use it.
    [[ ${words[*]} == "$*" ]] || launcher+=(--force_multi)
    set -- ${words[@]+"${words[@]}"}
fi

# The rank comes from the environment, so the stage gets exactly these flags.
# Of DeepSpeed's own words only exceptions are printed: the supervisor says what became of the ranks.
program=(deepspeed.launcher.runner --log_level critical)
if [[ $deployment == multi_node ]]; then
    # ssh and srun are ours: DeepSpeed has no plain ssh, and its slurm knows no --include for parts of a host.
    [[ $backend != ssh && $backend != srun ]] || program=(pipeline.launching.host_launcher)
    launcher=(--launcher "$backend" ${launcher[@]+"${launcher[@]}"})
fi
exec "$PYTHON" "${supervisor[@]}" "$PYTHON" -m "${program[@]}" \
    ${launcher[@]+"${launcher[@]}"} --no_local_rank --module "$module" "$@"
