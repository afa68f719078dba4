"""Row clocks of several ranks in one process, in plain PyTorch: what exchange `cached` computes, without messages.

Which rows a rank asks for and sends is decided by the order of its batches alone, so the library's own directories
(`cache.directory`) and its memory of what has changed (`cache.changes`) decide here, too; all values are computed here,
for all ranks at once. `tests/bench/test_bench_staleness.py` compares it with real ranks.

Legend: R ranks, N rows, W columns, S slots a rank, L lookups, U rows of a step, each once for each rank that uses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy
from torch.nn.functional import embedding

from colonnade.cache.directory import EXPIRED, HIT, MISS, Directory, VersionLog
from colonnade.cache.messages import MAX_AGE
from colonnade.comm.mesh import Mesh
from colonnade.data.contract import rank_block
from colonnade.optimizers import SGD, Adagrad, SparseOptimizer
from colonnade.staleness import RowClock
from colonnade.topology.sharding import row_wise
from colonnade.train.metrics import best_possible_metrics
from workers import staleness_ranks
from workers.quality_case import Run
from workers.staleness_model import (
    DIM,
    PER_RANK,
    RANKS,
    Curve,
    Data,
    Learning,
    Samples,
    System,
    Trained,
    block_aucs,
    build_network,
    open_movielens,
    open_stream,
)
from workers.staleness_ranks import POLICY, ROWS, capacity, open_rows

MOVIELENS = "ml-1m"
MOVIELENS_EPOCHS = 2
TEST_SAMPLES = 500_000
PILOT_SAMPLES, PILOT_WORLD = 1_000_000, 1000
NUM_SCORED = 20
"""Scorings along a run."""

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Trainable:
    """Rows with what their optimizer keeps of them."""

    weights: Tensor  # (n, W)
    state: Tensor  # (n, W); of SGD (n, 0)
    rule: SparseOptimizer

    def step(self, at: Tensor, gradients: Tensor) -> None:
        """One update of rows `at` (m,), each once, by gradients (m, W)."""
        if isinstance(self.rule, SGD):
            self.weights.index_add_(0, at, gradients, alpha=-self.rule.lr)
            return
        assert isinstance(self.rule, Adagrad)
        squares = self.state[at] + gradients * gradients
        self.state[at] = squares
        steps = gradients / (squares.sqrt() + self.rule.eps)
        self.weights.index_add_(0, at, steps, alpha=-self.rule.lr)

    def copy(self, to: Tensor, source: Trainable, at: Tensor) -> None:
        self.weights[to] = source.weights[at]
        self.state[to] = source.state[at]


def trainable(first: Tensor, rule: SparseOptimizer) -> Trainable:
    """Rows that begin as `first` (n, W)."""
    value, width = rule.initial_state(first.shape[1])
    return Trainable(first, torch.full((len(first), width), value, dtype=first.dtype), rule)


class CachedRows:
    """One table: owners' rows, and the copies that each of R ranks keeps of them. `read`, then `write`, once a step."""

    def __init__(
        self,
        first: Tensor,
        rule: SparseOptimizer,
        clock: RowClock,
        capacity: int,
        *,
        num_ranks: int,
        most_lookups: int,
    ) -> None:
        """first (N, W): rows before any update. capacity: copies that outlast a step, by rank."""
        self.owners = trainable(first.clone(), rule)
        self.num_slots = min(len(first), capacity + most_lookups)
        self.copies = trainable(first.new_zeros(num_ranks * self.num_slots, first.shape[1]), rule)
        self.pending = torch.zeros_like(self.copies.weights)
        self.ticks = np.zeros(num_ranks * self.num_slots, np.int64)
        self.directories = [Directory(capacity, clock, POLICY) for _ in range(num_ranks)]
        # An owner may call a row changed that is not, by what else it owns; so who owns what matters.
        self.changes = [VersionLog([len(first)]) for _ in range(num_ranks)]
        self.owner = np.zeros(len(first), np.int64)
        for rank in range(num_ranks):
            shard, ids = row_wise(num_ranks).shard_of(rank), torch.arange(len(first))
            self.owner[shard.owns(ids, len(first)).numpy()] = rank
        self.slot_rows = np.zeros(num_ranks * self.num_slots, np.int64)
        self.number = 0
        # Uses of rows by a rank in a batch; those without a request; rows that were sent each way.
        self.used = self.hits = self.fetches = self.pushes = 0

    def read(self, ids: Sequence[Numbers]) -> tuple[Tensor, Tensor]:
        """ids by rank, (L_r,) -> values (U, W), and by lookup, rank after rank, which of them it reads (L,)."""
        self.number += 1
        parts = [np.unique(id_, return_inverse=True) for id_ in ids]
        self.decisions = [
            directory.decide_batch(rows)
            for directory, (rows, _) in zip(self.directories, parts, strict=True)
        ]
        self.rows = np.concatenate([rows for rows, _ in parts])
        self.at = np.concatenate(self._slots([decision.slots for decision in self.decisions]))
        row_outcomes = np.concatenate([decision.outcomes for decision in self.decisions])
        ages = np.concatenate([decision.ages for decision in self.decisions]).astype(np.int64)
        self.slot_rows[self.at] = self.rows
        self.used += len(row_outcomes)
        self.hits += int((row_outcomes == HIT).sum())
        over = np.flatnonzero(row_outcomes == EXPIRED)
        over = over[self._changed(self.rows[over], ages[over])]
        fresh = np.concatenate([np.flatnonzero(row_outcomes == MISS), over])
        self.fetches += len(fresh)
        slots = torch.from_numpy(self.at[fresh])
        self.copies.copy(slots, self.owners, torch.from_numpy(self.rows[fresh]))
        # What the owner has yet to hear is seen at once.
        waiting = slots[torch.from_numpy(self.ticks[self.at[fresh]] > 0)]
        self.copies.step(waiting, self.pending[waiting])
        firsts = np.cumsum([0, *(len(rows) for rows, _ in parts)])
        inverse = np.concatenate(
            [first + part for first, (_, part) in zip(firsts[:-1], parts, strict=True)]
        )
        return self.copies.weights[torch.from_numpy(self.at)], torch.from_numpy(inverse)

    def write(self, sums: Tensor) -> None:
        """Add (U, W): the gradients of each row that was read, summed by rank."""
        at = torch.from_numpy(self.at)
        had = torch.from_numpy(np.flatnonzero(self.ticks[self.at] > 0))
        totals = sums.clone()
        totals[had] += self.pending[at[had]]
        pushed = np.concatenate([decision.pushed for decision in self.decisions])
        stays = torch.from_numpy(np.flatnonzero(~pushed))
        self.pending[at[stays]] = totals[stays]
        self.ticks[self.at] = np.where(pushed, 0, self.ticks[self.at] + 1)
        ends = np.cumsum([0, *(len(decision.slots) for decision in self.decisions)])
        sent_rows, sent = [], []
        evicted = self._slots([decision.evicted_slots for decision in self.decisions])
        for rank, decision in enumerate(self.decisions):
            own = np.flatnonzero(decision.pushed) + ends[rank]
            sent_rows += [self.rows[own], decision.evicted_ids]
            sent += [totals[torch.from_numpy(own)], self.pending[torch.from_numpy(evicted[rank])]]
            self.ticks[evicted[rank]] = 0
        self.pushes += sum(map(len, sent_rows))
        rows = self._apply(self.owners, sent_rows, sent)
        for owner, changes in enumerate(self.changes):
            changes.record_row_changes(0, rows[self.owner[rows] == owner], self.number)
        self.copies.step(at, sums)

    def synchronized_rows(self) -> Tensor:
        """Return owners' weights (N, W) as they are once every waiting gradient has been sent. Changes nothing."""
        owners = trainable(self.owners.weights.clone(), self.owners.rule)
        owners.state.copy_(self.owners.state)
        waiting = np.flatnonzero(self.ticks)
        self._apply(owners, [self.slot_rows[waiting]], [self.pending[torch.from_numpy(waiting)]])
        return owners.weights

    def saved_share(self) -> float:
        """Return the share of row messages saved so far: without a cache every use fetches its row and sends its
        gradient. Gradients that wait count as sent, because at the end they are."""
        sent = self.fetches + self.pushes + np.count_nonzero(self.ticks)
        return 1 - sent / max(1, 2 * self.used)

    @staticmethod
    def _apply(owners: Trainable, rows: Sequence[Numbers], sums: Sequence[Tensor]) -> Numbers:
        """Update each row that any rank sent a sum of once, by the total in the order of ranks. Return these rows."""
        item, inverse = np.unique(np.concatenate(rows), return_inverse=True)
        total = owners.weights.new_zeros(len(item), owners.weights.shape[1])
        total.index_add_(0, torch.from_numpy(inverse.reshape(-1)), torch.cat(list(sums)))
        owners.step(torch.from_numpy(item), total)
        return item

    def _changed(self, rows: Numbers, ages: Numbers) -> NDArray[np.bool_]:
        """Return whether copies as old as this are not what their owners have."""
        is_old = ages >= MAX_AGE
        for owner, changes in enumerate(self.changes):
            own = self.owner[rows] == owner
            is_old[own] |= changes.has_changed_since(0, rows[own], self.number - ages[own])
        return is_old

    def _slots(self, by_rank: Sequence[NDArray[np.int32]]) -> list[Numbers]:
        """Numbers among the slots of all ranks."""
        return [item.astype(np.int64) + r * self.num_slots for r, item in enumerate(by_rank)]


