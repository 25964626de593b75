"""What the second forward of a micro-batch need not compute again: locked towers, blocks below the first adapter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from dsclr.models.towers import Tower, is_trainable, tower_blocks, tower_parameters
from dsclr.rng import RandomState

# Their blocks take and give one tensor (Hugging Face's give tuples).
_SKIPPABLE = (
    "transformer.resblocks",
    "text.transformer.resblocks",
    "visual.transformer.resblocks",
    "visual.trunk.blocks",
)


@dataclass
class Memo:
    """What the first forward of a micro-batch leaves for the second.

    Attributes:
        keep_hidden: keep the input of the lowest block that trains. It is (B, L, C), much larger than an embedding.
        features: of towers that do not train, before their heads.
        hidden: input of the lowest block that trains, and the random numbers from there on.
    """

    keep_hidden: bool
    features: dict[Tower, Tensor] = field(default_factory=dict)
    hidden: dict[Tower, tuple[Tensor, RandomState]] = field(default_factory=dict)

    @property
    def hidden_bytes(self) -> int:
        return sum(hidden.nbytes for hidden, _ in self.hidden.values())


def frozen_blocks(model: nn.Module, tower: Tower) -> list[nn.Module]:
    """The blocks below the lowest one that trains, and that one last; empty if nothing is frozen there.

    Args:
        model: an open_clip model, with or without adapters.
    """
    found = tower_blocks(model, tower)
    if found is None or found[0] not in _SKIPPABLE or not is_trainable(model, tower):
        return []
    blocks = found[1]
    inside = {id(p) for block in blocks for p in block.parameters()}
    # Something outside the blocks that trains may stand before them.
    if any(p.requires_grad and id(p) not in inside for p in tower_parameters(model, tower).values()):
        return []
    lowest = next(i for i, block in enumerate(blocks) if any(p.requires_grad for p in block.parameters()))
    return blocks[: lowest + 1] if lowest else []


@contextmanager
def skipping_frozen_blocks(model: nn.Module, tower: Tower, memo: Memo | None) -> Iterator[None]:
    """Within, the tower's forward fills the memo, or starts from it at the lowest block that trains."""
    blocks = frozen_blocks(model, tower) if memo is not None and (memo.keep_hidden or memo.hidden) else []
    if memo is None or not blocks:
        yield
        return
    *frozen, lowest = blocks

    def record(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        memo.hidden[tower] = inputs[0].detach(), RandomState.capture(inputs[0].device)

    def replay(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, random_state = memo.hidden[tower]
        random_state.restore(hidden.device)
        return (hidden, *inputs[1:])

    known = tower in memo.hidden
    handle = lowest.register_forward_pre_hook(replay if known else record)
    try:
        if known:
            for block in frozen:
                block.forward = _same
        yield
    finally:
        handle.remove()
        for block in frozen:
            block.__dict__.pop("forward", None)


def _same(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return x
