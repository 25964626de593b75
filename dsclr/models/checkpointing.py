"""Activation checkpointing, driven by DeepSpeed's own ``"activation_checkpointing"`` section.

DeepSpeed's engine reads that section and does nothing with it; here it takes effect.
"""

from __future__ import annotations

import difflib
from typing import Any

import torch
from torch import Tensor, nn

from dsclr.config import ConfigError
from dsclr.models.towers import TOWERS, open_clip_model, tower_blocks, tower_modules

_REFUSED = {
    "partition_activations": "it shards activations over model-parallel ranks, of which dsclr has none",
    "contiguous_memory_optimization": "it needs partition_activations, and its buffers fit only blocks of one size, "
    "which two towers do not have",
    "number_checkpoints": "it sizes the buffers of contiguous_memory_optimization, which dsclr cannot use",
    "profile": "DeepSpeed's timers fail when several blocks are checkpointed; use wall_clock_breakdown",
}
_ACCEPTED = ("cpu_checkpointing", "synchronize_checkpoint_boundary")


def enable_activation_checkpointing(model: nn.Module, ds_config: dict[str, Any]) -> bool:
    """Keep only the input of every transformer block and recompute the rest in the backward pass.

    Gradients are bitwise those without checkpointing, dropout included. A block that needs no gradient, or runs
    under no_grad, is not affected.

    Args:
        model: a ContrastiveModel (or an open_clip model), with or without adapters; changed in place.
        ds_config: the whole DeepSpeed JSON. Without an ``"activation_checkpointing"`` section nothing happens;
            with one, even ``{}``, it is on.

    Returns:
        Whether it is on.

    Raises:
        ConfigError: a key that would have no effect or cannot work, or a tower that cannot be checkpointed.
    """
    if "activation_checkpointing" not in ds_config:
        return False
    section = ds_config["activation_checkpointing"]
    _check_section(section)
    _configure(section)
    clip = getattr(model, "clip", model)
    for tower in TOWERS:
        if not any(p.requires_grad for module in tower_modules(clip, tower) for p in module.parameters()):
            continue
        found = tower_blocks(clip, tower)
        if found is None:
            kind = type(tower_modules(clip, tower)[0]).__name__
            raise ConfigError(
                f"activation_checkpointing: the {tower} tower ({kind}) has no transformer blocks to checkpoint: "
                f"remove the section, lock the tower (dsclr.model.lock_{tower}) or choose a ViT model"
            )
        for block in found[1]:
            if not isinstance(block, _Checkpointed):
                _swap_class(block)
    return True


def disable_activation_checkpointing(model: nn.Module) -> None:
    """Undo :func:`enable_activation_checkpointing` in place."""
    for module in open_clip_model(model).modules():
        if isinstance(module, _Checkpointed):
            module.__class__ = type(module).__mro__[2]


def _check_section(section: Any) -> None:
    if not isinstance(section, dict):
        raise ConfigError(f"activation_checkpointing = {section!r}, an object is expected; {{}} switches it on")
    from deepspeed.accelerator import get_accelerator

    for key, value in section.items():
        if key not in _REFUSED and key not in _ACCEPTED:
            close = difflib.get_close_matches(key, [*_REFUSED, *_ACCEPTED], n=1, cutoff=0.5)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"unknown key activation_checkpointing.{key}{hint} Accepted: {', '.join(_ACCEPTED)}")
        if key == "number_checkpoints":
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise ConfigError(f"activation_checkpointing.{key} = {value!r}, an integer or null is expected")
        elif not isinstance(value, bool):
            raise ConfigError(f"activation_checkpointing.{key} = {value!r}, true or false is expected")
        if key in _REFUSED and value is not None and value is not False:
            raise ConfigError(f"activation_checkpointing.{key} = {value!r}: {_REFUSED[key]}; leave it out")
    if section.get("cpu_checkpointing") and get_accelerator().device_name() == "cpu":
        raise ConfigError(
            "activation_checkpointing.cpu_checkpointing = true moves activations from the device to the host, but this "
            "run is on a CPU, where they already are: leave it out"
        )


def _configure(section: dict[str, Any]) -> None:
    import deepspeed

    # Only this section: DeepSpeed would otherwise check the whole file a second time.
    config = {"train_batch_size": deepspeed.comm.get_world_size(), "activation_checkpointing": section}
    deepspeed.checkpointing.configure(None, deepspeed_config=config)


class _Checkpointed(nn.Module):
    """Mixed into a block's class: its forward keeps only the input.

    A class, not a forward stored on the instance: that one would run the original block in a deep copy.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The block's own forward; x: (B, L, C), everything else (masks, rotary embeddings) is closed over."""
        block_forward = super().forward
        if not torch.is_grad_enabled() or not (x.requires_grad or any(p.requires_grad for p in self.parameters())):
            return block_forward(x, *args, **kwargs)
        from deepspeed.runtime.activation_checkpointing.checkpointing import non_reentrant_checkpoint

        device = x.device.type
        dtype, enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        cache = torch.is_autocast_cache_enabled()
        single = False

        def run(hidden: Tensor) -> Any:
            nonlocal single
            # The backward pass runs outside the forward's autocast, which DeepSpeed does not restore.
            with torch.autocast(device, dtype, enabled, cache):
                output = block_forward(hidden, *args, **kwargs)
            single = isinstance(output, tuple) and len(output) == 1
            return output

        output = non_reentrant_checkpoint(run, x)
        # DeepSpeed unpacks a tuple of one, which Hugging Face's blocks return.
        return (output,) if single else output


def _swap_class(block: nn.Module) -> None:
    stock = type(block)
    block.__class__ = type(f"Checkpointed{stock.__name__}", (_Checkpointed, stock), {})
