"""The engine's state by the parameter's name, for any number of ranks, any ZeRO stage and any precision.

Weights and the optimizer's state stand unsharded in ``weights-NNNNN.pt``, files of about a gigabyte, so that a save and
a load take little memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime import lr_schedules
from torch import Tensor, nn

from dsclr.config import ConfigError
from dsclr.train.durable import Writes
from dsclr.train.masters import Place, place_of, set_master

# Bytes of tensors after which a file is written.
FILE_BYTES = 2**30
# Of DeepSpeed's engine, which has no state_dict of its own.
_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
# What a scheduler moves in a parameter group.
_SCHEDULED = ("lr", "betas", "momentum")


def save_engine(folder: Path, engine: Any, writes: Writes, *, is_main: bool, frozen: bool) -> dict[str, Any]:
    """Write weights and optimizer state; all ranks together, parameter by parameter, and the first writes.

    Args:
        folder: exists.
        writes: of this rank; keeps an error of writing, as the other ranks are already in the next collective.
        is_main: this is the first rank.
        frozen: also keep weights that do not train.

    Returns:
        What :func:`load_engine` needs beside the files.

    Raises:
        ConfigError: an optimizer whose state cannot be taken apart by parameter.
    """
    writer = _Writer(folder, writes)
    kept: dict[str, Any] = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            place = place_of(parameter)
            state, numbers = _state(engine, name, parameter)
            record = {"weight": place.whole(place.holder, parameter.shape, parameter.device), **state}
            kept[name] = {"shape": list(parameter.shape), "state": list(state), "numbers": numbers}
        elif frozen:
            record = {"weight": parameter.detach()}
        else:
            continue
        if is_main:
            writer.add(name, record)
    scheduler, scaler, autocast_scaler = _scheduler_and_scalers(engine)
    saved = {
        "parameters": kept,
        "optimizer": engine.optimizer_name(),
        "counters": {name: getattr(engine, name) for name in _COUNTERS},
        "scheduler": None if scheduler is None else {"type": type(scheduler).__name__, "state": scheduler.state_dict()},
        "groups": [{k: group[k] for k in _SCHEDULED if k in group} for group in engine.basic_optimizer.param_groups],
        "scaler": None if scaler is None else _numbers(vars(scaler)),
        "autocast_scaler": None if autocast_scaler is None else autocast_scaler.state_dict(),
    }
    if is_main:
        saved["files"] = writer.close()
    return saved


def load_engine(folder: Path, engine: Any, saved: dict[str, Any]) -> None:
    """Continue from :func:`save_engine`, whatever ranks, ZeRO stage, offload and precision it was saved under.

    What the JSON says of the optimizer (weight decay, the learning rate or the one a schedule starts from) holds from
    now on.

    Args:
        engine: fresh, of the same model.
        saved: what save_engine returned on the first rank.

    Raises:
        ConfigError: of another model, optimizer or scheduler.
    """
    parameters = dict(engine.module.named_parameters())
    _check(folder, engine, saved)
    _make_state(engine, saved["parameters"])
    for number in range(saved["files"]):
        for name, record in torch.load(folder / _file(number), mmap=True, weights_only=True).items():
            parameter = parameters[name]
            if not parameter.requires_grad:
                with torch.no_grad():
                    parameter.copy_(record["weight"])
                continue
            set_master(parameter, record.pop("weight").to(parameter.device))
            _put_state(engine, name, parameter, record)
    for name, value in saved["counters"].items():
        setattr(engine, name, value)
    scheduler, scaler, autocast_scaler = _scheduler_and_scalers(engine)
    if scheduler is not None and saved["scheduler"] is not None:
        _load_schedule(scheduler, engine.basic_optimizer, saved)
    if scaler is not None and saved["scaler"] is not None:
        vars(scaler).update(saved["scaler"])
    if autocast_scaler is not None and saved["autocast_scaler"] is not None:
        autocast_scaler.load_state_dict(saved["autocast_scaler"])


class _Writer:
    """Collects records on the host and writes a file whenever they are large enough."""

    def __init__(self, folder: Path, writes: Writes) -> None:
        self.folder, self.writes = folder, writes
        self._files = 0
        self._records: dict[str, dict[str, Tensor]] = {}
        self._bytes = 0

    def add(self, name: str, record: dict[str, Tensor]) -> None:
        self._records[name] = {key: value.detach().to("cpu", copy=True) for key, value in record.items()}
        self._bytes += sum(value.nbytes for value in record.values())
        if self._bytes >= FILE_BYTES:
            self._write()

    def close(self) -> int:
        """Write what is left; returns the number of files."""
        self._write()
        return self._files

    def _write(self) -> None:
        self.writes.save(self._records, self.folder / _file(self._files))
        self._files += 1
        self._records, self._bytes = {}, 0


def _file(number: int) -> str:
    return f"weights-{number:05d}.pt"


def _scheduler_and_scalers(engine: Any) -> tuple[Any, Any, Any]:
    """(learning rate scheduler, dynamic loss scaler of fp16, gradient scaler of torch.autocast); None: not used."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    autocast_scaler = getattr(engine.optimizer, "torch_autocast_gradscaler", None)
    return engine.lr_scheduler, scaler if getattr(scaler, "dynamic", False) else None, autocast_scaler


