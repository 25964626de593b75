"""One optimizer step of the engine, and the same step in plain PyTorch."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor

from dsclr.config import Config
from dsclr.data import Batch
from dsclr.models import build_model, enable_activation_checkpointing
from dsclr.negatives import build_bank
from dsclr.retention import Retention
from dsclr.train import runtime
from dsclr.train.engine import build_engine, engine_config, parameter_groups
from dsclr.train.masters import master_value
from dsclr.train.step import ContrastiveStep, build_step
from tests.oracle import dense_loss

ROWS = 12
LR = 0.5
LORA = {"rank": 3, "alpha": 6}


def model_file(folder: Path, context_length: int = 12, vocab_size: int = 50) -> str:
    path = folder / f"dsclr-test-model-{vocab_size}.json"
    # Whole or not at all: another rank may read it while this one writes.
    written = folder / f"{path.name}.{os.getpid()}"
    written.write_text(
        json.dumps(
            {
                "embed_dim": 16,
                "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "head_width": 8, "patch_size": 8},
                "text_cfg": {
                    "context_length": context_length,
                    "vocab_size": vocab_size,
                    "width": 32,
                    "heads": 4,
                    "layers": 2,
                },
            }
        )
    )
    os.replace(written, path)
    return str(path)


def make_config(folder: Path, model: dict[str, Any] | None = None, **changes: Any) -> Config:
    """A run of one step; SGD, so that an update is the learning rate times the gradient.

    Args:
        model: keys of dsclr.model.
        changes: top-level keys; those of dsclr under "dsclr".
    """
    ours = {
        "run": {"max_steps": 1},
        "loss": {"name": "topk", "k": 5, "block_size": 4},
        "model": {"name": model_file(folder), **(model or {})},
        **changes.pop("dsclr", {}),
    }
    return Config(
        {
            "train_batch_size": ROWS,
            "optimizer": {"type": "SGD", "params": {"lr": LR}},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": 2},
            "tensorboard": {"enabled": False},
            "dsclr": ours,
            **changes,
        }
    )


def make_batch(objective: str = "clip", rows: int = ROWS) -> Batch:
    generator = torch.Generator().manual_seed(11)
    images = torch.randint(0, 256, (rows, 3, 32, 32), generator=generator, dtype=torch.uint8)
    if objective == "clip":
        b = torch.randint(1, 49, (rows, 12), generator=generator)
        b[:, -1] = 49  # the largest id is where the text tower reads
    else:
        b = torch.randint(0, 256, (rows, 3, 32, 32), generator=generator, dtype=torch.uint8)
    ids = torch.arange(rows)
    ids[rows // 2] = 0
    return Batch(images, b, ids)


def make_model(config: Config):
    torch.manual_seed(1)
    model = build_model(config.dsclr.model, config.dsclr.objective)
    # Fresh adapters have B = 0, for which half of the gradients are zero.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    return model.train()


def named(model: Any, values: Any) -> dict[str, Tensor]:
    return {name: values(p).double() for name, p in model.named_parameters() if p.requires_grad}


def engine_step(
    world: runtime.Runtime,
    config: Config,
    batch: Batch,
    steps: int = 1,
    max_scale: float = 100.0,
    prepare: Callable[[ContrastiveStep], None] = lambda step: None,
) -> dict[str, Any]:
    """Weights before and after, as the optimizer keeps them, the loss, the metrics, and the next random number.

    Args:
        prepare: called with the step before the first.
    """
    config = config.with_world_size(world.world_size)
    model = make_model(config)
    enable_activation_checkpointing(model, config.raw)
    engine = build_engine(model, engine_config(config, 1, "", world.device))
    before = named(model, master_value)
    bank = build_bank(config.dsclr.negatives.bank, world.world_size, config.dsclr.negatives.across_ranks)
    retention = Retention(config.dsclr.step.retain, world.device)
    step = build_step(config, engine, world.device, bank, retention)
    step.max_logit_scale = max_scale
    prepare(step)
    rows = len(batch.ids) // world.world_size
    own = slice(world.rank * rows, (world.rank + 1) * rows)
    torch.manual_seed(2)
    result = None
    for number in range(steps):
        # Other ids at every step: a bank's rows would otherwise be the rows themselves, which are no negatives.
        result = step(Batch(batch.a[own], batch.b[own], batch.ids[own] + 1000 * number), number)
    assert result is not None
    after = named(model, master_value)
    module = {name: p.detach().double() for name, p in model.named_parameters() if p.requires_grad}
    return {
        "before": before,
        "after": after,
        "module": module,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "metrics": result.metrics,
        "recoveries": step.recoveries,
        "random": torch.rand(1),
    }


def plain_step(config: Config, batch: Batch) -> dict[str, Any]:
    """The same step without engine, chunks' recomputation, scan or sparse backward."""
    config = config.with_world_size(1)
    model = make_model(config)
    before = named(model, lambda p: p.detach().clone())
    optimizer = torch.optim.SGD(parameter_groups(model), lr=LR)
    torch.manual_seed(2)
    chunks = [
        model(a, b)
        for a, b in zip(batch.a.split(config.micro_batch_size), batch.b.split(config.micro_batch_size), strict=True)
    ]
    a, b = (torch.cat([chunk[side] for chunk in chunks]) for side in (0, 1))
    k = config.dsclr.loss.k
    assert k != "all"
    loss = dense_loss(a, b, model.logit_scale.exp()[0], batch.ids, config.dsclr.objective, k)
    loss.backward()
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    if config.raw["gradient_clipping"]:
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.raw["gradient_clipping"])
    optimizer.step()
    return {
        "before": before,
        "after": named(model, lambda p: p.detach().clone()),
        "loss": float(loss.detach()),
        "grad_norm": float(norm),
    }


def assert_same_step(ours: dict[str, Any], reference: dict[str, Any], tolerance: float = 2e-5) -> None:
    """Every tensor's update agrees relative to its own size, and no tensor stands still."""
    assert ours["after"].keys() == reference["after"].keys()
    assert abs(ours["loss"] - reference["loss"]) < 1e-5
    for name, before in reference["before"].items():
        torch.testing.assert_close(ours["before"][name], before, rtol=0, atol=0, msg=f"{name} starts differently")
        update, expected = ours["after"][name] - before, reference["after"][name] - before
        # Weights are fp32, so an update is only known to their last bit.
        slack = 2e-7 * before.abs().max()
        error = (update - expected).abs().max()
        assert error <= tolerance * expected.abs().max() + slack, f"{name}: {error} of {expected.abs().max()}"


def spawn(world_size: int, function: Any, *arguments: Any, timeout_seconds: int = 240) -> list[Any]:
    """function(world, *arguments) on real gloo ranks; their results by rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("spawn")
    folder = Path(tempfile.mkdtemp())
    processes = [
        context.Process(target=_rank, args=(rank, world_size, port, folder, function, arguments))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(timeout_seconds)
            assert process.exitcode == 0, f"a rank ended with {process.exitcode} (None: it hangs)"
    finally:
        for process in processes:
            process.kill()
    return [torch.load(folder / f"{rank}.pt") for rank in range(world_size)]


def _rank(rank: int, world_size: int, port: int, folder: Path, function: Any, arguments: Any) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    world = runtime.start()
    result = function(world, *arguments)
    # By file: a queue would block a rank until its result is read.
    torch.save(result, folder / f"{rank}.pt")
    runtime.stop()
