"""Every broken or odd sample and shard goes through the real loaders: right pixels, or skipped under the right cause."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from tests.data.torture import (
    SIDE,
    captions,
    config,
    evaluate_once,
    image,
    jpegs,
    json_captions,
    no_images,
    other_images,
    pngs,
    tiffs,
    tokens_of,
    train_once,
    webps_and_gifs,
    write_cases,
)
from tests.data import torture
from pathlib import Path

NOWHERE = Path("nowhere")
IMAGES = [*jpegs(), *pngs(), *webps_and_gifs(), *tiffs(), *other_images()]
GROUPS = {
    "images": [case.name for case in IMAGES],
    "no_images": [case.name for case in no_images(NOWHERE)],
    "captions": [case.name for case in captions(NOWHERE)],
    "json": [case.name for case in json_captions()],
}
LAST = image("zz-last", torture.encode(torture.COLOURS))


@pytest.fixture(scope="module")
def trap(tmp_path_factory):
    return tmp_path_factory.mktemp("trap") / "unpickled"


@pytest.fixture(scope="module")
def ran(tmp_path_factory, trap):
    """Group -> (cases, what training makes of them, what evaluation makes of them, the training loader)."""
    folder = tmp_path_factory.mktemp("torture")
    groups = {"images": IMAGES, "no_images": no_images(trap), "captions": captions(trap), "json": json_captions()}
    results = {}
    for group, cases in groups.items():
        # A good one at the end: what is skipped counts with the batch that passes it.
        last = LAST if group != "json" else torture.text("zz-last", b'{"c": "zz-last"}', "zz-last", "json")
        shard = write_cases(folder / f"{group}.tar", [*cases, last])
        cfg = config(folder, str(shard), caption="json:c" if group == "json" else "txt", workers=1)
        outcomes = evaluate_once(cfg, str(shard))
        results[group] = ({c.name: (c, o) for c, o in zip([*cases, last], outcomes)}, cfg, len(cases) + 1)
    return results


@pytest.mark.parametrize(("group", "name"), [(group, name) for group, names in GROUPS.items() for name in names])
def test_sample(ran, group, name):
    case, outcome = ran[group][0][name]
    assert outcome.cause == case.cause, outcome.detail
    if case.cause is None:
        assert outcome.tokens == tuple(tokens_of(case.caption))
        sharp = [i for i in range(SIDE) if not SIDE // 2 - case.blurred <= i < SIDE // 2 + case.blurred]
        difference = np.abs(outcome.pixels.astype(int) - np.asarray(case.pixels).astype(int))[np.ix_(sharp, sharp)]
        assert int(difference.max()) <= case.within, outcome.pixels[8::16, 8::16]
