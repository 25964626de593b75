#!/usr/bin/env bash
# On a machine with a GPU: set up, run the tests that need it, measure the losses there.
# Usage: bash tools/gpu_check.sh [FOLDER]; the figures go to FOLDER (tools/results).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/setup.sh
setup_venv dev,bench
export PATH=$VENV/bin:$PATH
python -c 'import torch; assert torch.cuda.is_available(), "no GPU that PyTorch can use"'
python -m pytest -m gpu
python tools/bench_loss.py --device cuda --rows 8192 --keys 65536 --output "${1:-tools/results}/bench_loss_gpu.json"
