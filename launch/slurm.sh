#!/usr/bin/env bash
# A run under Slurm: one torchrun a node. Before the time limit the run writes a checkpoint and the job is queued again.
#
#   sbatch --nodes=4 launch/slurm.sh ds_configs/a100_4x8.json [arguments of launch/train.py]
#
# Submit from the project's folder, with the Python environment active. Options of sbatch override the lines below; on a
# run whose step and checkpoint take longer than two minutes, also --signal=B:USR1@SECONDS. From the environment:
#   RANKS_PER_NODE  default: the GPUs of a node
#   MASTER_PORT     default: one that depends on the job, so that two jobs can share a node
#SBATCH --job-name=dsclr
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%x-%j.log
set -euo pipefail

# The exit status of a run that wrote a checkpoint because a signal asked it to.
STOPPED=85

if [ $# -lt 1 ]; then
    echo "usage: sbatch [options of sbatch] launch/slurm.sh CONFIG.json [arguments of launch/train.py]" >&2
    exit 2
fi
config=$1
shift
ranks=${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-}}
if [ -z "$ranks" ]; then
    echo "error: Slurm gave this job no GPUs: ask for some (sbatch --gpus-per-node=8), or set RANKS_PER_NODE" >&2
    exit 2
fi
cd "$SLURM_SUBMIT_DIR"
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
master_addr=${hosts%%$'\n'*}
master_port=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}
# torchrun gives ranks that a SIGTERM meets (preemption) 30 seconds by default, which can be less than a step.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-120}

# Since Slurm 22.05 srun gives a task one core if it is not told so again.
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then
    export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
fi

# Slurm signals every process of a task: torchrun has to ignore the USR1 that is meant for the ranks.
# --wait: when a node has failed, the others would wait for it for ever.
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=120 \
    bash -c 'trap "" USR1; exec python launch/torchrun.py --node-rank "$SLURM_NODEID" "$@"' torchrun \
    --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$ranks" \
    --master-addr "$master_addr" --master-port "$master_port" \
    launch/train.py --deepspeed_config "$config" --resume auto "$@" &
step=$!
trap 'kill -USR1 "$step"' USR1
# A signal ends wait, not srun.
status=$((128 + $(kill -l USR1)))
while [ "$status" -eq $((128 + $(kill -l USR1))) ]; do
    status=0
    wait "$step" || status=$?
done
if [ "$status" -eq "$STOPPED" ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
