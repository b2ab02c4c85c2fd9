#!/usr/bin/env bash
# Correctness on an accelerator first (replicas too, where there are several), then figures; under five minutes. `--cpu`: the same on the CPU, as a smoke check.
# Wants a python with torch (PYTHON, else the project's own, else python3); installs nothing. Results: $OUT or here.
set -euo pipefail
cd "$(dirname "$0")/.."
device=cuda; turns=40; updates=25
if [ "${1:-}" = "--cpu" ]; then device=cpu; turns=8; updates=5; fi
python=${PYTHON:-}
if [ -z "$python" ]; then
  python=python3
  if [ "$device" = cpu ] && [ -x .venv/bin/python ]; then python=.venv/bin/python; fi
fi
out=${OUT:-$(mktemp -d)}
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONUNBUFFERED=1

echo "== correct? ($device)"
"$python" benchmarks/correctness.py --device "$device"

ranks=2; turns_of_replicas=5
if [ "$device" = cuda ]; then
  ranks=$("$python" -c 'import torch; print(min(4, torch.cuda.device_count()))'); turns_of_replicas=20
fi
if [ "$ranks" -gt 1 ]; then
  echo "== correct on $ranks replicas? then an update there"
  "$python" -m torch.distributed.run --standalone --nproc-per-node "$ranks" benchmarks/replicas.py \
    --device "$device" --turns "$turns_of_replicas"
else
  echo "== replicas: skipped, there is one GPU"
fi

echo "== one update, a tiny model: the loop's own cost"
figure() { "$python" benchmarks/tiny_update.py --device "$device" --turns "$turns" --updates "$updates" "$@"; }
figure --precision bf16 --json "$out/tiny_bf16.json"
if [ "$device" = cuda ]; then
  figure --precision fp16 --json "$out/tiny_fp16.json"
  echo "== one update, 100 million parameters, A = 1: the passes over memory"
  turns=10 updates=5
  figure --precision bf16 --layers 24 --width 2048 --micro-batches 1 --examples 8 --json "$out/large_bf16.json"
  figure --precision fp16 --layers 24 --width 2048 --micro-batches 1 --examples 8 --json "$out/large_fp16.json"
fi
echo "figures as JSON: $out"
