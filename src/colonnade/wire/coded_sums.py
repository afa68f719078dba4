"""Sums over ranks in fewer bits on the slow hop; what rounding took of one step is given to the next.

A rank codes what it sends to be added (its gradients; `by host` the sum of its host), and the owner of a share codes
the sum that it sends back. What rounding took there is a residual of that rank, added to what it codes in the next step
(error feedback): after T steps the applied sums are the true ones less the residuals of the last, however many they
were. Everybody decodes what was sent, the sender too, so all ranks have the same bits.

`scattered`: both legs join all ranks. `by host`: what travels inside a host is exact, and both legs join hosts.

Legend: N ranks, H hosts, L ranks of a host, n elements of the buffer, a multiple of N.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from colonnade.comm.collectives import PIECE, Way, added, copy_in_pieces, gathered, scattered
from colonnade.comm.mesh import ALL, Mesh, Scope
from colonnade.topology.world import World
from colonnade.wire.codec import CODECS, Codec, RowBlock, decode, encode

SCALE_GROUP = 512
"""Elements that share a scale or an exponent, where a codec has one: gradients of other layers lie beside them."""
CODED_DTYPES = (torch.float32, torch.float64)
"""Of gradients; those of 16 bits travel as they are, for their sums are rounded anyway."""
SIGNAL_BYTES = 24
"""Of the ranks' word on a step, which is not coded and so has a message of its own."""

State = dict[str, Any]
"""One rank's residuals as a checkpoint holds them: `DenseGradients.state`."""


@dataclass(slots=True)
class RoundingResidual:
    """What rounding took of what this rank sent on one leg, as parts of gradients as they are applied."""

    kept: Tensor  # (shares, n / N): given with the next step
    before: Tensor  # before the last step

    def encode(self, codec: Codec, values: Tensor, unit: float) -> Tensor:
        """values, as many as there are residuals, with what was kept -> uint8, share by share, to nearest. What is not
        finite leaves nothing."""
        self.kept, self.before = self.before, self.kept
        coded = []
        shares = zip(values.view(self.kept.shape), self.before, self.kept, strict=True)
        for share in shares:
            for new, owed, place in zip(*(each.split(PIECE) for each in share), strict=True):
                wanted, blocks = torch.add(new, owed, alpha=unit), _blocks(len(new))
                coded.append(encode(codec, wanted, blocks))
                decode(codec, coded[-1], blocks, place)
                torch.sub(wanted, place, out=place)
                place.div_(unit).masked_fill_(~place.isfinite(), 0.0)
        return torch.cat(coded)

    def take_back(self) -> None:
        self.kept, self.before = self.before, self.kept


class CodedSum:
    """Of one buffer of n elements."""

    def __init__(self, codec: Codec, world: World, way: Way, size: int, dtype: torch.dtype) -> None:
        """`way`: not "whole"."""
        self.codec, self.way, self.dtype = codec, way, dtype
        self.share = size // world.num_ranks
        peers = world.num_hosts if way == "by host" else world.num_ranks
        self.sent, self.summed = self._residual(peers), self._residual(1)

    def add(self, mesh: Mesh, values: Tensor, unit: float) -> None:
        """Collective, one issuing thread, in place, as `sum_over_ranks`: (n,) on the CPU. `unit`: what gradients are
        divided by before they are applied."""
        hosts, local = mesh.world.num_hosts, mesh.world.ranks_per_host
        if self.way == "by host":
            of_host = added(scattered(mesh, mesh.in_host, values, local).view(1, local, -1))
            self._add(mesh, mesh.over_hosts, of_host, (hosts, 1), unit)
            copy_in_pieces(gathered(mesh, mesh.in_host, of_host, local), values)
        else:
            self._add(mesh, ALL, values, (hosts, local), unit)

    def take_back(self) -> None:
        """What the last sum left is what was there before it."""
        self.sent.take_back()
        self.summed.take_back()

    def _add(
        self, mesh: Mesh, scope: Scope, values: Tensor, members: tuple[int, int], unit: float
    ) -> None:
        peers = members[0] * members[1]
        coded = scattered(mesh, scope, self.sent.encode(self.codec, values, unit), peers)
        parts = values.new_empty(peers, self.share)
        self._decode(coded, parts)
        total = added(parts.view(*members, -1))
        coded = gathered(mesh, scope, self.summed.encode(self.codec, total, unit), peers)
        self._decode(coded, values.view(peers, self.share))

    def _decode(self, coded: Tensor, out: Tensor) -> None:
        """(shares x bytes,) -> (shares, n / N)."""
        step = coded_share_bytes(self.codec, PIECE)
        for data, share in zip(coded.view(len(out), -1), out, strict=True):
            for bytes_of, place in zip(data.split(step), share.split(PIECE), strict=True):
                decode(self.codec, bytes_of, _blocks(len(place)), place)

    def _residual(self, shares: int) -> RoundingResidual:
        kept = torch.zeros(shares, self.share, dtype=self.dtype)
        return RoundingResidual(kept, kept.clone())


def coded_share_bytes(codec: Codec, elements: int) -> int:
    """Pure: of one share."""
    return sum(block.bytes_of(codec, torch.float32) for block in _blocks(elements))


def coded_size(name: str, elements: int, num_ranks: int) -> int:
    """Pure: bytes that stand for a buffer of so many elements, a multiple of N, as `comm.collectives.sent` takes
    them. Not for "exact"."""
    return num_ranks * coded_share_bytes(CODECS[name], elements // num_ranks)


def lost_by_parameter(states: Sequence[State | None]) -> dict[int, Tensor]:
    """Pure: all that the ranks of a checkpoint owed the dense network, by number of the parameter, flat. `states`: by
    rank
    of that world; None: it owed nothing."""
    found: dict[int, Tensor] = {}
    for rank, state in enumerate(states):
        if state is None:
            continue
        for bucket in state["buckets"]:
            for total in _place_shares(bucket, state, rank):
                sizes = [state["sizes"][number] for number in bucket["numbers"]]
                parts = total[: sum(sizes)].split(sizes)
                for number, part in zip(bucket["numbers"], parts, strict=True):
                    found[number] = found[number] + part if number in found else part
    return found


def _place_shares(bucket: Mapping[str, Any], state: State, rank: int) -> list[Tensor]:
    """What one rank owes of one bucket, each as a buffer that begins where the bucket does."""
    found = [] if bucket["owed"] is None else [bucket["owed"]]
    if bucket["sent"] is None:
        return found
    hosts, local, share = state["hosts"], state["local"], bucket["sent"].shape[1]
    first = mine = rank
    if len(bucket["sent"]) == hosts * local:  # of all ranks' shares
        first = 0
    else:  # of those that this rank sums for its host
        first = rank % local * hosts
        mine = first + rank // local
    for shares, at in ((bucket["sent"], first), (bucket["summed"], mine)):
        whole = shares.new_zeros(hosts * local, share)
        whole[at : at + len(shares)] = shares
        found.append(whole.view(-1))
    return found


def _blocks(elements: int) -> list[RowBlock]:
    full, rest = divmod(elements, SCALE_GROUP)
    return [RowBlock(full, (SCALE_GROUP,))] + [RowBlock(1, (rest,))] * (rest > 0)
