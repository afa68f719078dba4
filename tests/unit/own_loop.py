"""A training loop of one's own on the model of the laws, for tests of what is saved and loaded in it."""

from __future__ import annotations

import copy
import io

import torch
from scenario import Net, global_batch

from colonnade import RowOptimizer


class Loop:
    """Model, row optimizer and dense optimizer, trained step by step."""

    def __init__(self, stays=None, seed=3):
        self.model = Net(stays=stays, seed=seed)
        self.rows = RowOptimizer(self.model.embeddings)
        self.dense = torch.optim.Adam(self.model.parameters(), lr=0.01)

    @property
    def collection(self):
        return self.model.embeddings

    def train(self, first, end, size=24):
        """Return the losses of steps first .. end - 1."""
        losses = []
        for step in range(first, end):
            batch = global_batch(step, size)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(
                self.model(batch), batch.label.double()
            )
            self.dense.zero_grad()
            loss.backward()
            self.rows.step()
            self.dense.step()
            losses.append(loss.item())
        return losses

    def state(self):
        """Save and load all three as files of torch.save, weights only."""
        return [through_a_file(item.state_dict()) for item in (self.model, self.rows, self.dense)]

    def load(self, state):
        for item, saved in zip((self.model, self.rows, self.dense), state, strict=True):
            item.load_state_dict(copy.deepcopy(saved))


def through_a_file(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def assert_same_state(one, other):
    """Two loops have the same bits: weights, clocks, optimizer state, memory of admission and eviction."""
    for actual, expected in zip(one.state()[:2], other.state()[:2], strict=True):
        actual, expected = comparable(actual), comparable(expected)
        assert actual.keys() == expected.keys()
        for name, value in actual.items():
            assert torch.equal(value, expected[name]), name


def comparable(state):
    """Tensors of a state_dict by name; those of rows in the order of their ids."""
    if "param_groups" in state:
        state = {f"{group}.{name}": v for group, of in state["state"].items() for name, v in of.items()}  # fmt: skip
    results = {}
    for name, value in state.items():
        place, _, column = name.rpartition(".")
        ids = state.get(f"{place}.retention_ids" if "retention" in column else f"{place}.ids")
        is_by_row = ids is not None and value.shape[:1] == ids.shape and "count" not in column
        results[name] = value[ids.argsort()] if is_by_row else value
    return results
