"""A data set of torchvision that is on disk."""

from __future__ import annotations

import difflib
import inspect
import operator
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from dsclr.config import ConfigError
from dsclr.data.causes import BadSample
from dsclr.data.writing.captions import check_template, class_caption
from dsclr.data.writing.source import Content, Row, Source


def torchvision_source(
    name: str, root: Path, split: str | None, template: str, captioned: bool = True, download: bool = False
) -> Source:
    """The images of a classification data set, in its order.

    Args:
        name: in torchvision.datasets.
        root: folder it is in.
        split: as the data set calls it; of those with train=True or False "train" or "test". None: "train" where
            there are splits.
        template: "{}" in it becomes the class.
        captioned: False: images and classes only.
        download: fetch what is not there.

    Raises:
        ConfigError: no such data set or split, not on disk, or not one of images with a class each.
    """
    check_template(template)
    dataset, split = _build(name, root, split, download)
    classes = [one if isinstance(one, str) else str(one[0]) for one in _class_names(dataset)]
    if captioned and not classes:
        raise ConfigError(f"--torchvision: {name} has no class names to make captions of; use --captions none")
    if not len(dataset):
        raise ConfigError(f"--torchvision: {name} in {root} is empty")
    item = dataset[0]
    if not isinstance(item, tuple) or len(item) != 2 or not isinstance(item[0], Image.Image) or not _is_class(item[1]):
        raise ConfigError(f"--torchvision: a sample of {name} is not an image and its class; such cannot be written")
    return Source(
        rows=(Row(number) for number in range(len(dataset))),
        load=partial(_load, dataset=dataset, classes=classes, template=template, captioned=captioned),
        captioned=captioned,
        identity={
            "--torchvision": name,
            "--root": str(root.resolve()),
            "--split": split,
            "--captions": "template" if captioned else "none",
            "--template": template if captioned else None,
        },
    )


def _build(name: str, root: Path, split: str | None, download: bool) -> tuple[Any, str | None]:
    """The data set and the split that it is."""
    import torchvision.datasets as found

    names = [one for one in found.__all__ if one not in ("DatasetFolder", "ImageFolder", "VisionDataset")]
    if name not in names:
        close = difflib.get_close_matches(name.lower(), [one.lower() for one in names], n=1, cutoff=0.5)
        nearest = [one for one in names if one.lower() in close]
        hint = f"did you mean {nearest[0]}?" if nearest else f"it knows {', '.join(names)}"
        raise ConfigError(f"--torchvision: torchvision has no data set {name!r}; {hint}")
    kind = getattr(found, name)
    accepted = inspect.signature(kind).parameters
    arguments: dict[str, Any] = {}
    if "split" in accepted:
        split = split or str(accepted["split"].default)
        arguments = {"split": split}
    elif "train" in accepted:
        split = split or "train"
        if split not in ("train", "test"):
            raise ConfigError(f"--split {split}: {name} has train and test")
        arguments = {"train": split == "train"}
    elif split is not None:
        raise ConfigError(f"--split {split}: {name} has no splits")
    if download:
        if "download" not in accepted:
            raise ConfigError(f"--download: torchvision cannot download {name}; put it into {root} yourself")
        arguments["download"] = True
    try:
        return kind(root=str(root), **arguments), split
    except (RuntimeError, ValueError, TypeError, OSError, ImportError) as error:
        raise ConfigError(
            f"--torchvision: {name} cannot be read from {root}: {error}; "
            "check --root and --split, or let --download fetch it"
        ) from None


def _class_names(dataset: Any) -> list[Any]:
    return list(getattr(dataset, "classes", None) or getattr(dataset, "categories", None) or [])


def _is_class(target: Any) -> bool:
    try:
        operator.index(target)
    except (TypeError, ValueError):
        return False
    return True


def _load(row: Row, dataset: Any, classes: list[str], template: str, captioned: bool) -> Content:
    try:
        image, target = dataset[row.image]
        cls = operator.index(target)
    except Exception as error:  # whatever the data set's own reading raises; the next image may be good
        raise BadSample("broken_image", f"{type(error).__name__}: {error}") from None
    info: dict[str, Any] = {"dataset": type(dataset).__name__, "index": row.image}
    if not classes:
        return Content(image, [], cls, info)
    if not 0 <= cls < len(classes):
        raise BadSample("unknown_class", f"class {cls} of {len(classes)}")
    captions = [class_caption(template, classes[cls])] if captioned else []
    return Content(image, captions, cls, {**info, "class": classes[cls]})
