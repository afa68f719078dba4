"""FB15k-237 knowledge graph (Toutanova and Chen 2015), or any other graph in OpenKE's file format.

`train2id.txt`, `valid2id.txt` and `test2id.txt`: the number of triples, then `head tail relation` on each line;
`entity2id.txt` and `relation2id.txt` begin with the number of entities and relations.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from colonnade.data.contract import Splits
from colonnade.data.lines import build_field_error, format_excerpt, locate_data_file, read_all_lines
from colonnade.data.triples import open_triples
from colonnade.errors import DataError

FOLDER = "fb15k237"


PRESET = {
    "data": {"options": {"max_validation": 1000}},
    "model": {
        "name": "transe",
        "dim": 256,
        "norm": 2,
        "squared": True,
        "loss": "softmax",
        "reciprocal": True,
    },
    "embedding": {
        "optimizer": "adam",
        "lr": 0.005,
        "init_scale": 0.05,
        "schedule": {"name": "linear"},
    },
    "train": {"batch_size": 1024, "epochs": 10, "patience": 3},
}
PRODUCTS = {"model.dim": 256, "model.loss": "softmax", "train.batch_size": 512, "train.epochs": 30}
MODEL_PRESETS = {
    "distmult": PRODUCTS,
    "complex": PRODUCTS,
    "rotate": {
        "model.dim": 1024,
        "model.norm": 2,
        "model.squared": True,
        "model.loss": "softmax",
        "model.reciprocal": True,
        "model.center": 0.3,
        "model.penalty": 0.3,
        "embedding.lr": 0.015,
        "train.batch_size": 512,
        "train.epochs": 16,
    },
}


def open_fb15k237(
    path: str | Path | None = None,
    *,
    seed: int = 0,
    candidates: int = 1,
    subsample: bool = True,
    max_validation: int | None = None,
) -> Splits:
    """Open the graph in the folder `path`; default `$COLONNADE_DATA/fb15k237`.

    `triples.open_triples` describes the other options. Raises DataError naming file and line.
    """
    folder = locate_data_file(path, data_set_folder=FOLDER, file_name="train2id.txt").parent
    num_entities, num_relations = (
        read_count_line(folder / name) for name in ("entity2id.txt", "relation2id.txt")
    )
    parts = [
        read_triples(folder / f"{part}2id.txt", num_entities, num_relations)
        for part in ("train", "valid", "test")
    ]
    return open_triples(
        *parts,
        num_entities=num_entities,
        num_relations=num_relations,
        seed=seed,
        candidates=candidates,
        subsample=subsample,
        max_validation=max_validation,
    )


def read_count_line(path: Path) -> int:
    """Read the number on the first line of a file."""
    first = read_all_lines(path)[0].strip()
    if not first.isdigit():
        raise build_field_error(
            path,
            1,
            None,
            got=format_excerpt(first),
            wanted="a number: how many follow",
            fix="Repair it",
        )
    return int(first)


def read_triples(path: Path, num_entities: int, num_relations: int) -> torch.Tensor:
    """Read triples (n, 3) int64: head, relation, tail, in the order of the file."""
    count = read_count_line(path)
    lines = read_all_lines(path)[1:]
    if len(lines) != count:
        raise DataError(
            f"{path}: got {len(lines)} triples, wanted {count} as in its first line. The file is cut off, or "
            "was joined from others; get it again"
        )
    limits = (num_entities, num_entities, num_relations)
    for number, line in enumerate(lines, 2):
        fields = line.split()
        if len(fields) != 3 or not all(
            field.isdigit() and int(field) < limit
            for field, limit in zip(fields, limits, strict=True)
        ):
            raise build_field_error(
                path,
                number,
                None,
                got=format_excerpt(line),
                wanted=f"`head tail relation`: entities below {num_entities}, a relation below {num_relations}",
                fix="Repair the line",
            )
    numbers = np.array(b" ".join(lines).split(), dtype=np.int64).reshape(-1, 3)
    return torch.from_numpy(numbers[:, [0, 2, 1]].copy())
