from __future__ import annotations

import pytest

from dsclr.units import format_bytes, format_fractions, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GB", 80 * 10**9), ("1.5 GiB", 3 * 2**29), ("4e9", 4 * 10**9), (123, 123), ("7k", 7000), ("0", 0)],
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1", "8 XB", "1.2.3", True, None, "auto", "1e400"])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match="no size in bytes"):
        parse_bytes(text)


def test_written():
    assert [format_bytes(x) for x in (0, 999, 1000, 9_660_000_000, 2e15)] == [
        "0 B",
        "999 B",
        "1 kB",
        "9.66 GB",
        "2e+03 TB",
    ]


@pytest.mark.parametrize(
    ("value", "limit", "texts"),
    [
        (0.833, 0.01, ("83.3%", "1.0%")),
        (0.01, 0.001, ("1.0%", "0.1%")),
        (0.01, 0.00001, ("1.000%", "0.001%")),
        (0.010001, 0.01, ("1.0001%", "1.0000%")),
        (1 / 3, 1 / 3, ("33.333333333333%", "33.333333333333%")),
        (1.0, 0.0, ("100.0%", "0.0%")),
    ],
)
def test_a_fraction_beside_its_limit(value, limit, texts):
    assert format_fractions(value, limit) == texts
