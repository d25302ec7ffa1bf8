#!/bin/sh
# Train on several machines, or on one. Start this file on each machine with the same variables:
#
#   HOST=first-machine NNODES=2 sh examples/torchrun.sh --config fineweb_edu
#
# HOST      name or address of the first machine; the others must reach PORT on it
# NNODES    number of machines
# NPROC     processes on each machine; auto: one for each GPU, or one for each core without a GPU
# RESTARTS  number of times that torchrun starts all processes again after a failure
#
# The settings are read once before, so that a wrong one ends the script. Errors that only the ranks
# can find, such as missing data, are repeated by each restart: try the command with RESTARTS=0.
# A run that fails, or is started again, continues from its newest checkpoint (--resume auto). The
# machines must see the same folder lightning_logs, or set --checkpoint.folder.
set -eu
[ $# -gt 0 ] || set -- --config quickstart
# Ranks that start again would read the old ranks' addresses in the agents' store, and hang.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
python -m gpt_lightning fit "$@" --print_config > /dev/null
exec torchrun --nnodes "${NNODES:-1}" --nproc_per_node "${NPROC:-auto}" \
    --max_restarts "${RESTARTS:-3}" --rdzv_backend c10d --rdzv_id "${RUN_ID:-gpt}" \
    --rdzv_endpoint "${HOST:-localhost}:${PORT:-29400}" \
    -m gpt_lightning fit --resume auto "$@"
