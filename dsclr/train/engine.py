"""The DeepSpeed engine around a model."""

from __future__ import annotations

import copy
import logging
import math
from typing import Any

import torch
from deepspeed.runtime.utils import register_output_backward_hooks
from torch import Tensor, nn

from dsclr.config import Config, ConfigError
from dsclr.train.masters import find_places

logger = logging.getLogger(__name__)

# Schedulers of DeepSpeed whose length is the run's, unless the JSON says otherwise.
_TIMED_SCHEDULERS = ("WarmupCosineLR", "WarmupDecayLR")
_ADAM = ("adam", "adamw")


def engine_config(config: Config, total_steps: int, run_folder: str, device: torch.device) -> dict[str, Any]:
    """What DeepSpeed gets: the run's JSON without our section, and what the user should not have to know.

    A scheduler without ``total_num_steps`` ends with the run; on a CPU Adam is torch's (DeepSpeed would compile
    its own for minutes); TensorBoard events go into the run folder unless the JSON sets its own
    ``tensorboard`` section.

    Raises:
        ConfigError: what this trainer cannot run, by name.
    """
    _refuse(config, device)
    ds = copy.deepcopy({key: value for key, value in config.raw.items() if key != "dsclr"})
    ds.setdefault("steps_per_print", None)
    optimizer = ds["optimizer"]
    if device.type == "cpu" and optimizer["type"].lower() in _ADAM:
        optimizer.setdefault("params", {}).setdefault("torch_adam", True)
    scheduler = ds.get("scheduler")
    if scheduler and scheduler.get("type") in _TIMED_SCHEDULERS:
        scheduler.setdefault("params", {}).setdefault("total_num_steps", total_steps)
    ds.setdefault("tensorboard", {"enabled": True, "output_path": run_folder, "job_name": "tensorboard"})
    return ds


def _refuse(config: Config, device: torch.device) -> None:
    raw = config.raw
    if not isinstance(raw.get("optimizer"), dict) or not isinstance(raw["optimizer"].get("type"), str):
        raise ConfigError(f'{config.source}: no "optimizer"; for example {{"type": "AdamW", "params": {{"lr": 1e-4}}}}')
    if config.zero_stage > 2:
        # Its hooks fetch and release parameters by themselves, while a step collects gradients in parameters of its own
        # and hands them over once: those have no ds_id, and a partitioned parameter (of shape [0]) takes no gradient.
        raise ConfigError(
            f"zero_optimization.stage = {config.zero_stage}: stages 0, 1 and 2 are supported "
            "(the weights of a CLIP model fit every card; stage 2 shards gradients and optimizer state)"
        )
    _refuse_offload(raw.get("zero_optimization", {}), config.zero_stage)
    if config.precision == "fp16":
        if device.type == "cpu":
            raise ConfigError("fp16 does not run on a CPU: use bf16, or leave the section out for fp32")
        if config.zero_stage == 0:
            raise ConfigError("fp16 needs zero_optimization.stage 1 or 2 (or use bf16)")


def _refuse_offload(zero: dict[str, Any], stage: int) -> None:
    """DeepSpeed would leave it out without a word."""
    if zero.get("offload_param") is not None:
        raise ConfigError("zero_optimization.offload_param is for stage 3, which is not supported: leave it out")
    offload = zero.get("offload_optimizer")
    device = "none" if offload is None else str(offload.get("device", "none"))
    if device not in ("none", "cpu"):
        raise ConfigError(f"zero_optimization.offload_optimizer.device = {device}, accepted: cpu or none")
    if device == "cpu" and stage == 0:
        raise ConfigError("zero_optimization.offload_optimizer needs zero_optimization.stage 1 or 2")


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Trainable parameters; those of one dimension (gains, biases, logit_scale) get no weight decay, as in open_clip.

    Raises:
        ConfigError: nothing is trainable.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise ConfigError("nothing to train: both towers are locked and there are no adapters, no head")
    decay = [p for p in trainable if p.ndim >= 2]
    no_decay = [p for p in trainable if p.ndim < 2]
    groups: list[dict[str, Any]] = []
    if decay:
        groups.append({"params": decay})
    if no_decay:
        groups.append({"params": no_decay, "weight_decay": 0.0})
    return groups


def build_engine(model: nn.Module, ds_config: dict[str, Any]) -> Any:
    """A deepspeed.DeepSpeedEngine with optimizer and scheduler from the JSON.

    Raises:
        ConfigError: DeepSpeed refuses the configuration.
    """
    import deepspeed

    groups = parameter_groups(model)
    optimizer, zero = ds_config["optimizer"], ds_config.get("zero_optimization", {})
    own_adam = optimizer["type"].lower() in _ADAM and not optimizer.get("params", {}).get("torch_adam")
    if own_adam and (zero.get("offload_optimizer") or {}).get("device") == "cpu":
        logger.info(
            "optimizer offload: DeepSpeed builds its Adam for the CPU on first use, which needs a C++ compiler and "
            'takes minutes; "torch_adam": true in optimizer.params takes PyTorch\'s instead'
        )
    if ds_config.get("zero_optimization", {}).get("stage", 0) > 0:
        # DeepSpeed allocates the whole bucket at every reduction: 5e8 elements by default, a gigabyte in bf16.
        trainable = sum(p.numel() for group in groups for p in group["params"])
        ds_config["zero_optimization"].setdefault("reduce_bucket_size", min(trainable, 500_000_000))
    try:
        engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=ds_config)
    except (ValueError, AssertionError, KeyError, TypeError) as error:
        raise ConfigError(f"DeepSpeed refuses the configuration: {type(error).__name__}: {error}") from error
    find_places(engine)
    return engine


def deliver_gradients(engine: Any, gradients: dict[nn.Parameter, Tensor]) -> None:
    """Give the engine the gradients of a whole step as those of one backward: one reduction, one boundary.

    To the engine this is an ordinary step without accumulation, under every ZeRO stage and precision.

    Args:
        gradients: parameter -> its gradient on this rank, unscaled, in any precision; others have none.
    """
    total = _Given.apply(list(gradients.values()), *gradients)
    # What engine.forward does to its outputs; ZeRO prepares its buckets there.
    register_output_backward_hooks(total, preprocess_once_fn=engine._backward_prologue)
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(total, scale_wrt_gas=False)


class _Given(torch.autograd.Function):
    """A zero whose gradients are given."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return parameters[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> Any:
        # The scale is that of fp16 losses.
        return None, *(g if scale == 1 else g * scale for g in ctx.gradients)


def plain_grad_norm(engine: Any) -> float:
    """Norm of the reduced gradients where they lie at the parameters; NaN where the optimizer takes them."""
    if engine.zero_optimization_stage() > 0 or engine.bfloat16_enabled() or engine.fp16_enabled():
        return math.nan
    gradients = [p.grad for p in engine.module.parameters() if p.requires_grad and p.grad is not None]
    return float(torch.stack([g.float().norm() for g in gradients]).norm()) if gradients else math.nan


def loss_scale(engine: Any) -> float:
    """What fp16 gradients are multiplied with until the optimizer; 1 in other precisions."""
    return float(engine.optimizer.loss_scale) if engine.fp16_enabled() else 1.0
