"""Letters from every rank to every other: straight, or by way of the receivers' towers (SPTT of DMT, Luo et al. 2024).

A letter is a block of bytes, and the sizes of its parts travel before it. By towers a rank hands all its letters for
one tower to its peer there, the rank of its own number, in one message over the slow link; the peer hands each on to
its receiver, with those of the peers of all other towers, in one message. So a rank exchanges slow messages with as
many others as there are other towers. Letters are not opened on the way: what a receiver gets is what it gets straight,
to the byte.

Legend: N ranks, T towers of S ranks, E parts of a letter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, TypeVar, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from colonnade.errors import WorldError
from colonnade.topology.mesh import IN_TOWER, OVER_TOWERS, Mesh, open_towers
from colonnade.topology.towers import tower_ranks

IdRoute = Literal["straight", "by_towers"]
ROUTES = get_args(IdRoute)
RELAYED = ("route", "evaluate")
"""Purposes whose letters may go by towers."""
Sizes = NDArray[np.int32]
Letters = NDArray[np.uint8]
Item = TypeVar("Item")


def by_towers(mesh: Mesh, num_towers: int | None = None) -> Mesh:
    """Collective: `mesh`, whose letters go by so many towers, default one for each host; as it is, where a tower is one
    rank or all, for then there is no other way. Raises ConfigError for towers that this world has not."""
    size = len(tower_ranks(mesh.world, num_towers or mesh.world.num_hosts)[0])
    if not 1 < size < mesh.num_ranks:
        return mesh
    open_towers(mesh, size, RELAYED)
    return replace(mesh, relay=size)


def delivered(
    mesh: Mesh,
    sizes: Sizes,
    letters: Letters,
    head_bytes: int,
    purpose: str,
    counts_as: str,
) -> tuple[Sizes, Letters]:
    """Collective on `purpose`'s groups. sizes (N, E), of the parts of the letter for each rank, in bytes; a letter is
    `head_bytes` more. Returns (those of the letters from each rank, these side by side, in the order of ranks). Raises
    WorldError where a rank tells sizes that are none."""
    if mesh.relay and purpose in RELAYED:  # a batch of no lookahead goes straight
        return _by_towers(mesh, sizes, letters, head_bytes, purpose, counts_as)
    one = [1] * mesh.num_ranks
    told, _ = mesh.all_to_all(purpose, torch.from_numpy(sizes), one, one, counts_as=counts_as)
    theirs = _checked(told.numpy(), range(mesh.num_ranks))
    received, _ = mesh.all_to_all(
        purpose, torch.from_numpy(letters), _lengths(sizes, head_bytes).tolist(),
        _lengths(theirs, head_bytes).tolist(), counts_as=counts_as,
    )  # fmt: skip
    return theirs, received.numpy()


def _by_towers(
    mesh: Mesh,
    sizes: Sizes,
    letters: Letters,
    head_bytes: int,
    purpose: str,
    counts_as: str,
) -> tuple[Sizes, Letters]:
    size, count = mesh.relay, mesh.num_ranks // mesh.relay
    over, inside = f"{purpose}{OVER_TOWERS}{size}", f"{purpose}{IN_TOWER}{size}"
    each, alike = [size] * count, [count] * size
    every = np.arange(mesh.num_ranks).reshape(count, size)
    # Ranks come tower after tower, so those of one are side by side.
    told, _ = mesh.all_to_all(over, torch.from_numpy(sizes), each, each, counts_as=counts_as)
    heard = _checked(told.numpy(), np.repeat(every[:, mesh.rank % size], size))
    here = _lengths(heard, head_bytes)
    sent = torch.from_numpy(letters)
    got, call = mesh.all_to_all(
        over, sent, _lengths(sizes, head_bytes).reshape(count, size).sum(1).tolist(),
        here.reshape(count, size).sum(1).tolist(), wait=False, counts_as=counts_as,
    )  # fmt: skip
    # While letters travel, their sizes go on.
    turned = np.ascontiguousarray(heard[_order(count, size)])
    told, _ = mesh.all_to_all(inside, torch.from_numpy(turned), alike, alike, counts_as=counts_as)
    if call is not None:
        call.wait()
    theirs = _checked(told.numpy(), every.T.ravel())
    handed_on = np.concatenate(across(_cut(got.numpy(), here), count, size))
    there = _lengths(theirs, head_bytes)
    received, _ = mesh.all_to_all(
        inside, torch.from_numpy(handed_on), _lengths(turned, head_bytes).reshape(size, count).sum(1).tolist(),
        there.reshape(size, count).sum(1).tolist(), counts_as=counts_as,
    )  # fmt: skip
    # Number after number in a tower, tower after tower: back into the order of ranks.
    found = np.concatenate(across(_cut(received.numpy(), there), size, count))
    return np.ascontiguousarray(theirs[_order(size, count)]), found


def across(items: Sequence[Item], rows: int, columns: int) -> list[Item]:
    """Of a table of so many rows, listed row after row: column after column."""
    return [items[row * columns + column] for column in range(columns) for row in range(rows)]


def _order(rows: int, columns: int) -> list[int]:
    return across(range(rows * columns), rows, columns)


def _lengths(sizes: Sizes, head_bytes: int) -> NDArray[np.int64]:
    return head_bytes + sizes.sum(1, dtype=np.int64)


def _cut(data: Letters, lengths: NDArray[np.int64]) -> list[Letters]:
    return np.split(data, lengths.cumsum()[:-1])


def _checked(sizes: Sizes, senders: Sequence[int] | NDArray[np.int64]) -> Sizes:
    """senders: the rank that each row is from."""
    if (sizes < 0).any():
        row = int((sizes < 0).any(1).argmax())
        raise WorldError(
            f"rank {senders[row]} told sizes {sizes[row].tolist()} of its messages, wanted 0 or more; all ranks must "
            "run one version of Colonnade"
        )
    return sizes
