"""A loop of your own, and Lightning: rows and network are saved, the process is killed, and a new one loads them."""

from __future__ import annotations

import pytest
from click_files import ROUNDING

LOOP = '''
"""loop.py FOLDER STEPS: train to STEPS, or go on with FOLDER; then write the scores to FOLDER.csv."""

import os
import sys
from pathlib import Path

import colonnade
import torch
from colonnade import (
    Adagrad, Batch, Concat, EmbeddingCollection, Feature, Ids, Mesh, PlanConfig, RowOptimizer, Table, build_plan,
)
from torch import nn

names, folder, steps = ["user", "item"], sys.argv[1], int(sys.argv[2])
memory = {"dram": int(os.environ["DRAM"])} if "DRAM" in os.environ else {}
torch.set_num_threads(1)
torch.manual_seed(0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = EmbeddingCollection(
            [Table(name, 8, optimizer=Adagrad(lr=0.05)) for name in names],
            [Feature(name, name) for name in names],
            consumers={"deep": (Concat(), names)},
        )
        self.top = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, batch):
        return self.top(self.embeddings(batch)["deep"])


def read_batch(step, rank=0, ranks=1, size=64):
    random = torch.Generator().manual_seed(step)
    user, item = torch.randint(200, (2, size), generator=random)
    label = ((user + item) % 2).float()[:, None]
    own = slice(rank * size // ranks, (rank + 1) * size // ranks)
    user, item, label = user[own], item[own], label[own]
    return Batch(len(label), torch.zeros(len(label), 0), {"user": Ids(user), "item": Ids(item)}, label=label)


mesh = colonnade.open_mesh() if "RANK" in os.environ else Mesh()
model = Model()
rows = RowOptimizer(model.embeddings)
dense = torch.optim.SGD(model.parameters(), lr=0.05)
plan = build_plan(model.embeddings.tables, mesh.world, PlanConfig(memory=memory))
first = 0
if any(Path(folder).glob("checkpoints/*.json")):
    first = model.embeddings.load(folder, plan=plan, mesh=mesh, optimizer=rows)
    state = torch.load(f"{folder}-dense-{first}.pt", weights_only=True)
    colonnade.load_dense_state_dict(model, state["model"])
    dense.load_state_dict(state["optimizer"])
else:
    model.embeddings.open(plan, mesh, folder=folder)
for step in range(first, steps):
    batch = read_batch(step, mesh.rank, mesh.num_ranks)
    loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch.label)
    dense.zero_grad()
    (loss / mesh.num_ranks).backward()
    rows.step()
    if mesh.num_ranks > 1:
        for parameter in model.parameters():
            torch.distributed.all_reduce(parameter.grad)
    dense.step()
    if (step + 1) % 25 == 0:
        if mesh.rank == 0:
            state = {"model": colonnade.dense_state_dict(model), "optimizer": dense.state_dict()}
            torch.save(state, f"{folder}-dense.tmp")
            os.replace(f"{folder}-dense.tmp", f"{folder}-dense-{step + 1}.pt")
        model.embeddings.save(folder, step=step + 1, optimizer=rows)
model.eval()
with torch.no_grad():
    scores = torch.sigmoid(model(read_batch(10**6, size=500)))[:, 0]
if mesh.rank == 0:
    print("went on at", first)
    Path(f"{folder}.csv").write_text("\\n".join(["score", *map(repr, scores.tolist())]) + "\\n")
colonnade.close_mesh(mesh)
'''
STEPS = 800


@pytest.mark.slow
@pytest.mark.budget(60)
def test_own_loop_is_killed_and_goes_on(shell):
    """Twice killed on one rank, once with rows on disk: the bits of a process that was never killed."""
    shell.write("loop.py", LOOP)
    shell.run(f"python loop.py whole {STEPS}")
    command = f"python loop.py killed {STEPS}"
    shell.stop_training(command, "killed")
    newest = shell.stop_training(f"env DRAM=16000 {command}", "killed")
    assert f"went on at {newest}" in shell.run(f"python loop.py killed {STEPS}")
    assert shell.are_same_files("whole.csv", "killed.csv")
    shell.run("colonnade verify killed")