def train(
    data: Data,
    learning: Learning,
    system: System,
    test: Sequence[Samples],
    *,
    num_ranks: int = RANKS,
    num_scored: int = 1,
    keeps_logits: bool = False,
) -> Trained:
    """Train as `staleness_ranks.train` on `num_ranks` ranks, in this process."""
    network, optimizer = build_network(data, learning)
    dtype, num_fields = getattr(torch, learning.dtype), len(data.columns)
    whole = open_rows(data, learning, System(), Mesh())
    assert system.clock is not None
    copies = CachedRows(
        whole.rows(ROWS, torch.arange(data.num_rows)), learning.rule, system.clock,
        capacity(data, system), num_ranks=num_ranks,
        most_lookups=-(-RANKS * PER_RANK // num_ranks) * num_fields,
    )  # fmt: skip

    def score() -> Tensor:
        rows = copies.synchronized_rows()
        with torch.no_grad():
            return torch.cat(
                [network(rows[item.ids], item.dense.to(dtype)).flatten() for item in test]
            )

    retained, curve = [], Curve(data, learning, test, num_scored)
    for step, samples in enumerate(data.training(learning, RANKS * PER_RANK), 1):
        shares = [rank_block(len(samples), rank, num_ranks) for rank in range(num_ranks)]
        values, inverse = copies.read(
            [samples.ids[begin:end].flatten().numpy() for begin, end in shares]
        )
        values.requires_grad_()
        read = embedding(inverse, values).view(len(samples), num_fields, DIM + 1)
        logits = network(read, samples.dense.to(dtype))
        optimizer.zero_grad()
        cross_entropy(logits, samples.label.to(dtype)).backward()
        assert values.grad is not None
        with torch.no_grad():
            copies.write(values.grad)
        optimizer.step()
        if keeps_logits:
            retained.append(logits.detach().flatten())
        curve.score_if_due(step, score)
    facts = {
        "used without a request": copies.hits / max(1, copies.used),
        "row messages saved": copies.saved_share(),
    }
    return Trained(score(), retained, facts, curve.aucs)


def train_plan(name: str, optimizer: str, system: System, run: Run) -> dict[str, list[float]]:
    """Train on MovieLens-1M or the stream under one plan, and score it along the way.

    A pilot scores validation samples; of the stream, another world's samples, and fewer."""
    data, test = open_data(name, run.seed, run.samples, run.is_pilot)
    epochs = MOVIELENS_EPOCHS if name == MOVIELENS and not run.is_quick else 1
    learning = Learning(optimizer, run.lr, epochs, run.seed)
    num_scored = 1 if run.is_pilot else NUM_SCORED
    if system.clock is None:
        done = staleness_ranks.train(data, learning, system, Mesh(), test, num_scored=num_scored)
    else:
        done = train(data, learning, system, test, num_scored=num_scored)
    values = {
        "AUC": block_aucs(done.scores, [block.label for block in test]),
        "scored steps": list(map(float, done.curve)),
        "AUC by step": list(done.curve.values()),
        **{unit: [fact] for unit, fact in done.facts.items()},
    }
    if name != MOVIELENS and system == System():
        values["ceiling"] = [best_possible_metrics(data.splits.test.batches(8192))["auc"]]
    return values


@lru_cache(2)
def open_data(name: str, seed: int, samples: int, is_pilot: bool) -> tuple[Data, list[Samples]]:
    """Open a data set and the blocks that are scored; the stream is the same for every seed."""
    if name == MOVIELENS:
        data = open_movielens(seed)
        part = data.splits.validation if is_pilot else data.splits.test
    else:
        if is_pilot:
            samples = min(samples, PILOT_SAMPLES)
        num_test = min(TEST_SAMPLES, samples // 4)
        data = open_stream(samples, num_test, seed=PILOT_WORLD if is_pilot else 0)
        part = data.splits.test
    assert part is not None
    return data, list(data.scored(part))
