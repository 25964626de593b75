"""Captions and ids from the bytes of a sample's members."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Callable, Mapping
from typing import Literal

from torch import Tensor

from dsclr.data.causes import BadSample

Members = Mapping[str, bytes]

_ENDLESS_WORD = re.compile(r"(\S{1000})\S+")


def read_captions(members: Members, source: str, empty: Literal["skip", "use"] = "skip") -> list[str]:
    """All captions of a sample, stripped: of member ``source`` ("txt": one), or of "json:FIELD", a string or a list.

    Args:
        empty: a sample without a caption that shows anything is bad ("skip"), or has the empty caption ("use"). Of
            several captions the empty ones are left out either way.

    Raises:
        BadSample: missing_caption, broken_caption or empty_caption.
    """
    if source.startswith("json:"):
        value = read_json_field(members, source.removeprefix("json:"), "missing_caption")
        found = value if isinstance(value, list) else [value]
        captions = [caption for caption in found if isinstance(caption, str)]
        if not captions or len(captions) < len(found):
            raise BadSample("missing_caption", f"{source} is {value!r}, a string or a list of strings is expected")
    elif source in members:
        try:
            captions = [members[source].decode("utf-8-sig")]
        except UnicodeDecodeError as error:
            raise BadSample("broken_caption", f"{source} is not UTF-8: {error}") from None
    else:
        raise BadSample("missing_caption", f"no {source} among {', '.join(sorted(members))}")
    captions = [caption.strip() for caption in captions]
    for caption in captions:
        check_text(caption, source)
    written = [caption for caption in captions if not is_blank(caption)]
    if not written and empty == "skip":
        raise BadSample("empty_caption", f"{source} holds no text")
    return written or [""]


def shortened(caption: str) -> str:
    """With no word longer than any that people write: open_clip's tokenizer takes minutes over 100,000 letters."""
    return _ENDLESS_WORD.sub(r"\1", caption)


def check_text(caption: str, where: str) -> None:
    """Raises BadSample("broken_caption") for what no tokenizer should see."""
    if any("\ud800" <= letter <= "\udfff" for letter in caption):
        raise BadSample("broken_caption", f"{where} holds half a surrogate pair, which is no text")
    # UTF-16 without its mark passes for UTF-8 where it is all ASCII.
    if "\0" in caption:
        raise BadSample("broken_caption", f"{where} holds zero bytes, which are no text (UTF-16?)")


def is_blank(caption: str) -> bool:
    """Whether nothing of a caption shows."""
    return all(unicodedata.category(letter) in ("Cc", "Cf", "Zl", "Zp", "Zs") for letter in caption)


def read_json_field(members: Members, field: str, cause: str) -> object:
    """Field of the json member. Raises BadSample(cause)."""
    try:
        return json.loads(members["json"])[field]
    except KeyError as error:
        raise BadSample(cause, f"no {error} in the json member or no such member") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise BadSample("broken_json", str(error)) from None


def read_id(members: Members, source: str, shard: str, key: str, captions: list[str]) -> int:
    """The int64 that tells which samples are the same.

    Args:
        source: "caption" (all of them together), "key" (shard and key), "cls", or "json:FIELD".
        captions: of the sample; empty where it has none.
    """
    if source == "caption" and captions:
        return hash_id("\0".join(captions))
    if source == "cls":
        if "cls" not in members:
            raise BadSample("missing_id", f"no cls among {', '.join(sorted(members))}")
        return hash_id(members["cls"].decode("utf-8", "replace").strip())
    if source.startswith("json:"):
        return hash_id(json.dumps(read_json_field(members, source.removeprefix("json:"), "missing_id")))
    return hash_id(f"{shard}\0{key}")


def padding_token(tokenizer: Tokenizer) -> int | None:
    """What an open_clip tokenizer fills up with; None for another one."""
    return int(tokenizer([""])[0][-1]) if hasattr(tokenizer, "context_length") else None


def is_cut_off(tokenizer: Tokenizer, caption: str, tokens: Tensor, padding: int | None) -> bool:
    """Whether a caption has more tokens than the model reads.

    Args:
        tokens: (L,) what the tokenizer made of the caption.
        padding: of :func:`padding_token`; with None the answer is no.
    """
    if padding is None or tokens[-1] == padding:
        return False
    # Exactly full, or cut off: with room for one more token it shows.
    longer: Callable[..., Tensor] = tokenizer
    return bool(longer([caption], context_length=len(tokens) + 1)[0][-1] != padding)


def hash_id(text: str) -> int:
    """A stable 63-bit hash: the same in every process and on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little") >> 1


Tokenizer = Callable[[list[str]], Tensor]
