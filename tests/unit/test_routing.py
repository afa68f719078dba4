"""Sizes that ranks send each other before lookups are checked."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from colonnade.errors import WorldError
from colonnade.wire.id_distribution import exchange_messages


class Told:
    """A world of two, whose ranks tell these sizes."""

    num_ranks = 2

    def __init__(self, sizes):
        self.sizes = torch.tensor(sizes, dtype=torch.int32)

    def all_to_all(self, channel, send, send_rows, receive_rows, *, traffic_tag):
        return self.sizes, None


def test_sizes_that_are_none_are_refused():
    messages = [[np.zeros(3, np.uint8)] * 2, [np.zeros(0, np.uint8)] * 2]
    with pytest.raises(WorldError, match=r"rank 1 sent sizes \[3, -1\] of its messages"):
        exchange_messages(messages, Told([[3, 0], [3, -1]]), 2.0, "route")
