"""From the ``dsclr.loss`` section to a loss."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from dsclr.config import ConfigError, LossConfig
from dsclr.losses.base import Loss
from dsclr.losses.dense import DenseInfoNCE
from dsclr.losses.exact import ExactInfoNCE
from dsclr.losses.topk import TopKInfoNCE

LOSSES: dict[str, Callable[..., Loss]] = {"dense": DenseInfoNCE, "exact": ExactInfoNCE, "topk": TopKInfoNCE}


def build_loss(cfg: LossConfig, objective: str) -> Loss:
    """The loss that ``cfg.name`` names, from :data:`LOSSES` or a dotted path ``"package.module:Name"``.

    The loss is constructed with those of ``objective``, ``k`` and ``block_size`` that its signature takes,
    and with ``cfg.options``.

    Raises:
        ConfigError: an unknown name, a path that does not import, options it does not take.
    """
    if ":" in cfg.name:
        factory = _import(cfg.name)
    elif cfg.name in LOSSES:
        factory = LOSSES[cfg.name]
    else:
        raise ConfigError(
            f"dsclr.loss.name = {cfg.name!r}, accepted: {', '.join(sorted(LOSSES))}, "
            'or a path to a loss of your own such as "my_pkg.losses:MyLoss"'
        )
    parameters = inspect.signature(factory).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    common: dict[str, Any] = {"objective": objective, "k": cfg.k, "block_size": cfg.block_size, "backend": cfg.backend}
    # k and block_size may stay in the file when the name changes; what would change the loss may not.
    special = {"tail": cfg.tail, "false_negative_margin": cfg.false_negative_margin}
    for name, value in special.items():
        if value in (None, "none"):
            continue
        if name not in parameters and not takes_all:
            raise ConfigError(f"dsclr.loss.{name} = {value!r}: {cfg.name} has no such option; leave it out")
        common[name] = value
    options = {name: value for name, value in common.items() if name in parameters or takes_all}
    unknown = [name for name in cfg.options if name not in parameters]
    if unknown and not takes_all:
        raise ConfigError(
            f"dsclr.loss.options.{unknown[0]}: {cfg.name} takes {', '.join(sorted(parameters)) or 'no options'}"
        )
    try:
        return factory(**{**options, **cfg.options})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"dsclr.loss: {cfg.name} cannot be constructed: {error}") from error


def _import(path: str) -> Any:
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"dsclr.loss.name = {path!r}: module {module_name!r} does not import ({error}); "
            "install it, or put its folder on PYTHONPATH"
        ) from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise ConfigError(f"dsclr.loss.name = {path!r}: {module_name} has no {attribute!r}") from None
