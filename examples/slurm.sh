#!/bin/sh
#SBATCH --job-name=gpt
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
# Train on a cluster with SLURM, one task for each GPU:
#
#   sbatch examples/slurm.sh --config fineweb_edu
#
# 120 s before the time limit, and after a preemption, the run saves and the job is requeued. It
# continues from its newest checkpoint (--resume auto).
set -eu
[ $# -gt 0 ] || set -- --config quickstart
exec srun --kill-on-bad-exit=1 gpt-lightning fit --resume auto \
    --trainer.num_nodes "$SLURM_JOB_NUM_NODES" --trainer.devices "$SLURM_NTASKS_PER_NODE" "$@"
