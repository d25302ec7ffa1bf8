#!/bin/sh
# Train on several machines, or on one. Start this file on each machine with the same variables:
#
#   HOST=first-machine NNODES=2 sh examples/torchrun.sh --config fineweb_edu
#
# HOST      name or address of the first machine; the others must reach PORT on it
# NNODES    number of machines
# NPROC     processes on each machine; auto: one for each GPU, or one for each core without a GPU
# GPT_LIGHTNING_RENDEZVOUS_S  seconds to wait for the other machines (600); then the code is 75
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
export HOST="${HOST:-localhost}" PORT="${PORT:-29400}" NNODES="${NNODES:-1}"
# torchrun, with one line where machines are missing or a rank has failed
exec python -c '
import os, sys
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousTimeoutError
from torch.distributed.run import main
try:
    main()
except ChildFailedError as error:
    rank, failure = error.get_first_failure()
    print(f"rank {rank} has ended with exit code {failure.exitcode}", file=sys.stderr)
    sys.exit(max(failure.exitcode, 0) or 75)
except RendezvousTimeoutError:
    print("error: fewer machines than NNODES {NNODES} at {HOST}:{PORT}".format(**os.environ) +
          ": start them, or raise GPT_LIGHTNING_RENDEZVOUS_S", file=sys.stderr)
    sys.exit(75)
' --nnodes "$NNODES" --nproc_per_node "${NPROC:-auto}" \
    --max_restarts "${RESTARTS:-3}" --rdzv_backend c10d --rdzv_id "${RUN_ID:-gpt}" \
    --rdzv_endpoint "$HOST:$PORT" \
    --rdzv_conf "join_timeout=${GPT_LIGHTNING_RENDEZVOUS_S:-600}" \
    -m gpt_lightning fit --resume auto "$@"