@pytest.mark.slow
@pytest.mark.budget(120)
def test_own_loop_moves_from_two_ranks_to_one_and_back(shell):
    shell.write("loop.py", LOOP)
    ranks = f"torchrun --standalone --nproc-per-node 2 loop.py {{}} {STEPS}"
    shell.run(ranks.format("whole"))
    shell.stop_training(ranks.format("same"), "same")
    shell.run(ranks.format("same"))
    assert shell.are_same_files("whole.csv", "same.csv")
    shell.stop_training(ranks.format("moved"), "moved")
    newest = shell.stop_training(f"python loop.py moved {STEPS}", "moved")
    assert f"went on at {newest}" in shell.run(ranks.format("moved"))
    assert shell.largest_difference("whole.csv", "moved.csv") < ROUNDING


LIGHTNING = '''
"""module.py NAME STEPS [CHECKPOINT]: train to STEPS with Lightning, save NAME.ckpt, write scores to NAME.csv."""

import sys
from pathlib import Path

import lightning
import torch
from colonnade import Adam, Batch, Concat, EmbeddingCollection, Feature, Ids, RowOptimizer, Table
from torch import nn

name, steps, *checkpoint = sys.argv[1], int(sys.argv[2]), *sys.argv[3:]
names = ["user", "item"]
torch.set_num_threads(1)


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.embeddings = EmbeddingCollection(
            [Table(name, 8, optimizer=Adam(lr=0.02)) for name in names],
            [Feature(name, name) for name in names],
            consumers={"deep": (Concat(), names)},
        )
        self.top = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, batch):
        return self.top(self.embeddings(batch)["deep"])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2), RowOptimizer(self.embeddings)

    def training_step(self, batch, index):
        dense, rows = self.optimizers()
        loss = nn.functional.binary_cross_entropy_with_logits(self(batch), batch.label)
        dense.zero_grad()
        self.manual_backward(loss)
        rows.step()
        dense.step()


def read_batch(step, size=64):
    random = torch.Generator().manual_seed(step)
    user, item = torch.randint(200, (2, size), generator=random)
    label = ((user + item) % 2).float()[:, None]
    return Batch(size, torch.zeros(size, 0), {"user": Ids(user), "item": Ids(item)}, label=label)


class Batches(torch.utils.data.IterableDataset):
    """One epoch of 50 batches after another."""

    def __init__(self, module):
        self.module = module

    def __iter__(self):
        first = self.module.trainer.current_epoch * 50
        yield from map(read_batch, range(first, first + 50))


torch.manual_seed(0)
module = Module()
trainer = lightning.Trainer(
    max_epochs=steps // 50, accelerator="cpu", logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)
batches = torch.utils.data.DataLoader(Batches(module), batch_size=None)
options = {"ckpt_path": checkpoint[0], "weights_only": True} if checkpoint else {}
trainer.fit(module, batches, **options)
trainer.save_checkpoint(f"{name}.ckpt")
loaded = Module.load_from_checkpoint(f"{name}.ckpt", weights_only=True).eval()
with torch.no_grad():
    scores, again = (torch.sigmoid(m(read_batch(10**6, 500)))[:, 0] for m in (module.eval(), loaded))
assert torch.equal(scores, again)
Path(f"{name}.csv").write_text("\\n".join(["score", *map(repr, scores.tolist())]) + "\\n")
'''


@pytest.mark.slow
@pytest.mark.budget(60)
def test_lightning_goes_on_in_a_new_process(shell):
    pytest.importorskip("lightning", reason="Lightning is not installed")
    shell.write("module.py", LIGHTNING)
    shell.run("python module.py whole 200")
    shell.run("python module.py half 100")
    shell.run("python module.py rest 200 half.ckpt")
    assert shell.are_same_files("whole.csv", "rest.csv")
    assert not shell.are_same_files("whole.csv", "half.csv")
