"""Request bodies of `bench serve`, made once for all systems: Open Inference Protocol v2 with binary tensors.

Legend: P bodies, L bytes of each, F fields, N candidates, n dense columns.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

HEADER_LENGTH = "inference-header-content-length"
NUM_DENSE = 13
KINDS = {"f": ("FP32", "<f4"), "i": ("INT64", "<i8")}


@dataclass(frozen=True)
class RequestPool:
    """Bodies of one length, with JSON parts of one length."""

    bodies: NDArray[np.uint8]  # (P, L)
    header_length: int

    def save(self, path: Path) -> None:
        np.savez(path, bodies=self.bodies, header_length=self.header_length)


def load_requests(path: Path | str) -> RequestPool:
    """Return the bodies that `write_requests` wrote."""
    with np.load(path) as content:
        return RequestPool(content["bodies"], int(content["header_length"]))


def write_requests(
    path: Path,
    rows: Sequence[int],
    *,
    num_candidates: int,
    num_requests: int,
    exponent: float,
    num_shared: int = 0,
    seed: int = 0,
) -> None:
    """Write bodies of candidates with ids of the fields' rows. num_shared: the dense values and the first so many
    fields are a user's, sent once for all candidates."""
    generator = np.random.default_rng(seed)
    size = (num_requests, num_candidates)
    ids = [
        draw_ids(count, exponent, (num_requests, 1) if f < num_shared else size, f, generator)
        for f, count in enumerate(rows)
    ]
    num_rows = 1 if num_shared else num_candidates
    dense = generator.standard_normal((num_requests, num_rows, NUM_DENSE), np.float32)
    names = [f"C{f + 1}" for f in range(len(rows))]
    parts = [
        build_body({"dense": dense[p], **{n: ids[f][p] for f, n in enumerate(names)}})
        for p in range(num_requests)
    ]
    bodies = np.stack([np.frombuffer(body, np.uint8) for body, _ in parts])
    RequestPool(bodies, parts[0][1]).save(path)


def draw_ids(
    rows: int, exponent: float, size: tuple[int, ...], field: int, generator: np.random.Generator
) -> NDArray[np.int64]:
    """Draw ids whose popularity falls with rank ** -exponent (not 1); which are popular differs by field.

    Ranks are drawn by the inverse of the continuous distribution, so that no table of all rows is needed.
    """
    end = float(rows + 1) ** (1 - exponent)
    uniform = generator.random(size)
    rank = (1 + uniform * (end - 1)) ** (1 / (1 - exponent)) - 1
    rank = np.minimum(rank.astype(np.int64), rows - 1)
    factor = next(f for f in range(int(0.618 * rows) | 1, 2 * rows + 2) if gcd(f, rows) == 1)
    return (rank * factor + (field + 1) * (rows // 27)) % rows


def build_body(tensors: dict[str, NDArray[Any]]) -> tuple[bytes, int]:
    """Return a body with these input tensors, whose answer is binary, too, and the length of its JSON part."""
    inputs, parts = [], []
    for name, tensor in tensors.items():
        datatype, dtype = KINDS[tensor.dtype.kind]
        content = np.ascontiguousarray(tensor, dtype).tobytes()
        parts.append(content)
        inputs.append({
            "name": name, "datatype": datatype, "shape": list(tensor.shape),
            "parameters": {"binary_data_size": len(content)},
        })  # fmt: skip
    header = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    header += b" " * (-len(header) % 8)  # tensors are aligned, so that no server needs to copy them
    return b"".join([header, *parts]), len(header)


def parse_scores(body: bytes, header_length: int) -> list[float]:
    """Return the scores of a binary answer, whose only output is FP64."""
    return np.frombuffer(body, "<f8", offset=header_length).tolist()
