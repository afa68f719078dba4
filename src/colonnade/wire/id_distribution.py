"""Distribution of a batch's ids to the owners of their rows: one message from each rank to each rank.

    8 bytes           float64: the sum of the sender's sample weights
    E messages        one of each exchange of a plan, whose sizes are sent before it: see `packing` and `bags`

Legend: N ranks, E exchanges of a plan.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from colonnade.comm.mesh import Mesh
from colonnade.errors import WorldError
from colonnade.hops.message_bytes import BATCH_WEIGHT


def exchange_messages(
    messages: Sequence[Sequence[np.ndarray]], mesh: Mesh, batch_weight: float, channel: str
) -> tuple[list[list[np.ndarray]], float]:
    """Send messages, by exchange and receiver, and return those received, by exchange and sender, and the sum of all
    ranks' weights. Collective. Raises WorldError for sizes that no rank sends."""
    sizes = np.array([[len(message) for message in by_rank] for by_rank in messages], np.int32).T
    head = np.frombuffer(BATCH_WEIGHT.pack(batch_weight), np.uint8)
    parts = [part for by_rank in zip(*messages, strict=True) for part in (head, *by_rank)]
    one = [1] * mesh.num_ranks
    traffic_tag = traffic_tag_of(channel, "route")
    raw_sizes, _ = mesh.all_to_all(
        channel, torch.from_numpy(np.ascontiguousarray(sizes)), one, one, traffic_tag=traffic_tag
    )
    received_sizes = _check_message_sizes(raw_sizes.numpy())
    data, _ = mesh.all_to_all(
        channel,
        torch.from_numpy(np.concatenate(parts)),
        _message_bytes(sizes),
        _message_bytes(received_sizes),
        traffic_tag=traffic_tag,
    )
    received = data.numpy()
    received_messages: list[list[np.ndarray]] = [[] for _ in messages]
    position = 0
    total = 0.0
    for by_exchange in received_sizes.tolist():
        total += BATCH_WEIGHT.unpack_from(received.data, position)[0]
        position += BATCH_WEIGHT.size
        for i, size in enumerate(by_exchange):
            received_messages[i].append(
                received[position : position + size].copy()
            )  # a copy, because it must begin at a multiple of 8 bytes
            position += size
    return received_messages, total


def _message_bytes(sizes: NDArray[np.int32]) -> list[int]:
    """Return the number of bytes for each rank, header included, from the sizes (N, E) of its messages."""
    num_bytes: list[int] = (BATCH_WEIGHT.size + sizes.sum(1, dtype=np.int64)).tolist()
    return num_bytes


def _check_message_sizes(message_sizes: NDArray[np.int32]) -> NDArray[np.int32]:
    """Check the sizes (N, E) of the messages from each rank. Raises WorldError for negative ones."""
    if (message_sizes < 0).any():
        rank = int((message_sizes < 0).any(1).argmax())
        raise WorldError(
            f"rank {rank} sent sizes {message_sizes[rank].tolist()} of its messages, wanted 0 or more; all ranks "
            "must run one "
            "version of Colonnade"
        )
    return message_sizes


def traffic_tag_of(channel: str, during: str) -> str:
    """Return the traffic tag of bytes on the group of `channel`: "evaluate" in evaluation, else `during`."""
    return "evaluate" if channel == "evaluate" else during
