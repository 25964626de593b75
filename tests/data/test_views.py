"""Transforms."""

from __future__ import annotations

import io

import pytest
import torch
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image

from dsclr.data.views import build_transform, seeded
from dsclr.models import ImageSettings
from tests.data.samples import picture


@pytest.mark.parametrize("resize_mode", ["shortest", "longest", "squash"])
@pytest.mark.parametrize("size", [(32, 32), (24, 32)])
@pytest.mark.parametrize("shape", [(50, 40), (20, 70)])
def test_evaluation_is_open_clips_preprocessing_in_uint8(resize_mode, size, shape):
    settings = ImageSettings(size, (0.4, 0.5, 0.6), (0.2, 0.3, 0.4), "bicubic", resize_mode)
    reference = image_transform_v2(
        PreprocessCfg(size=size, mean=settings.mean, std=settings.std, resize_mode=resize_mode), is_train=False
    )
    image = Image.open(io.BytesIO(picture(0, 80))).resize(shape)
    ours = build_transform(settings, "none")(image)
    assert ours.dtype == torch.uint8
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (settings.mean, settings.std))
    torch.testing.assert_close((ours.float() / 255 - mean) / std, reference(image))


@pytest.mark.parametrize("augment", ["light", "simclr"])
def test_seeded_views(augment):
    settings = ImageSettings((32, 32), (0.5,) * 3, (0.5,) * 3, "bicubic", "shortest")
    transform = build_transform(settings, augment, crop_scale=(0.5, 0.9), flip=True)
    image = Image.open(io.BytesIO(picture(1)))
    first, again, other = seeded(transform, image, 5), seeded(transform, image, 5), seeded(transform, image, 6)
    assert first.shape == (3, 32, 32)
    assert first.dtype == torch.uint8
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
