#!/bin/bash
# A job that may be preempted, and that runs for longer than its time limit:
#
#     sbatch --nodes 2 examples/slurm.sh 100000
#
# trains for 100,000 steps. Two minutes before its end, and when it is preempted, Slurm sends
# SIGTERM to the task of each node, which is torchrun. torchrun forwards it to its ranks. All ranks
# save after the same step and exit, and the job is requeued.
#SBATCH --job-name=elastic
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append

set -u
steps=${1:-100000}
folder=${CHECKPOINTS:-$HOME/run}
ranks=${SLURM_GPUS_ON_NODE:-2}
if [ -n "${SLURM_GPUS_ON_NODE:-}" ]; then device=cuda; else device=cpu; fi
host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

last_step() { # the last saved step; 0 if there is none
    [ -e "$folder/latest" ] || { echo 0; return; }
    sed 's/[^0-9]//g; s/^0*//' "$folder/latest"
}

before=$(last_step)
# Time to save: longer than torchrun's default for its ranks (30 s), shorter than Slurm's limit.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=100
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
srun --kill-on-bad-exit=0 torchrun \
    --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$ranks" --max-restarts 3 \
    --rdzv-backend c10d --rdzv-endpoint "$host:29500" \
    --rdzv-id "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" \
    examples/elastic.py --checkpoints "$folder" --steps "$steps" --device "$device"
status=$?
after=$(last_step)
if [ "$after" -ge "$steps" ]; then
    echo "done: $after steps"
elif [ "$after" -gt "$before" ]; then
    echo "stopped at step $after: again"
    scontrol requeue "$SLURM_JOB_ID"
else # do not retry without progress
    echo "failed at step $after, status $status" >&2
    exit 1
fi
