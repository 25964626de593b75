"""A table of image paths and captions: csv, tsv, jsonl or parquet."""

from __future__ import annotations

import csv
import difflib
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dsclr.config import ConfigError
from dsclr.data.causes import BadSample
from dsclr.data.writing.captions import is_missing, present_captions, split_list
from dsclr.data.writing.source import Row, Source, load_file

# Lines of a jsonl file that are searched for names of columns: a line leaves out what it has no value for.
HEAD_LINES = 1000

_DELIMITERS = {".csv": ",", ".tsv": "\t"}

# A row by column, or why it is none.
Record = dict[str, Any] | BadSample


def table_source(
    table: Path, image_column: str, caption_columns: Sequence[str], root: Path | None, captioned: bool = True
) -> Source:
    """The rows of a table, in order.

    Args:
        table: .csv, .tsv (both with a header line), .jsonl or .parquet.
        image_column: of paths, absolute or below ``root``.
        caption_columns: of captions or lists of captions.
        root: None: the folder of the table.
        captioned: False: images only, and the caption columns are columns like others.

    Raises:
        ConfigError: no such file, a kind that cannot be read, an unknown column, or no row; while rows are read:
            the file is damaged.
    """
    if not table.is_file():
        raise ConfigError(f"--table: file {table} does not exist" + (" (it is a folder)" if table.is_dir() else ""))
    if root is not None and not root.is_dir():
        raise ConfigError(f"--root: folder {root} does not exist")
    captions = list(dict.fromkeys(caption_columns)) if captioned else []
    columns = _columns(table)
    for option, names in (("--image-column", [image_column]), ("--caption-column", captions)):
        for name in names:
            if name not in columns:
                close = difflib.get_close_matches(name, columns, n=1, cutoff=0.5)
                hint = f" (did you mean {close[0]!r}?)" if close else ""
                raise ConfigError(f"{option}: {table} has no column {name!r}{hint}; its columns: {', '.join(columns)}")
    first = next(_records(table), None)
    if first is None:
        raise ConfigError(f"--table: {table} is empty: it has no rows below its header")
    return Source(
        rows=(_row(record, table, image_column, captions) for record in _records(table)),
        load=partial(load_file, root=root or table.parent),
        captioned=captioned,
        identity={
            "--table": str(table.resolve()),
            "--image-column": image_column,
            "--caption-column": captions or None,
            "--root": str((root or table.parent).resolve()),
        },
        fields=[name for name in columns if name not in captions],
    )


def _row(record: Record, table: Path, image_column: str, caption_columns: list[str]) -> Row:
    if isinstance(record, BadSample):
        return Row("", problem=(record.cause, str(record)))
    path = record.get(image_column)
    if is_missing(path):
        return Row("", problem=("missing_path", f"the column {image_column} is empty"))
    if not isinstance(path, str):
        raise ConfigError(
            f"--image-column: {image_column!r} in {table} holds {type(path).__name__}, paths are expected; "
            "write the images into files first"
        )
    info = {name: _plain(value, name, table) for name, value in record.items() if name not in caption_columns}
    try:
        captions = present_captions(one for name in caption_columns for one in split_list(record.get(name)))
    except BadSample as bad:
        return Row(path, problem=(bad.cause, str(bad)))
    return Row(path, captions=list(dict.fromkeys(captions)), info=info)


def _plain(value: Any, column: str, table: Path) -> Any:
    """A value as JSON can hold it: NaN as null, dates and the like as text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, list | tuple):
        return [_plain(one, column, table) for one in value]
    if isinstance(value, dict):
        return {str(name): _plain(one, column, table) for name, one in value.items()}
    if isinstance(value, bytes):
        raise ConfigError(f"--table: column {column!r} of {table} holds bytes, which JSON cannot: leave it out")
    return str(value)


def _columns(table: Path) -> list[str]:
    suffix = table.suffix.lower()
    if suffix in _DELIMITERS:
        columns = next(_lines(table), (0, []))[1]
    elif suffix == ".jsonl":
        head = itertools.islice(_json_records(table), HEAD_LINES)
        columns = list(dict.fromkeys(name for record in head if isinstance(record, dict) for name in record))
    elif suffix == ".parquet":
        columns = list(_parquet(table).schema_arrow.names)
    else:
        raise ConfigError(f"--table: {table} ends in {suffix!r}; .csv, .tsv, .jsonl and .parquet can be read")
    if not columns:
        raise ConfigError(f"--table: {table} is empty: it names no columns")
    twice = sorted({name for name in columns if columns.count(name) > 1})
    if twice:
        raise ConfigError(f"--table: {table} has more than one column {twice[0]!r}; rename one")
    return columns


def _records(table: Path) -> Iterator[Record]:
    suffix = table.suffix.lower()
    if suffix in _DELIMITERS:
        return _delimited_records(table)
    return _json_records(table) if suffix == ".jsonl" else _parquet_records(table)


def _lines(table: Path) -> Iterator[tuple[int, list[str]]]:
    """(line number, cells), the header first, without empty lines."""
    # Without newline="" a line end inside a quoted caption would be changed.
    with table.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=_DELIMITERS[table.suffix.lower()])
        try:
            for cells in reader:
                if cells:
                    yield reader.line_num, cells
        except csv.Error as error:
            raise ConfigError(
                f"--table: {table}, before line {reader.line_num}: {error}; is a quotation mark never closed?"
            ) from None
        except UnicodeDecodeError as error:
            raise _not_utf8(table, error) from None


def _delimited_records(table: Path) -> Iterator[Record]:
    lines = _lines(table)
    _, columns = next(lines)
    for number, cells in lines:
        if len(cells) == len(columns):
            yield dict(zip(columns, cells, strict=True))
        else:
            yield BadSample("broken_row", f"line {number} has {len(cells)} cells, the header {len(columns)}")


def _json_records(table: Path) -> Iterator[Record]:
    with table.open(encoding="utf-8-sig") as file:
        try:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _json_record(line, number)
        except UnicodeDecodeError as error:
            raise _not_utf8(table, error) from None


def _json_record(line: str, number: int) -> Record:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        return BadSample("broken_row", f"line {number} is no JSON: {error}")
    return record if isinstance(record, dict) else BadSample("broken_row", f"line {number} is no JSON object")


def _parquet_records(table: Path) -> Iterator[Record]:
    batches = _parquet(table).iter_batches()
    while True:
        try:
            batch = next(batches, None)
        except (OSError, ValueError) as error:  # Arrow's own errors are ValueErrors
            raise ConfigError(f"--table: {table} is damaged: {error}") from None
        if batch is None:
            return
        yield from batch.to_pylist()


def _parquet(table: Path) -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(
            f"--table: {table} needs pyarrow, which is not installed: pip install 'dsclr[tables]', or save the table "
            "as .csv or .jsonl"
        ) from None
    try:
        return pyarrow.parquet.ParquetFile(table)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--table: {table} is no parquet file: {error}") from None


def _not_utf8(table: Path, error: UnicodeDecodeError) -> ConfigError:
    return ConfigError(f"--table: {table} is not UTF-8 ({error.reason}): convert it, for example with iconv")
