"""Export a run as a stock open_clip model, adapters merged: ``python tools/export.py --run runs/NAME --output FOLDER``.

``open_clip.create_model("local-dir:FOLDER")`` loads the result, without dsclr or peft.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from dsclr.config import ConfigError
from dsclr.eval.run import load_run, trained_weights
from dsclr.models import build_model, load_trained, save_model

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", required=True, type=Path, metavar="FOLDER", help="a finished run")
    parser.add_argument("--output", required=True, type=Path, metavar="FOLDER", help="where to write")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="fp32", help="of the weights in the file")
    options = parser.parse_args(arguments)
    try:
        if options.output.exists() and (not options.output.is_dir() or any(options.output.iterdir())):
            raise ConfigError(f"--output {options.output} holds something already: delete it or name another folder")
        folder, config = load_run(options.run)
        ours = config.dsclr
        torch.manual_seed(ours.run.seed)
        model = build_model(ours.model, ours.objective)
        load_trained(model, trained_weights(folder))
        save_model(model, options.output, dtype=DTYPES[options.dtype])
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{options.output}: load it with open_clip.create_model_and_transforms('local-dir:{options.output}')")
    return 0


if __name__ == "__main__":
    sys.exit(main())
