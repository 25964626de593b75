"""Image transforms: PIL RGB in, uint8 (3, H, W) out. Normalisation happens on the device."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from open_clip.transform import MaybeToTensor, PreprocessCfg, image_transform_v2
from PIL import Image
from torch import Tensor
from torchvision import transforms as v1
from torchvision.transforms import InterpolationMode, v2

from dsclr.models import ImageSettings

# Chen et al. 2020.
SIMCLR_CROP_SCALE = (0.08, 1.0)

Augmentation = Literal["none", "light", "simclr"]


def build_transform(
    settings: ImageSettings,
    augment: Augmentation,
    *,
    crop_scale: tuple[float, float] = (0.9, 1.0),
    flip: bool = False,
) -> v2.Compose:
    """The transform of one view.

    Args:
        settings: size and interpolation of the model's own preprocessing.
        augment: "none": what open_clip does for evaluation; "light": open_clip's training crop
            (RandomResizedCrop with ``crop_scale``) and an optional flip; "simclr": crop, flip, colour
            jitter, grey and blur of Chen et al. 2020.
    """
    interpolation = InterpolationMode.BILINEAR if settings.interpolation == "bilinear" else InterpolationMode.BICUBIC
    height, width = settings.image_size
    steps: list[torch.nn.Module] = []
    if augment == "none":
        steps = _resize(settings)
    elif augment == "light":
        steps = [_ToTensor(), v2.RandomResizedCrop((height, width), scale=crop_scale, interpolation=interpolation)]
        if flip:
            steps.append(v2.RandomHorizontalFlip())
        return v2.Compose(steps)
    else:
        blur = v2.GaussianBlur(kernel_size=max(3, (height // 10) | 1), sigma=(0.1, 2.0))
        steps = [
            _ToTensor(),
            v2.RandomResizedCrop((height, width), scale=SIMCLR_CROP_SCALE, interpolation=interpolation),
            v2.RandomHorizontalFlip(),
            # Pillow is the faster one for colours.
            v2.ToPILImage(),
            v2.RandomApply([v2.ColorJitter(0.8, 0.8, 0.8, 0.2)], p=0.8),
            v2.RandomGrayscale(p=0.2),
            v2.RandomApply([blur], p=0.5),
        ]
    return v2.Compose([*steps, v2.PILToTensor()])


class _ToTensor(torch.nn.Module):
    """PIL to (3, H, W) uint8 with the channels last in memory: torchvision resizes those twice as fast as Pillow."""

    def forward(self, image: Image.Image) -> Tensor:
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def _resize(settings: ImageSettings) -> list[torch.nn.Module]:
    """open_clip's own evaluation preprocessing up to the point where it becomes floats."""
    preprocess = PreprocessCfg(
        size=settings.image_size, interpolation=settings.interpolation, resize_mode=settings.resize_mode
    )
    steps = image_transform_v2(preprocess, is_train=False).transforms
    return [step for step in steps if not isinstance(step, (MaybeToTensor, v1.Normalize))]


def seeded(transform: v2.Compose, image: Image.Image, seed: int) -> Tensor:
    """One view with its own random numbers: the same whichever process makes it."""
    # Not torch.manual_seed: it also seeds the GPUs, and where none is in use yet it queues a stack trace each time.
    generator = torch.default_generator
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        return transform(image)
    finally:
        generator.set_state(state)
