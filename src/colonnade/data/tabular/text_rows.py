"""Index of the rows of a delimited text file: blocks of some megabytes that can be read in any order.

A row ends at a newline outside quotes, i.e. one after an even number of quotes. So a quoted field may span lines.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from colonnade.data.lines import NEWLINE, check_not_gzipped, check_regular_file, read_range
from colonnade.errors import DataError

BLOCK_BYTES = 4 << 20
"""Number of bytes within which the rows of a block end."""
HEAD_BYTES = 1 << 20
"""Bytes of a file of which the first line is looked at for its delimiter."""
BOM = b"\xef\xbb\xbf"
CARRIAGE_RETURN = 0x0D


@dataclass(frozen=True, slots=True, eq=False)
class TextRows:
    """Index of the blocks of a text file. A last row without a newline counts."""

    path: Path
    num_bytes: int
    header: bytes  # the header row, with its newline; empty if there is none
    offsets: NDArray[
        np.int64
    ]  # (blocks + 1,) bytes before each block; the last one: the file's size
    lengths: NDArray[np.int64]  # (blocks,) rows
    lines: NDArray[np.int64]  # (blocks,) newlines before each block, in quotes or not
    has_empty: NDArray[np.bool_]  # (blocks,) whether a row of the block is an empty line

    def read_block(self, block_index: int) -> bytes:
        """Read the text of a block. Raises DataError if the file changed."""
        begin, end = self.offsets[block_index : block_index + 2].tolist()
        return read_range(self.path, begin, end, self.num_bytes)


def guess_delimiter(path: Path, names: Sequence[str] | None) -> str:
    """Return the delimiter of a text file by its first line: one that splits it into as many cells as `names` has, else
    a tab if the line has one, else its most frequent other delimiter, a blank if there is no other. Raises DataError.
    """
    head = read_range(path, 0, HEAD_BYTES, check_regular_file(path).stat().st_size)
    line = re.sub(rb'"[^"]*"', b"", head.partition(b"\n")[0])
    counts = {delimiter: line.count(delimiter.encode()) for delimiter in ",;|\t "}
    return max(
        counts,
        key=lambda delimiter: (
            0 < counts[delimiter] == len(names or "") - 1,
            delimiter == "\t" and counts[delimiter] > 0,
            delimiter != " " and counts[delimiter],
            counts[delimiter],
        ),
    )


def find_row_ends(
    block_text: bytes, quote_byte: int | None, starts_in_quotes: bool = False
) -> NDArray[np.int64]:
    """Return the positions of the newlines in `block_text` that end a row. `starts_in_quotes`: a quote is open at its
    start."""
    codes = np.frombuffer(block_text, dtype=np.uint8)
    ends = np.flatnonzero(codes == NEWLINE)
    if quote_byte is None or (not starts_in_quotes and block_text.find(quote_byte) < 0):
        return ends
    quotes = np.flatnonzero(codes == quote_byte)
    is_quoted = (np.searchsorted(quotes, ends) + starts_in_quotes) & 1
    return ends[is_quoted == 0]


def index_rows(path: Path, quote: str | None, *, has_header: bool, block_bytes: int) -> TextRows:
    """Read the file once to index its rows. Raises DataError: empty, compressed, not UTF-8, an unclosed quote."""
    check_regular_file(path)
    code = None if quote is None else ord(quote)
    offsets: list[int] = [0]
    lengths: list[int] = []
    lines: list[int] = []
    has_empty: list[bool] = []
    num_bytes = num_lines = block_lines = 0
    in_quotes = False
    header = b""
    pending = b""
    quote_line = 0
    last = NEWLINE
    needs_header = has_header
    try:
        with path.open("rb") as file:
            while text := file.read(block_bytes):
                if num_bytes == 0:
                    _check_is_text(path)
                    if text.startswith(BOM):
                        offsets[0] = len(BOM)
                ends = find_row_ends(text, code, in_quotes)
                newlines = text.count(b"\n")
                if code is not None and (quotes := text.count(code)):
                    in_quotes ^= quotes % 2 == 1
                    quote_line = num_lines + text.count(b"\n", 0, text.rfind(code)) + 1
                if needs_header and len(ends):
                    cut = int(ends[0]) + 1
                    header = (pending + text[:cut])[offsets[0] :]
                    ends = ends[1:]
                    offsets[0] = num_bytes + cut
                    block_lines = num_lines + text.count(b"\n", 0, cut)
                    needs_header = False
                    pending = b""
                elif needs_header:
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
    if needs_header:
        header = pending[offsets[0] :]
        offsets[0] = num_bytes
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
        header,
        np.array(offsets, np.int64),
        np.array(lengths, np.int64),
        np.array(lines, np.int64),
        np.array(has_empty, np.bool_),
    )


def _has_empty_row(
    block_text: bytes, previous_byte: int, row_ends: NDArray[np.int64], begin_position: int
) -> bool:
    """Return whether a row that ends at one of `row_ends` in `block_text` is empty except for its newline.

    The first row begins at `begin_position`, which is negative if it is in an earlier text, with the last byte
    `previous_byte`.
    """
    lengths = np.diff(row_ends, prepend=begin_position - 1) - 1
    if lengths.min() > 1:
        return False
    codes = np.frombuffer(block_text, dtype=np.uint8)
    returns = np.where(row_ends > 0, codes[row_ends - 1], previous_byte) == CARRIAGE_RETURN
    return bool(((lengths == 0) | ((lengths == 1) & returns)).any())


def _check_is_text(path: Path) -> None:
    with path.open("rb") as file:
        text = file.read(4)
    check_not_gzipped(path, text)
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