def _state(engine: Any, name: str, parameter: nn.Parameter) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The optimizer's state of a parameter: whole tensors (a collective under ZeRO), and numbers such as the step."""
    base, place = engine.basic_optimizer, place_of(parameter)
    # All flat tensors of a rank are stepped at once, so any of them says what there is of a parameter of other ranks.
    holder = base.param_groups[0]["params"][0] if place.holder is None else place.holder
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, float] = {}
    for key, value in base.state.get(holder, {}).items():
        if not isinstance(value, Tensor) or value.ndim == 0:
            numbers.update(_numbers({key: value}))
        elif value.shape == holder.shape:
            own = None if place.holder is None else value
            tensors[key] = place.whole(own, parameter.shape, parameter.device)
        elif _is_own(place, parameter):
            tensors[key] = value
        else:
            raise _not_by_weight(engine, name, key)
    return tensors, numbers


def _is_own(place: Place, parameter: nn.Parameter) -> bool:
    """Whether the optimizer steps the parameter for itself, and not a flat tensor of many."""
    return place.holder is not None and place.group is None and place.holder.shape == parameter.shape


def _not_by_weight(engine: Any, name: str, key: str) -> ConfigError:
    return ConfigError(
        f"the optimizer {engine.optimizer_name()} keeps {key} of {name}, which is not one value a weight: a checkpoint "
        "can hold that with zero_optimization.stage 0 only"
    )


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    """The numbers among values, as Python's."""
    plain = {k: v.item() if isinstance(v, Tensor) and v.ndim == 0 else v for k, v in values.items()}
    return {k: v for k, v in plain.items() if isinstance(v, (int, float))}


def _check(folder: Path, engine: Any, saved: dict[str, Any]) -> None:
    before = {name: tuple(kept["shape"]) for name, kept in saved["parameters"].items()}
    now = {name: tuple(p.shape) for name, p in engine.module.named_parameters() if p.requires_grad}
    if before != now:
        name = next(name for name in (*before, *now) if before.get(name) != now.get(name))
        raise ConfigError(
            f"{folder} holds {len(before)} trained tensors and this model trains {len(now)}; the first difference is "
            f"{name}: {before.get(name, 'absent')} there, {now.get(name, 'absent')} here. Restore dsclr.model, or "
            "start another run"
        )
    scheduler = engine.lr_scheduler
    types = [("optimizer", saved["optimizer"], engine.optimizer_name())]
    if scheduler is not None and saved["scheduler"] is not None:
        types.append(("scheduler", saved["scheduler"]["type"], type(scheduler).__name__))
    for what, old, new in types:
        if old != new:
            raise ConfigError(
                f"{folder} was written with {what}.type = {old}, which is {new} now: restore it, or start another run"
            )


def _make_state(engine: Any, kept: dict[str, Any]) -> None:
    """Empty state in the optimizer, of the saved kinds and with the saved numbers."""
    base = engine.basic_optimizer
    parts: dict[Tensor, list[Any]] = {}
    spread = False
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            place = place_of(parameter)
            spread = spread or place.group is not None
            if place.holder is not None:
                parts.setdefault(place.holder, []).append(kept[name])
    packed = base.state_dict()
    packed["state"] = {}
    for group, numbered in zip(base.param_groups, packed["param_groups"], strict=True):
        for holder, number in zip(group["params"], numbered["params"], strict=True):
            # Under ZeRO a rank may hold nothing but padding of a group, which is stepped all the same.
            of = list(kept.values()) if spread else parts[holder]
            state: dict[str, Any] = {key: torch.zeros_like(holder) for one in of for key in one["state"]}
            for one in of:
                for key, value in one["numbers"].items():
                    state[key] = max(value, state.get(key, value))
            if state:
                packed["state"][number] = state
    # Through the optimizer, which knows where and as what it wants its numbers.
    base.load_state_dict(packed)


def _put_state(engine: Any, name: str, parameter: nn.Parameter, record: dict[str, Tensor]) -> None:
    place = place_of(parameter)
    for key, value in record.items():
        if value.shape != parameter.shape and not _is_own(place, parameter):
            raise _not_by_weight(engine, name, key)
        if place.holder is None:
            continue
        state = engine.basic_optimizer.state[place.holder]
        if value.shape == parameter.shape:
            place.put(state[key], value)
        else:
            state[key] = value.to(place.holder.device, copy=True)


def _load_schedule(scheduler: Any, optimizer: Any, saved: dict[str, Any]) -> None:
    scheduler.load_state_dict(saved["scheduler"]["state"])
    if type(scheduler).__module__ != lr_schedules.__name__:
        # torch's schedulers go on from the value before.
        for group, before in zip(optimizer.param_groups, saved["groups"], strict=True):
            group.update(before)
    elif scheduler.last_batch_iteration >= 0:
        # DeepSpeed's are functions of the step, and load_state_dict does not apply them.
        scheduler.step(scheduler.last_batch_iteration)
