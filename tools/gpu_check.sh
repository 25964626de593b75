#!/usr/bin/env bash
# On a machine with a GPU and PyTorch, in under nine minutes: the tests that need a GPU, one step against a dense one, a
# short training, the planner, benchmarks of the step and of the losses. Without a GPU it says so and does nothing.
# Usage: bash tools/gpu_check.sh [FOLDER]; FOLDER (tools/results/gpu) gets gpu_check.json and gpu_check.md.
# What the machine lacks is installed into .venv-gpu beside its own PyTorch: from the folder wheelhouse (or $WHEELHOUSE)
# that tools/make_wheelhouse.sh fills on a machine with a network; where there is none, from a package index.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
output=${1:-tools/results/gpu}
wheelhouse=${WHEELHOUSE:-wheelhouse}
venv=.venv-gpu
work=runs/gpu_check
budget=525
SECONDS=0

python="" torch=""
for candidate in ${PYTHON:-} python3.12 python3 python; do
    if found=$("$candidate" -c 'import torch; print(torch.__version__, torch.cuda.is_available())' 2>/dev/null); then
        torch=${found% *}
        if [ "${found##* }" = True ]; then
            python=$candidate
            break
        fi
    fi
done
if [ -z "$python" ]; then
    if [ -n "$torch" ]; then
        echo "no GPU that PyTorch ($torch) can use: nothing to check"
    else
        echo "no Python with PyTorch found (name one: PYTHON=/path/to/python bash $0): nothing to check"
    fi
    exit 0
fi

failed=""
# stage NAME LIMIT COMMAND...: at most LIMIT seconds; a line in stages.tsv says how it went, the next one runs anyway.
stage() {
    local name=$1 limit=$2 started=$SECONDS status=0
    shift 2
    if [ "$limit" -gt $((budget - SECONDS)) ]; then limit=$((budget > SECONDS ? budget - SECONDS : 0)); fi
    echo "== $name: $* (at most $limit s)"
    if [ "$limit" -lt 10 ]; then
        status=skipped
    else
        timeout -k 5 "$limit" "$@" >"$work/$name.out" 2>"$work/$name.err" </dev/null || status=$?
    fi
    if [ "$status" != 0 ]; then
        failed=1
        tail -n 5 "$work/$name.out" "$work/$name.err" 2>/dev/null || true
    fi
    echo "   $([ "$status" = 0 ] && echo done || echo "FAILED ($status)") after $((SECONDS - started)) s"
    printf '%s\t%s\t%s\t%s\t%s\n' "$name" "$limit" "$((SECONDS - started))" "$status" "$*" >>"$work/stages.tsv"
    [ "$status" = 0 ]
}

# The machine's PyTorch may live in a virtual environment itself, whose folders a new one would not see: they are named
# to it. pip keeps what is there and fits.
install() {
    local site index=()
    rm -rf "$venv"
    "$python" -m venv --system-site-packages --without-pip "$venv"
    site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$python" -c 'import sys
for path in sys.path:
    if path.endswith(("site-packages", "dist-packages")):
        print(f"import site; site.addsitedir({path!r})")' >"$site/machine.pth"
    "$venv/bin/python" -m pip --version || "$venv/bin/python" -m ensurepip
    "$python" -c 'import importlib.metadata as metadata
for name in ("torch", "torchvision"):
    try:
        print(f"{name}=={metadata.version(name)}")
    except metadata.PackageNotFoundError:
        pass' >"$work/constraints.txt"
    if [ -d "$wheelhouse" ]; then index=(--no-index --find-links "$wheelhouse"); fi
    "$venv/bin/python" -m pip install --disable-pip-version-check -q --no-compile ${index[@]+"${index[@]}"} \
        -c "$work/constraints.txt" -e . pytest pytest-timeout hypothesis matplotlib
    echo "$wanted" >"$venv/.dsclr-installed"
}

rm -rf "$work"
mkdir -p "$work"
"$python" tools/gpu_check.py machine >"$work/machine.json"
export PATH=$PWD/$venv/bin:$PATH:$("$python" -c 'import os, sys; print(os.path.dirname(sys.executable))')
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0} HF_HUB_OFFLINE=1
wanted="$(cat pyproject.toml tools/gpu_check.sh | cksum) $python $torch $(ls "$wheelhouse" 2>/dev/null | cksum)"
export -f install
export python venv work wheelhouse wanted

if grep -qxF "$wanted" "$venv/.dsclr-installed" 2>/dev/null || stage install 150 bash -euo pipefail -c install; then
    run=(--deepspeed_config ds_configs/a100.json --set dsclr.model.pretrained=null)
    small=("${run[@]}" --set train_batch_size=512 --set train_micro_batch_size_per_gpu=128
        --set dsclr.run.max_steps=10 --set dsclr.run.epochs=null --set "dsclr.run.dir=$work" --set dsclr.run.name=train)
    memory=$(python -c 'import json, sys; print(json.load(open(sys.argv[1]))["memory_bytes"])' "$work/machine.json")
    stage tests 120 python -m pytest -m gpu -p no:cacheprovider || true
    stage verify 60 python launch/train.py "${small[@]}" --verify || true
    stage train 90 python -m deepspeed.launcher.runner launch/train.py "${small[@]}" || true
    rm -rf "$work/train/checkpoints"
    stage plan 60 python tools/plan.py "${run[@]}" --device-memory "$memory" --json "$work/plan.json" || true
    stage step 180 python tools/bench_step.py --device cuda --rows 2048 8192 65536 --micro 256 \
        --output "$work/step.json" || true
    # Every figure of memory is a process of its own, some seconds each.
    stage loss 170 python tools/bench_loss.py --device cuda --rows 8192 --keys 65536 --repeats 3 \
        --memory-rows 8192 65536 --growth-keys --output "$work/loss.json" || true
fi
"$python" tools/gpu_check.py collect --work "$work" --output "$output" --seconds "$SECONDS"
[ -z "$failed" ]
