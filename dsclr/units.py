"""Sizes as people write them."""

from __future__ import annotations

import re

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def parse_bytes(text: str | int | float) -> int:
    """ "80GB", "1.5 GiB", "4e9" or a number, in bytes; GB is 10^9, GiB is 2^30.

    Raises:
        ValueError: anything else, or a negative number.
    """
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([KMGT]?I?)B?\s*", str(text), re.IGNORECASE)
    try:
        if match is None:
            raise ValueError
        return int(float(match[1]) * _UNITS[match[2].upper()])
    except (ValueError, KeyError, OverflowError):
        raise ValueError(f'{text!r} is no size in bytes; write a number, "8GB" or "8GiB"') from None


def format_fractions(value: float, limit: float) -> tuple[str, str]:
    """Both in percent, with as many decimals as the limit has and as tell them apart: "0.13%", "0.10%"."""
    for digits in range(1, 13):
        texts = f"{value:.{digits}%}", f"{limit:.{digits}%}"
        if (value == limit or texts[0] != texts[1]) and round(limit, digits + 2) == limit:
            break
    return texts


def format_bytes(size: float) -> str:
    """Three digits with a decimal unit: "9.66 GB"."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(size) < 999.5 or unit == "TB":
            return f"{size:.3g} {unit}"
        size /= 1000
    raise AssertionError
