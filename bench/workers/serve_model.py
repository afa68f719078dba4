"""Models of `bench serve`: exports of the demo's DLRM with rows of any size, written without training.

    python -m workers.serve_model DESTINATION [ROWS_OF_EACH_FIELD]      default: the demo's vocabularies

Dense weights are those that training begins with, and rows are random: speed does not depend on them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from colonnade import __version__
from colonnade.checkpoint.fingerprint import build_model_fingerprint, dense_weights
from colonnade.config.run import RunConfig, override_settings
from colonnade.data import open_source
from colonnade.embedding import find_collection
from colonnade.files.checksums import compute_checksums
from colonnade.models.build import build_model
from colonnade.publish.model_files import DENSE, MODEL, serialize_model_json
from colonnade.publish.model_writer import write_rows
from colonnade.run.defaults import get_preset
from colonnade.store.contract import RowBatch
from colonnade.table import Table

NUM_FIELDS = 26
ROWS_AT_ONCE = 1 << 18
SCALE = 0.1
RUN, STEP = "bench", 1


def build_demo_config(rows_per_field: int | None) -> RunConfig:
    """Return the demo's configuration; None: with its own vocabularies."""
    settings: dict[str, Any] = {"data.options.num_train": 1000, "data.options.num_test": 0}
    if rows_per_field is not None:
        settings["data.options.cardinalities"] = [rows_per_field] * NUM_FIELDS
        settings["data.options.max_cardinality"] = rows_per_field
    return override_settings(get_preset("synthetic"), settings)


class RandomRows:
    """Trained rows of a table, as an export reads them from a store."""

    def __init__(self, table: Table, seed: int) -> None:
        self.table, self.seed = table, seed

    def __len__(self) -> int:
        assert self.table.rows is not None, "the demo's tables have vocabularies"
        return self.table.rows

    def scan(self) -> Iterator[RowBatch]:
        generator = torch.Generator().manual_seed(self.seed)
        for first in range(0, len(self), ROWS_AT_ONCE):
            ids = torch.arange(first, min(first + ROWS_AT_ONCE, len(self)))
            weights = torch.randn(len(ids), self.table.width, generator=generator) * SCALE
            yield RowBatch(ids, weights.view(torch.uint8))


def write_export(folder: Path, config: RunConfig) -> None:
    """Write an export in which each row was trained."""
    folder.mkdir(parents=True)
    schema = open_source("synthetic", **config.data.options).train.schema
    model = build_model(schema, config)
    collection = find_collection(model)
    tables = []
    for number, table in enumerate(collection.tables):
        entry = {
            "number": number, "name": table.name, "dim": table.width, "rows": table.rows,
            "parts": [{"name": "", "column": 0, "dim": table.width}], "dtype": table.dtype,
            "optimizer": "adagrad", "file": f"rows-{number}.safetensors",
        }  # fmt: skip
        rows: Any = RandomRows(table, number)
        entry["count"] = write_rows(folder / entry["file"], [rows], entry, RUN, STEP)
        tables.append(entry)
    weights = {name: weight.contiguous().clone() for name, weight in dense_weights(model).items()}
    (folder / DENSE).write_bytes(save(weights, metadata={"format": "pt"}))
    names = [DENSE, *(table["file"] for table in tables)]
    features = build_model_fingerprint(collection.declaration, model)["features"]
    content = {
        "colonnade": __version__, "run": RUN, "step": STEP, "config": config.model_dump(), "schema": asdict(schema),
        "features": [
            {"name": name, "table": table, "pooling": pooling} for name, (table, pooling) in features.items()
        ],
        "tables": tables, "files": {name: asdict(compute_checksums(folder / name)) for name in names},
    }  # fmt: skip
    (folder / MODEL).write_bytes(serialize_model_json(content))


def main() -> None:
    folder, *rows = sys.argv[1:]
    config = build_demo_config(int(rows[0]) if rows else None)
    write_export(Path(folder), config)
    tables = json.loads((Path(folder) / MODEL).read_bytes())["tables"]
    print(json.dumps([table["rows"] for table in tables]))


if __name__ == "__main__":
    main()
