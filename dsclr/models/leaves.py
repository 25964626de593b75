"""Gradients of a model's parameters without the hooks on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def separate_leaves(model: nn.Module) -> Iterator[dict[nn.Parameter, nn.Parameter]]:
    """Within, the model computes with leaves of its own in place of the trainable parameters.

    They share memory with the parameters, but their gradients meet none of the hooks with which an engine reduces
    gradients as they appear.

    Yields:
        parameter -> the leaf in its place.
    """
    leaves: dict[nn.Parameter, nn.Parameter] = {}
    places = []
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad:
                leaf = leaves.setdefault(parameter, nn.Parameter(parameter.detach()))
                places.append((module, name, parameter, leaf))
    try:
        for module, name, _, leaf in places:
            module._parameters[name] = leaf
        yield leaves
    finally:
        for module, name, parameter, _ in places:
            module._parameters[name] = parameter
