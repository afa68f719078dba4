"""`python -m workers.capacity FOLDER IDS ROWS [STEPS]`: train ROWS of IDS rows of a table, a quarter of them in memory.

A folder without a checkpoint is filled: every row is trained once and saved. Otherwise training resumes from it. Then
each line of stdin, a JSON object with `steps`, is answered with samples/s, or with the seconds of a save for 0 steps.

STEPS: instead of that, rank 0 prints samples/s of all ranks together. Under torchrun with several ranks all rows are in
their memory, and FOLDER is not used.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

from colonnade import (
    Batch,
    EmbeddingCollection,
    Feature,
    Ids,
    PlanConfig,
    RowOptimizer,
    RowWiseAdagrad,
    Table,
    build_plan,
    close_mesh,
    open_mesh,
)
from colonnade.store.budget import slot_bytes
from workers.loop import open_channel
from workers.sparse_rows import resident_bytes
from workers.tier_stream import Law

DIM, LOOKUPS, BATCH_SIZE, SKEW, LOOKAHEAD = 128, 26, 2048, 1.05, 8
FILL = 4096
"""Rows of a batch that trains every row once."""
TABLE = Table("all", DIM, optimizer=RowWiseAdagrad(lr=0.02))


class Training:
    """Table without a vocabulary, the ids that are used of it, and their popularity: the same for any number of ids."""

    def __init__(self, folder: Path, num_ids: int, num_rows: int) -> None:
        self.folder, self.law = folder, Law(num_rows, SKEW)
        self.mesh, self.step = open_mesh(), 0
        rank, num_ranks = self.mesh.rank, self.mesh.num_ranks
        self.draw = np.random.default_rng(rank)
        random = torch.Generator().manual_seed(0)
        ids = torch.randint(num_ids, (num_rows + num_rows // 4,), generator=random).unique()
        self.ids = ids[torch.randperm(len(ids), generator=random)[:num_rows]]
        self.embeddings = EmbeddingCollection([TABLE], [Feature("ids", "all")])
        self.rows = RowOptimizer(self.embeddings)
        memory = {"dram": num_rows * slot_bytes(TABLE) // 4} if num_ranks == 1 else {}
        config = PlanConfig(memory=memory, lookahead=LOOKAHEAD)
        plan = build_plan([TABLE], self.mesh.world, config)
        before, start = resident_bytes(), perf_counter()
        if num_ranks > 1:
            self.embeddings.open(plan, self.mesh)
            self.train(self.bag(ids, len(ids)) for ids in self.ids[rank::num_ranks].split(FILL))
        elif folder.exists():
            self.step = self.embeddings.load(folder, plan=plan, optimizer=self.rows)
            self.train([self.bag(self.ids[:FILL], FILL)])
            self.facts = {"resume": perf_counter() - start}
        else:
            self.embeddings.open(plan, folder=folder)
            self.train(self.bag(ids, len(ids)) for ids in self.ids.split(FILL))
            self.save()
            files = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            self.facts = {
                "memory": (resident_bytes() - before) / num_rows, "files": files / num_rows,
            }  # fmt: skip

    def bag(self, ids: torch.Tensor, length: int) -> Batch:
        """Return a batch of bags of `length` ids."""
        size = len(ids) // length
        bags = {"ids": Ids(ids, length * torch.arange(size + 1))}
        return Batch(size=size, dense=torch.empty(size, 0), ids=bags)

    def train(self, batches: Iterable[Batch]) -> float:
        """Train batches with a fixed gradient; return the seconds until all their rows are written."""
        start = perf_counter()
        for batch in self.embeddings.lookahead(batches):
            sums = self.embeddings(batch)["ids"]
            sums.backward(torch.full_like(sums, 1e-3))
            self.rows.step()
            self.step += 1
        if self.embeddings.store.tiers is not None:
            self.embeddings.store.tiers.settle()
        return perf_counter() - start

    def measure(self, steps: int) -> dict[str, float]:
        """Return samples/s of `steps` steps whose ids were drawn before."""
        drawn = self.law.draw(self.draw, steps * LOOKUPS * BATCH_SIZE)
        ids = self.ids[torch.from_numpy(drawn)].split(LOOKUPS * BATCH_SIZE)
        self.mesh.barrier()
        seconds = self.train([self.bag(part, LOOKUPS) for part in ids])
        return {"samples/s": self.mesh.num_ranks * steps * BATCH_SIZE / seconds}

    def save(self) -> dict[str, float]:
        start = perf_counter()
        self.embeddings.save(self.folder, self.step, optimizer=self.rows)
        return {"save": perf_counter() - start}


if __name__ == "__main__":
    channel = open_channel()
    training = Training(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    if len(sys.argv) > 4:
        training.measure(int(sys.argv[4]) // 2)  # a warm-up that is not kept
        print(json.dumps(training.measure(int(sys.argv[4]))), file=channel)
        close_mesh(training.mesh)
    else:
        print(json.dumps(training.facts), file=channel)
        for line in sys.stdin:
            steps = json.loads(line)["steps"]
            print(json.dumps(training.measure(steps) if steps else training.save()), file=channel)
