"""A folder of images, with a subfolder a class or without classes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from dsclr.config import ConfigError
from dsclr.data.writing.captions import check_template, class_caption
from dsclr.data.writing.images import SUFFIXES
from dsclr.data.writing.source import Row, Source, Unused, load_file


def folder_source(folder: Path, captions: str | None, template: str, flat: bool = False) -> Source:
    """Every image below ``folder``, sorted by path; hidden files and folders are passed over.

    Args:
        folder: FOLDER/class/x.jpg, where folders in a class belong to it, or FOLDER/x.jpg without classes.
        captions: "template" (of the class), "txt" (x.txt beside x.jpg; subfolders are then no classes) or "none"; None:
            the template where there are classes, otherwise txt if any such file exists.
        template: "{}" in it becomes the class.
        flat: subfolders are not classes.

    Raises:
        ConfigError: no such folder, no image in it, images both in it and in subfolders, or captions that it
            cannot have.
    """
    if not folder.is_dir():
        hint = " (it is a file: tables go with --table)" if folder.is_file() else ""
        raise ConfigError(f"--images: folder {folder} does not exist{hint}")
    classes = (
        [] if flat or captions == "txt" else sorted(entry.name for entry in os.scandir(folder) if _is_class(entry))
    )
    direct = next(_images(folder, list(classes)), None)
    below = next((path for name in classes for path in _images(folder / name)), None)
    if direct is not None and below is not None:
        raise ConfigError(
            f"--images: {folder} holds images itself ({direct.name}) and in subfolders "
            f"({below.relative_to(folder)}): move the former into a class, or say --flat if subfolders are no classes "
            "(--captions txt, for captions in x.txt beside x.jpg, implies it)"
        )
    if direct is None and below is None:
        suffixes = " ".join(sorted(suffix[1:] for suffix in SUFFIXES))
        raise ConfigError(f"--images: no image found in {folder}; files with these endings are read: {suffixes}")
    if direct is not None:
        classes = []
    captions = captions or ("template" if classes else "txt" if _any_text(folder) else "none")
    if captions == "template":
        check_template(template)
        if not classes:
            raise ConfigError(f"--captions template: {folder} has no class folders; use txt or none")
    unused = Unused()
    return Source(
        rows=_rows(folder, classes, captions, template, unused),
        load=partial(load_file, root=folder),
        captioned=captions != "none",
        identity={
            "--images": str(folder.resolve()),
            "--captions": captions,
            "--template": template if captions == "template" else None,
            "--flat": flat,
        },
        unused=unused,
    )


def _rows(folder: Path, classes: list[str], captions: str, template: str, unused: Unused) -> Iterator[Row]:
    if classes:
        for parent, names in _folders(folder, classes):
            _note_unused(parent, names, folder, captions, unused)
    for cls, name in enumerate(classes or [""]):
        for parent, names in _folders(folder / name):
            _note_unused(parent, names, folder, captions, unused)
            for path in (parent / one for one in names if _is_image(one)):
                relative = path.relative_to(folder).as_posix()
                text = path.with_suffix(".txt")
                yield Row(
                    image=relative,
                    captions=[class_caption(template, name)] if captions == "template" else [],
                    caption_file=text.relative_to(folder).as_posix() if captions == "txt" and text.is_file() else None,
                    cls=cls if classes else None,
                    info={"path": relative, **({"class": name} if classes else {})},
                )


def _note_unused(parent: Path, names: list[str], folder: Path, captions: str, unused: Unused) -> None:
    with_caption = {os.path.splitext(name)[0] + ".txt" for name in names if _is_image(name)}
    for name in names:
        suffix = os.path.splitext(name)[1].lower()
        if captions == "txt" and suffix == ".txt":
            if name not in with_caption:
                unused.add_caption((parent / name).relative_to(folder).as_posix())
        elif not _is_image(name):
            unused.suffixes[suffix or name] += 1


def _folders(folder: Path, leave_out: Sequence[str] = ()) -> Iterator[tuple[Path, list[str]]]:
    """Every folder from ``folder`` down with the names of its files, in order, without its subfolders ``leave_out``."""
    for parent, folders, files in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in leave_out)
        leave_out = ()
        yield Path(parent), sorted(name for name in files if not name.startswith("."))


def _images(folder: Path, leave_out: Sequence[str] = ()) -> Iterator[Path]:
    """Paths below ``folder``, as :func:`_folders`."""
    return (parent / name for parent, names in _folders(folder, leave_out) for name in names if _is_image(name))


def _is_image(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in SUFFIXES


def _any_text(folder: Path) -> bool:
    return any(path.with_suffix(".txt").is_file() for path in _images(folder))


def _is_class(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir() and not entry.name.startswith(".")
