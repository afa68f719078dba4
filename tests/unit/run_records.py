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
    tiers: bool = True,
) -> Path:
    """`finished` False: as a killed run leaves it, its last line cut short. `tiers` False: as versions left it that
    did not count them."""
    folder.mkdir(parents=True)
    names = [f"C{i}" for i in range(tables)]
    config = {
        "data": {"name": "synthetic", "path": None, "options": {"seed": 1}},
        "model": {"name": name, "dim": 16, "top": [128, 64]},
        "embedding": {"optimizer": "adagrad", "lr": lr, "eps": None},
        "plan": {"memory": {"dram": 64 << 20}},
        "train": {"batch_size": 4096, "epochs": evaluations},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    plan = {"num_ranks": ranks, "dram_bytes": 64 << 20, "lookahead": 2, "exchange": "rows"}
    plan["tables"] = [
        {"name": n, "capacity_rows": 1000, "fits": i % 2 == 0} for i, n in enumerate(names)
    ]
    plan["comparison"] = {
        "plans": [
            {"exchanges": "rows row_wise", "predicted_seconds": 0.02, "measured_seconds": 0.03},
            {"exchanges": "partials", "predicted_seconds": 0.03, "measured_seconds": 0.025},
        ],
        "chosen": 1,
    }
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
            "check gradients": 0.03,
            "exchange: dense gradients": 0.02,
            "update rows": 0.2,
            "update dense": 0.1,
            "total": 1.6,
        }
        lines.append({**at, "kind": "phases", **phases})
        lines.append(
            {**at, "kind": "rows", "resident": 9000, "read": 700, "born": 300, "evicted": 650}
        )
        if tiers:
            read, written = 700 * every // 20, 650 * every // 20
            dram = {
                "hits": 9000,
                "misses": 1000,
                "rows_written": 1000,
                "held_bytes": 12 << 20,
                "live_bytes": 12 << 20,
            }
            ssd = {
                "hits": read, "misses": 300, "reads": read // 2, "read_bytes": read * 5000, "row_bytes": read * 76,
                "rows_written": written, "rows_moved": written // 4, "payload_bytes": written * 76,
                "written_bytes": written * 76 * 3 // 2, "lifetime_bytes": step // every * written * 114,
                "held_bytes": 500_000, "live_bytes": 400_000, "stall_seconds": 0.02,
            }  # fmt: skip
            waited = 0.05 * (1 + math.sin(step / 30)) / 2
            lines.append(
                {**at, "kind": "tiers", "seconds": 1.6, "waited": waited, "dram": dram, "ssd": ssd}
            )
        if ranks > 1:
            by_link = {"local": 10**6, "remote": 10**7}
            sent = {channel: by_link for channel in ("route", "fetch", "push", "dense")}
            messages = {channel: {"local": 20, "remote": 40} for channel in sent}
            lines.append({**at, "kind": "sent", "bytes": sent, "messages": messages})
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
