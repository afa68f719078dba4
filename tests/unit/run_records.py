"""Run folders as training leaves them, made by hand: what reports start from."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import yaml


def write_run(
    folder: Path,
    *,
    steps: int = 400,
    every: int = 20,
    evaluations: int = 4,
    tables: int = 6,
    ranks: int = 2,
    nan_from: int | None = None,
    finished: bool = True,
    lr: float = 0.1,
    loss: float = 0.6,
    name: str = "dlrm",
) -> Path:
    """`finished` False: as a killed run leaves it, its last line cut short."""
    folder.mkdir(parents=True)
    names = [f"C{i}" for i in range(tables)]
    config = {
        "data": {"name": "synthetic", "path": None, "options": {"seed": 1}},
        "model": {"name": name, "dim": 16, "top": [128, 64]},
        "rows": {"optimizer": "adagrad", "lr": lr, "eps": None},
        "plan": {"dram": 64 << 20},
        "train": {"batch_size": 4096, "epochs": evaluations},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    plan = {"num_ranks": ranks, "dram_bytes": 64 << 20, "lookahead": 2, "exchange": "rows"}
    plan["tables"] = [
        {"name": n, "capacity_rows": 1000, "fits": i % 2 == 0} for i, n in enumerate(names)
    ]
    (folder / "plan.json").write_text(json.dumps(plan))
    machine = {
        "processor": "A processor",
        "threads": 2,
        "memory_bytes": 24 << 30,
        "versions": {"torch": "2.9"},
    }
    (folder / "machine.json").write_text(json.dumps(machine))
    lines: list[dict] = []
    began = time.time() - 3600
    sizes = {
        n: {
            "rows_in_memory": 1000 * (tables - i),
            "bytes_in_memory": 76000 * (tables - i),
            "rows_in_files": 2000 * (tables - i),
            "bytes_in_files": 152000 * (tables - i),
        }
        for i, n in enumerate(names)
    }
    for step in range(every, steps + 1, every):
        at = {"step": step, "time": began + 3000 * step / steps}
        value = loss * (0.7 + 0.3 * math.exp(-step / 100)) + 0.01 * math.sin(step)
        bad = nan_from is not None and step >= nan_from
        rates = {"rows": lr * (1 - step / steps / 2), "dense": 0.002}
        lines.append(
            {
                **at,
                "kind": "train",
                "loss": None if bad else value,
                "samples_per_second": 1e5,
                "lr": rates,
            }
        )
        phases = {
            "wait for rows": 0.05,
            "forward": 0.4,
            "backward": 0.7,
            "agree and reduce dense": 0.05,
            "update rows": 0.2,
            "update dense": 0.1,
            "total": 1.6,
        }
        lines.append({**at, "kind": "phases", **phases})
        lines.append(
            {**at, "kind": "rows", "resident": 9000, "read": 700, "born": 300, "evicted": 650}
        )
        if ranks > 1:
            lines.append({**at, "kind": "sent", "route": 10**6, "fetch": 10**7, "push": 10**7})
        if step % (10 * every) == every:
            lines.append(
                {
                    **at,
                    "kind": "traffic",
                    "lookups": dict.fromkeys(names, 4096),
                    "unique": {n: 100 + i for i, n in enumerate(names)},
                }
            )
        if evaluations and step % max(every, steps // evaluations // every * every) == 0:
            score = 0.75 + 0.05 * step / steps
            lines.append(
                {
                    **at,
                    "kind": "evaluate",
                    "epoch": len(lines),
                    "validation_auc": score,
                    "validation_log_loss": 1 - score,
                    "test_auc": score - 0.01,
                    "test_num_samples": 1000.0,
                }
            )
            lines.append({**at, "kind": "tables", "tables": sizes})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    if finished:
        summary = {
            "steps": steps,
            "samples": steps * 4096,
            "seconds": steps / 10,
            "stopped": False,
            "metrics": {},
            "tables": sizes,
            "resident_bytes": 12 << 20,
            "num_ranks": ranks,
        }
        (folder / "summary.json").write_text(json.dumps(summary))
    else:
        text = text[:-25]
    (folder / "metrics.jsonl").write_text(text)
    return folder
