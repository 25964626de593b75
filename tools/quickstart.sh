#!/usr/bin/env bash
# Set up everything and run the main job on the embedded data: LoRA-adapt a small CLIP to another art style.
# Usage: bash tools/quickstart.sh [--set dsclr.run.name=NAME ...]; further arguments go to launch/train.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/setup.sh
echo "quickstart: about ten minutes on two CPU cores, half of them for installing"
setup_venv

name=quickstart
for argument in "$@"; do
    case $argument in dsclr.run.name=*) name=${argument#dsclr.run.name=} ;; esac
done
run=runs/$name
# The deepspeed launcher starts "python" from the PATH.
export PATH=$VENV/bin:$PATH
if [ -f "$run/adapter/adapter_model.safetensors" ]; then
    echo "$run is already trained; delete it to train again"
elif [ -n "$(find "$run/checkpoints" -maxdepth 1 -name 'step-????????' 2>/dev/null)" ]; then
    echo "continuing $run"
    deepspeed launch/train.py --deepspeed_config ds_configs/quickstart.json --resume "$@"
else
    if [ -e "$run" ]; then
        echo "$run stopped before its first checkpoint: starting over"
        rm -r "$run"
    fi
    deepspeed launch/train.py --deepspeed_config ds_configs/quickstart.json "$@"
fi

python launch/evaluate.py --run "$run"
cat <<TXT

The run folder is $run
  config.json     everything that made this run
  metrics.jsonl   one line a step; the same as curves: $VENV/bin/tensorboard --logdir $run
  eval.jsonl      held-out retrieval before, while and after training
  adapter/        the trained LoRA weights (peft format)
TXT
