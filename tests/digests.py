"""Digests of what small trainings learn, one line for each of the settings below.

    python tests/digests.py > before; git switch ...; python tests/digests.py > after; diff before after

A change that says it moves no bit shows that these lines stay, on one machine. Only the command line, exported files
and public names are used, so the script survives what it watches.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

from safetensors import safe_open

COMMON = {
    "data.options": "{num_train: 3000, num_test: 200, cardinalities: [50, 900, 7, 3000], seed: 3}",
    "model.dim": "8", "model.bottom": "[16]", "model.top": "[16]", "dense.lr": "0.01",
    "train.batch_size": "100", "train.epochs": "1", "train.threads": "1", "train.seed": "5",
    "train.checkpoint_steps": "11",
}  # fmt: skip
FILES = {"plan.memory.dram": "150KB"}
BOUNDS_ONLY = "write_share: 1, step_bound: null"
SETTINGS: dict[str, tuple[int, dict[str, str]]] = {
    "memory": (1, {}),
    "files": (1, FILES),
    "files late": (1, {**FILES, "plan.staleness_steps": "2"}),
    "rows": (2, {}),
    "rows late files": (2, {**FILES, "plan.staleness_steps": "1"}),
    "pooled": (2, {"plan.exchange": "pooled"}),
    "partials": (2, {"plan.exchange": "partials"}),
    "towers": (4, {"plan.exchange": "towers", "plan.towers": "2"}),
    "tower rows": (4, {"plan.exchange": "tower_rows", "plan.towers": "2"}),
    "replicated": (2, {"plan.sharding": "replicated"}),
    "cached": (2, {"plan.cache": f"{{size: 20%, staleness: 4, {BOUNDS_ONLY}}}"}),
    "cached next use": (2, {"plan.cache": f"{{size: 20%, staleness: 2, policy: lookahead, {BOUNDS_ONLY}}}"}),
    "columns": (2, {"plan.sharding": "column_wise", "plan.exchange": "pooled", "embedding.optimizer": "adagrad"}),
    "hot rows": (2, {"plan.tables.C1.replicated_rows": "100"}),
    "codecs": (2, {"plan.codec.values": "int8", "plan.codec.gradients": "bf16", "plan.codec.dense": "int8"}),
    "mixed": (2, {"plan.tables.C1.exchange": "pooled", "plan.tables.C3.staleness_steps": "2"}),
    "servers": (3, {"plan.servers": "1"}),
}  # fmt: skip
"""Ranks, and settings in addition to COMMON, by name. Every exchange, tier and staleness."""


RESUMED_AT = "17"
"""Step at which the setting "resumed" ends its first run; it is not one of the checkpoints that COMMON sets."""
LOADED = """
import hashlib
import torch
from colonnade import Batch, EmbeddingCollection, Feature, Ids, RowOptimizer, Table, load_rows
from colonnade import Adam
torch.set_num_threads(1)
table = Table("t", 8, rows=100, optimizer=Adam(lr=0.1))
collection = EmbeddingCollection([table], [Feature("t", "t", pooling="sum")]).open()
random = torch.Generator().manual_seed(3)
load_rows(collection, "t", torch.randn(100, 8, generator=random))
rows = RowOptimizer(collection)
for step in range(6):
    ids = torch.randint(0, 100, (40,), generator=random)
    output = collection(Batch(40, torch.zeros(40, 0), {"t": Ids(ids)}))["t"]
    (output * torch.randn(40, 8, generator=random)).sum().backward()
    rows.step()
weights = collection.rows("t", torch.arange(100)).contiguous()
print(hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:32])
"""
"""Program that loads the rows of a table, trains them and prints their digest."""


def main() -> None:
    """Train each setting, or those named on the command line, and print its digest."""
    for name in sys.argv[1:] or [*SETTINGS, "resumed", "loaded"]:
        with tempfile.TemporaryDirectory() as folder:
            if name == "loaded":
                result = run_program("-c", LOADED).strip()
            elif name == "resumed":
                result = digest(Path(folder), 2, COMMON | FILES, RESUMED_AT)
            else:
                num_ranks, settings = SETTINGS[name]
                result = digest(Path(folder), num_ranks, COMMON | settings)
            print(f"{name:16} {result}", flush=True)


def digest(
    folder: Path, num_ranks: int, settings: dict[str, str], resumed_at: str | None = None
) -> str:
    """Train, export the last checkpoint and hash its rows and dense weights.

    resumed_at: step at which a first run ends that a second one continues; None: one run."""
    sets = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    run, exported = str(folder / "run"), folder / "exported"
    train = ("train", "--run", run, "--ranks", str(num_ranks))
    if resumed_at is None:
        colonnade(*train, "--data", "synthetic", *sets)
    else:
        colonnade(*train, "--data", "synthetic", *sets, "--set", f"train.max_steps={resumed_at}")
        colonnade(*train, "--set", "train.max_steps=null")
    colonnade("export", run, str(exported), "--at", "last")
    result = hashlib.sha256()
    for path in sorted(exported.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in sorted(file.keys()):
                tensor = file.get_tensor(name)
                result.update(f"{path.name}/{name}/{tuple(tensor.shape)}/".encode())
                result.update(
                    tensor.float().numpy().tobytes()
                    if tensor.is_floating_point()
                    else tensor.numpy().tobytes()
                )
    return result.hexdigest()[:32]


def colonnade(*arguments: str) -> None:
    """Run the command; its words, and the end of this process, where it fails."""
    run_program("-m", "colonnade", *arguments)


def run_program(*arguments: str) -> str:
    """Run Python and return what it prints; its words, and the end of this process, where it fails."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(arguments)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
