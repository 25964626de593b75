"""Two towers, their heads and the temperature behind one forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dsclr.models.memo import Memo, skipping_frozen_blocks
from dsclr.models.resolve import ImageSettings
from dsclr.models.towers import TOWERS, Tower, is_trainable, open_clip_model, tower_modules


class ContrastiveModel(nn.Module):
    """An open_clip model as the losses want it: uint8 images and token ids in, unit vectors out.

    A tower without trainable parameters runs without a graph and in evaluation mode, so it keeps no
    activations and its embeddings do not depend on dropout or on the batch.

    Args:
        clip: an open_clip model (CLIP, CustomTextCLIP, CoCa), or a PeftModel around one.
        objective: "clip" (images and texts) or "simclr" (two views of images).
        settings: the model's own preprocessing.
        image_head, text_head: projections on top of the towers, (B, D) -> (B, D').
        model_cfg: open_clip's configuration of the model, kept for exports.
    """

    def __init__(
        self,
        clip: nn.Module,
        objective: str,
        settings: ImageSettings,
        image_head: nn.Module | None = None,
        text_head: nn.Module | None = None,
        model_cfg: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.clip = clip
        self.objective = objective
        self.settings = settings
        self.image_head = image_head
        self.text_head = text_head
        self.model_cfg = model_cfg

    @property
    def open_clip_model(self) -> Any:
        """The open_clip model, without peft around it."""
        return open_clip_model(self.clip)

    @property
    def logit_scale(self) -> nn.Parameter:
        """(1,) log of the multiplicative scale: scale = exp(logit_scale)."""
        return self.open_clip_model.logit_scale

    def forward(self, a: Tensor, b: Tensor, memo: Memo | None = None) -> tuple[Tensor, Tensor]:
        """Embeddings of both sides, (B, D) float32 L2-normalised each.

        Args:
            a: (B, 3, H, W) uint8 images.
            b: (B, L) int64 token ids, or (B, 3, H, W) uint8 second views under "simclr".
            memo: an empty one is filled; a filled one (of the same rows) spares what does not train.
        """
        sides: dict[int, Tensor] = {}
        for of_tower in self.by_tower(a, b, memo):
            sides.update(of_tower)
        return sides[0], sides[1]

    def by_tower(self, a: Tensor, b: Tensor, memo: Memo | None = None) -> Iterator[dict[int, Tensor]]:
        """What :meth:`forward` gives, tower by tower: the graph of one can go before that of the next is made.

        Yields:
            side (0 of a, 1 of b) -> (B, D); both at once where one tower encodes both.
        """
        if self.objective == "simclr":
            yield dict(enumerate(self.encode_image(torch.cat([a, b]), memo=memo).chunk(2)))
            return
        yield {0: self.encode_image(a, memo=memo)}
        yield {1: self.encode_text(b, memo=memo)}

    def encode_image(self, images: Tensor, head: bool = True, memo: Memo | None = None) -> Tensor:
        """(B, 3, H, W) uint8 -> (B, D) float32 L2-normalised.

        Args:
            head: False: the tower's own embedding, before the projection head.
            memo: see :meth:`forward`.

        Raises:
            TypeError: images that are not uint8.
        """
        if images.dtype != torch.uint8:
            raise TypeError(f"images are {images.dtype}, uint8 is expected: normalisation happens in the model")
        encode = self.open_clip_model.encode_image
        features = self._features("image", memo, lambda: encode(self._normalise(images), normalize=False))
        return self._unit(features, self.image_head if head else None)

    def encode_text(self, tokens: Tensor, head: bool = True, memo: Memo | None = None) -> Tensor:
        """(B, L) int64 -> (B, D) float32 L2-normalised.

        Args:
            head: False: the tower's own embedding, before the projection head.
            memo: see :meth:`forward`.
        """
        encode = self.open_clip_model.encode_text
        features = self._features("text", memo, lambda: encode(tokens, normalize=False))
        return self._unit(features, self.text_head if head else None)

    def _features(self, tower: Tower, memo: Memo | None, encode: Callable[[], Tensor]) -> Tensor:
        if is_trainable(self.clip, tower):
            with skipping_frozen_blocks(self.clip, tower, memo):
                return encode()
        if memo is not None and tower in memo.features:
            return memo.features[tower]
        with torch.no_grad():
            features = encode()
        if memo is not None:
            memo.features[tower] = features
        return features

    def train(self, mode: bool = True) -> ContrastiveModel:
        """Training mode, except for towers and batch normalisations that do not train."""
        super().train(mode)
        for tower in TOWERS:
            if not is_trainable(self.clip, tower):
                for module in tower_modules(self.clip, tower):
                    module.eval()
        for module in self.modules():
            # Under LoRA the rest of a tower is frozen; its running statistics must not drift either.
            if isinstance(module, _BatchNorm) and not any(p.requires_grad for p in module.parameters()):
                module.eval()
        return self

    def _normalise(self, images: Tensor) -> Tensor:
        # Not buffers: a bf16 engine would round them.
        mean = torch.tensor(self.settings.mean, device=images.device).view(3, 1, 1)
        std = torch.tensor(self.settings.std, device=images.device).view(3, 1, 1)
        pixels = images.to(torch.float32).div_(255).sub_(mean).div_(std)
        return pixels.to(next(self.open_clip_model.visual.parameters()).dtype)

    @staticmethod
    def _unit(features: Tensor, head: nn.Module | None) -> Tensor:
        if head is not None:
            features = head(features)
        return F.normalize(features.float(), dim=-1)
