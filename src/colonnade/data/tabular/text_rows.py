"""Where the rows of a delimited text file lie: blocks of some megabytes, reachable without reading what is before them.

A row ends at a newline that is not inside quotes, that is, one with an even number of quotes before it. So a quoted
field may span lines.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from colonnade.data.lines import GZIP_MAGIC, NEWLINE, check_regular
from colonnade.errors import DataError

BLOCK_BYTES = 4 << 20
"""Rows that end within so many bytes are one block."""
BOM = b"\xef\xbb\xbf"
CARRIAGE_RETURN = 0x0D


@dataclass(frozen=True, slots=True, eq=False)
class TextRows:
    """The index of one file. A last row without a newline counts."""

    path: Path
    num_bytes: int
    head: bytes  # the header row, with its newline; empty where there is none
    offsets: NDArray[
        np.int64
    ]  # (blocks + 1,) bytes before each block; the last one: the file's size
    lengths: NDArray[np.int64]  # (blocks,) rows
    lines: NDArray[np.int64]  # (blocks,) newlines before each block, in quotes or not
    has_empty: NDArray[np.bool_]  # (blocks,) whether a row of the block is an empty line

    def read(self, block: int) -> bytes:
        begin, end = int(self.offsets[block]), int(self.offsets[block + 1])
        try:
            with self.path.open("rb") as file:
                if os.fstat(file.fileno()).st_size != self.num_bytes:
                    raise DataError(
                        f"{self.path}: its size was {self.num_bytes} bytes when it was opened and has changed "
                        "since. Leave the file alone while it is read, and open it again"
                    )
                file.seek(begin)
                return file.read(end - begin)
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read ({error.strerror})") from None


def row_ends(text: bytes, quote: int | None, in_quotes: bool = False) -> NDArray[np.int64]:
    """Positions of the newlines in `text` that end a row. `in_quotes`: a quote is open where it begins."""
    codes = np.frombuffer(text, dtype=np.uint8)
    ends = np.flatnonzero(codes == NEWLINE)
    if quote is None or (not in_quotes and text.find(quote) < 0):
        return ends
    quotes = np.flatnonzero(codes == quote)
    opened = (np.searchsorted(quotes, ends) + in_quotes) & 1
    return ends[opened == 0]


def open_rows(path: Path, quote: str | None, *, has_header: bool, block_bytes: int) -> TextRows:
    """Read the file once to index it. Raises DataError: empty, packed, another encoding, a quote left open."""
    check_regular(path)
    code = None if quote is None else ord(quote)
    offsets: list[int] = [0]
    lengths: list[int] = []
    lines: list[int] = []
    has_empty: list[bool] = []
    num_bytes = num_lines = block_lines = 0
    in_quotes, head, pending = False, b"", b""
    quote_line, last = 0, NEWLINE
    needs_head = has_header
    try:
        with path.open("rb") as file:
            while text := file.read(block_bytes):
                if num_bytes == 0:
                    _refuse_other_kinds(path)
                    if text.startswith(BOM):
                        offsets[0] = len(BOM)
                ends = row_ends(text, code, in_quotes)
                newlines = text.count(b"\n")
                if code is not None and (quotes := text.count(code)):
                    in_quotes ^= quotes % 2 == 1
                    quote_line = num_lines + text.count(b"\n", 0, text.rfind(code)) + 1
                if needs_head and len(ends):
                    cut = int(ends[0]) + 1
                    head = (pending + text[:cut])[offsets[0] :]
                    ends = ends[1:]
                    offsets[0] = num_bytes + cut
                    block_lines = num_lines + text.count(b"\n", 0, cut)
                    needs_head, pending = False, b""
                elif needs_head:
                    pending += text
                if len(ends):
                    lengths.append(len(ends))
                    lines.append(block_lines)
                    has_empty.append(_has_empty_row(text, last, ends, offsets[-1] - num_bytes))
                    offsets.append(num_bytes + int(ends[-1]) + 1)
                    block_lines = num_lines + text.count(b"\n", 0, int(ends[-1]) + 1)
                num_bytes += len(text)
                num_lines += newlines
                last = text[-1]
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    if num_bytes == 0:
        raise DataError(
            f"{path}: got an empty file, wanted a header and rows. Was it fully written?"
        )
    if in_quotes:
        raise DataError(
            f"{path}: got a quote that is never closed (an odd number of {quote}, the last in line {quote_line}), "
            "wanted them in pairs. Close it, or say that the file has no quotes: quote: none"
        )
    if needs_head:
        head, offsets[0] = pending[offsets[0] :], num_bytes
    elif offsets[-1] < num_bytes:
        # The last row, which no newline ends.
        assert last != NEWLINE
        if lengths:
            offsets[-1] = num_bytes
            lengths[-1] += 1
        else:
            offsets.append(num_bytes)
            lengths.append(1)
            lines.append(block_lines)
            has_empty.append(False)
    return TextRows(
        path,
        num_bytes,
        head,
        np.array(offsets, np.int64),
        np.array(lengths, np.int64),
        np.array(lines, np.int64),
        np.array(has_empty, np.bool_),
    )


def _has_empty_row(text: bytes, before: int, ends: NDArray[np.int64], begin: int) -> bool:
    """Whether a row that ends at one of `ends` in `text` is nothing but its newline.

    The first row begins at `begin`, below 0 where that is in an earlier text, whose last byte is `before`.
    """
    lengths = np.diff(ends, prepend=begin - 1) - 1
    if lengths.min() > 1:
        return False
    codes = np.frombuffer(text, dtype=np.uint8)
    returns = np.where(ends > 0, codes[ends - 1], before) == CARRIAGE_RETURN
    return bool(((lengths == 0) | ((lengths == 1) & returns)).any())


def _refuse_other_kinds(path: Path) -> None:
    with path.open("rb") as file:
        text = file.read(4)
    if text.startswith(GZIP_MAGIC):
        raise DataError(
            f"{path}: got a gzip file (it starts with 1f 8b), wanted plain text. Unpack it first: gunzip {path.name}"
        )
    if text.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(
            f"{path}: got UTF-16 text, wanted UTF-8. Convert it: iconv -f utf-16 -t utf-8"
        )
    if text.startswith(b"PAR1"):
        raise DataError(
            f"{path}: got a Parquet file, wanted text. Open it as parquet (--data parquet)"
        )
    if b"\0" in text[:4096]:
        raise DataError(f"{path}: got a binary file (it holds zero bytes), wanted UTF-8 text")
