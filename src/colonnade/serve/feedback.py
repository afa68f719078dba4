"""Feedback: scores that were answered, with the labels that came later, and the AUC of the newest pairs.

Worker processes share the pairs in one file of fixed size in the server's private folder: the number of all pairs so
far, and a ring of the newest ones.
"""

from __future__ import annotations

import fcntl
import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colonnade.errors import StorageError
from colonnade.serve.protocol import RequestError, quote_value
from colonnade.train.metrics import auc

WINDOW = 20_000
"""Number of newest pairs that the AUC is computed from."""
PAIR = np.dtype([("score", "<f8"), ("label", "<f8")])
TOTAL_BYTES = 8
"""Bytes of the number of all pairs, at the beginning of the file."""
FIELDS = ("scores", "labels")


@dataclass(frozen=True, slots=True)
class FeedbackSummary:
    """Summary of the newest pairs."""

    auc: float | None = None
    """None: the newest pairs have no positive or no negative label."""
    pairs: int = 0
    positives: int = 0
    total: int = 0
    """Number of all pairs so far, those that are forgotten included."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def parse_feedback(fields: Any, max_pairs: int) -> NDArray:
    """Return the pairs of a parsed body, (n,) PAIR. Raises RequestError (400, 413)."""
    if not isinstance(fields, dict) or set(fields) != set(FIELDS):
        names = list(fields) if isinstance(fields, dict) else fields
        raise RequestError(
            400,
            f"body: got {quote_value(names)}, wanted 'scores': [...] as the answer had them, and 'labels': [...]",
        )
    for name in FIELDS:
        if not isinstance(fields[name], list):
            raise RequestError(
                400,
                f"{name}: got {quote_value(fields[name])}, wanted an array with one number per score",
            )
    scores = fields["scores"]
    labels = fields["labels"]
    if len(scores) != len(labels):
        raise RequestError(
            400,
            f"body: got {len(scores):,} scores and {len(labels):,} labels, wanted as many of each; leave out what has "
            "no label",
        )
    if not 0 < len(scores) <= max_pairs:
        raise RequestError(
            413 if scores else 400,
            f"body: got {len(scores):,} scores, wanted 1 to {max_pairs:,}; send several requests, or raise "
            "--max-candidates",
        )
    for place, (score, label) in enumerate(zip(scores, labels, strict=True)):
        if not is_finite_number(score):
            raise RequestError(
                400,
                f"scores, place {place}: got {quote_value(score)}, wanted a finite number; send the score that the "
                "answer had",
            )
        if not isinstance(label, int | float) or label not in (0, 1):
            raise RequestError(
                400,
                f"labels, place {place}: got {quote_value(label)}, wanted 0 or 1; leave out what has no label",
            )
    pairs = np.empty(len(scores), PAIR)
    pairs["score"] = scores
    pairs["label"] = labels
    return pairs


def is_finite_number(value: object) -> bool:
    """Return whether a value of JSON is a number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer of too many digits
        return False


class FeedbackWindow:
    """Window of the newest pairs of a server. Any thread and process may use it."""

    def __init__(self, path: Path, size: int = WINDOW) -> None:
        """path: file of the pairs; created with the first one."""
        self.path = path
        self.size = size
        self._lock = threading.Lock()  # protects the summary
        self._summary = FeedbackSummary()

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return TOTAL_BYTES + self.size * PAIR.itemsize

    def add_pairs(self, pairs: NDArray) -> None:
        """Add pairs (n,) PAIR in place of the oldest ones. Raises StorageError."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with self._locked_file(os.O_RDWR | os.O_CREAT, fcntl.LOCK_EX) as file:
                if (
                    os.fstat(file).st_size != self.num_bytes
                ):  # a new file, or one with another window
                    os.ftruncate(file, 0)
                    os.posix_fallocate(file, 0, self.num_bytes)
                total = int.from_bytes(os.pread(file, TOTAL_BYTES, 0), "little") + len(pairs)
                newest = pairs[-self.size :]
                first = (total - len(newest)) % self.size
                end = self.size - first
                os.pwrite(file, newest[:end].tobytes(), TOTAL_BYTES + first * PAIR.itemsize)
                os.pwrite(file, newest[end:].tobytes(), TOTAL_BYTES)
                os.pwrite(file, total.to_bytes(TOTAL_BYTES, "little"), 0)
        except OSError as error:
            raise StorageError(
                f"{self.path}: {error.strerror or error}; make room for {self.num_bytes:,} bytes, and send the "
                "feedback again"
            ) from None

    def summarise(self) -> FeedbackSummary:
        """Compute the summary of the newest pairs, if there are new ones."""
        try:
            with self._locked_file(os.O_RDONLY, fcntl.LOCK_SH) as file:
                content = os.pread(file, self.num_bytes + 1, 0)
        except FileNotFoundError:
            return FeedbackSummary()
        if len(content) != self.num_bytes:  # not filled yet, or another window's
            return FeedbackSummary()
        total = int.from_bytes(content[:TOTAL_BYTES], "little")
        with self._lock:
            if total != self._summary.total:
                count = min(total, self.size)
                pairs = np.frombuffer(content, PAIR, count, TOTAL_BYTES)
                self._summary = summarise_pairs(pairs, total)
            return self._summary

    @contextmanager
    def _locked_file(self, flags: int, lock: int) -> Iterator[int]:
        file = os.open(self.path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(file, lock)
            yield file
        finally:
            os.close(file)


def summarise_pairs(pairs: NDArray, total: int) -> FeedbackSummary:
    """Compute the summary of pairs (n,) PAIR. The AUC is exact, and ties count half."""
    positives = int(pairs["label"].sum())
    value = auc(pairs["score"], pairs["label"]) if 0 < positives < len(pairs) else None
    return FeedbackSummary(value, len(pairs), positives, total)
