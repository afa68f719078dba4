"""Knowledge graph of your own: files of triples with names, or a folder in OpenKE's format.

OpenKE's `train2id.txt`, `valid2id.txt` and `test2id.txt`: the number of triples, then `head tail relation` on each
line; `entity2id.txt` and `relation2id.txt`: the number of names, then `name number` on each line, or nothing more.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from colonnade.data.contract import Splits
from colonnade.data.counter import stream_key
from colonnade.data.lines import build_field_error, format_excerpt, read_all_lines
from colonnade.data.names import (
    PARTS,
    Name,
    assign_rows,
    draw_parts,
    find_part_files,
    number_names,
    read_name_columns,
)
from colonnade.data.triples import open_triple_tensors
from colonnade.errors import DataError

ROLES = {
    "head": ("head", "h", "subject", "s", "source", "from"),
    "relation": ("relation", "r", "predicate", "p", "rel", "property", "edge"),
    "tail": ("tail", "t", "object", "o", "target", "to"),
}
"""Columns of a triple, with their usual names in headers as `interactions.files.NAMES` has them."""
SPLIT_KEY = stream_key(0, 40)

Parts = dict[str, NDArray[np.int64]]
"""Triples (n, 3) of each part: head, relation, tail."""


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


def open_triples(
    path: str | Path,
    *,
    validation: str | Path | None = None,
    test: str | Path | None = None,
    validation_fraction: float = 0.05,
    test_fraction: float = 0.05,
    columns: Sequence[str] | None = None,
    delimiter: str | None = None,
    split_seed: int = 0,
    seed: int = 0,
    candidates: int = 1,
    subsample: bool = True,
    max_validation: int | None = None,
    entity_names: str | None = None,
    relation_names: str | None = None,
) -> Splits:
    """Open a knowledge graph from a file, or a folder with one file for each part.

    path         CSV, TSV, text with tabs, blanks or any of , ; | or Parquet, with or without a header; a folder with
                 train, valid and test (validation, val and dev too) of any of these endings; or with OpenKE's
                 train2id.txt
    validation, test     separate files
    validation_fraction, test_fraction
                 share of the training triples, drawn by `split_seed`, if there is no such file. A triple whose entity
                 or relation would have no training triple stays in training
    columns      all columns in the order of the file: [head, relation, tail], others are not read; or the names of
                 these three in its header. Default: the usual names in the header, else the first of these
    delimiter    of text; default: a tab if the first line has one, else the most frequent of , ; | or else a blank
    entity_names, relation_names
                 recorded by a run: names in the order of their numbers, as JSON. Default: all of training, sorted

    `triples.open_triple_tensors` describes the other options. A repeated triple counts once: one of several parts is in
    the test part, else in validation. A validation or test triple with an entity or relation without training triple is
    dropped, because no model can rank it. `Splits.notes` has the counts. Raises DataError naming file and line.
    """
    folder = Path(path).expanduser()
    if (folder / "train2id.txt").is_file():
        parts, names, notes = _read_openke_folder(folder)
    else:
        files = find_part_files(path, validation, test)
        parts, names, notes = _read_named_parts(files, columns, delimiter)
    notes += _remove_repeated(parts)
    fractions = {"validation": validation_fraction, "test": test_fraction}
    notes += _draw_missing_parts(parts, fractions, split_seed)
    if not (folder / "train2id.txt").is_file():
        notes += _assign_trained_rows(parts, names, (entity_names, relation_names), folder)
    entities, relations = names
    sizes = ", ".join(f"{len(parts[part]):,} {part}" for part in PARTS)
    num_per_entity = sum(map(len, parts.values())) / max(len(entities), 1)
    notes.append(
        f"triples: {sizes}; {len(entities):,} entities, {len(relations):,} relations, {num_per_entity:.1f} triples "
        "for each entity"
    )
    opened = open_triple_tensors(
        *(torch.from_numpy(parts[part]) for part in PARTS),
        num_entities=len(entities),
        num_relations=len(relations),
        seed=seed,
        candidates=candidates,
        subsample=subsample,
        max_validation=max_validation,
    )
    recorded = {"entity_names": entities, "relation_names": relations}
    options = {name: json.dumps(value, ensure_ascii=False) for name, value in recorded.items()}
    return replace(opened, notes=tuple(notes), options=options)


def _read_named_parts(
    files: Mapping[str, str | Path], columns: Sequence[str] | None, delimiter: str | None
) -> tuple[Parts, list[list[Name]], list[str]]:
    """Read parts. Returns triples in numbers, names of entities and relations by number, and notes."""
    opened = {
        part: read_name_columns(file, ROLES, columns, delimiter) for part, file in files.items()
    }
    notes = list(dict.fromkeys(note for _, _, notes in opened.values() for note in notes))
    heads, relations, tails = zip(*(roles for roles, _, _ in opened.values()), strict=True)
    entities, entity_numbers = number_names([*heads, *tails])
    relation_names, relation_numbers = number_names(relations)
    triples = zip(
        entity_numbers[: len(heads)], relation_numbers, entity_numbers[len(heads) :], strict=True
    )
    parts = {part: np.stack(rows, 1) for part, rows in zip(opened, triples, strict=True)}
    return parts, [entities, relation_names], notes


def _remove_repeated(parts: Parts) -> list[str]:
    """Keep each triple once, in the last part that has it, and describe how many were removed."""
    names = list(reversed(parts))
    rows = np.concatenate([parts[part] for part in names])
    part_of = np.repeat(np.arange(len(names)), [len(parts[part]) for part in names])
    questions = rows[:, 0] * (rows[:, 1].max(initial=0) + 1) + rows[:, 1]
    questions = np.unique(questions, return_inverse=True)[1]
    keys = questions * (rows[:, 2].max(initial=0) + 1) + rows[:, 2]
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    first = first[inverse]
    is_removed = first != np.arange(len(rows))
    is_leak = is_removed & (part_of != part_of[first])
    notes = []
    for number, part in enumerate(names):
        parts[part] = rows[(part_of == number) & ~is_removed]
        if num_leaks := int((is_leak & (part_of == number)).sum()):
            others = " or ".join(names[:number][::-1])
            notes.append(
                f"warning: {num_leaks:,} {part} triples are in {others} too (a leak): removed from {part}"
            )
    if num_repeated := int((is_removed & ~is_leak).sum()):
        notes.append(f"repeated triples, counted once: {num_repeated:,} removed")
    return notes


def _draw_missing_parts(parts: Parts, fractions: Mapping[str, float], split_seed: int) -> list[str]:
    """Draw the parts that have no files from the training part, and describe the triples that had to stay in it."""
    train = parts["train"]
    missing = [part for part in fractions if part not in parts]
    groups = [[train[:, 0], train[:, 2]], [train[:, 1]]]
    numbers, num_moved = draw_parts(
        groups, [fractions[part] for part in missing], stream_key(SPLIT_KEY, split_seed)
    )
    for number, part in enumerate(["train", *missing]):
        parts[part] = train[numbers == number]
    if not num_moved:
        return []
    return [
        f"{num_moved:,} triples drawn for {' or '.join(missing)} stay in train, where their entity or relation has no "
        "other"
    ]


def _assign_trained_rows(
    parts: Parts, names: list[list[Name]], recorded: Sequence[str | None], path: Path
) -> list[str]:
    """Renumber entities and relations by `assign_rows`, and drop the triples of other parts without a row."""
    for group, columns in enumerate(([0, 2], [1])):
        trained = parts["train"][:, columns].reshape(-1)
        names[group], table = assign_rows(names[group], trained, recorded[group], path)
        for rows in parts.values():
            rows[:, columns] = table[rows[:, columns]]
    notes = []
    for part, rows in parts.items():
        is_known = (rows >= 0).all(1)
        parts[part] = rows[is_known]
        if num_unknown := int((~is_known).sum()):
            notes.append(
                f"warning: {num_unknown:,} {part} triples have an entity or a relation without a training triple, "
                "which no model can rank: dropped"
            )
    return notes


def _read_openke_folder(folder: Path) -> tuple[Parts, list[list[Name]], list[str]]:
    """Read a folder of OpenKE's files. Returns what `_read_named_parts` does."""
    names = [_read_openke_names(folder / f"{kind}2id.txt") for kind in ("entity", "relation")]
    limits = (len(names[0]), len(names[0]), len(names[1]))
    parts = {
        part: _read_openke_triples(folder / f"{file}2id.txt", limits)
        for part, file in zip(PARTS, ("train", "valid", "test"), strict=True)
    }
    return parts, names, [f"{folder.name}: OpenKE's files (head, tail, relation)"]


def _read_openke_names(path: Path) -> list[Name]:
    """Read the names in the order of their numbers; the numbers themselves if the file has only their count."""
    count, lines = _read_counted_lines(path)
    if not lines:
        return list(range(count))
    names: dict[int, Name] = {}
    for number, line in enumerate(lines, 2):
        name, _, row = (
            line.decode(errors="replace").strip().rpartition("\t" if b"\t" in line else " ")
        )
        if not row.isdecimal() or int(row) >= count or int(row) in names:
            raise build_field_error(
                path,
                number,
                None,
                got=format_excerpt(line),
                wanted=f"`name number`: each number below {count} once",
                fix="Repair the line",
            )
        names[int(row)] = name.strip()
    if len(names) != count:
        raise DataError(
            f"{path}: got {len(names)} names, wanted {count} as in its first line. Get it again"
        )
    return [names[row] for row in range(count)]


def _read_counted_lines(path: Path) -> tuple[int, list[bytes]]:
    """Read the number on the first line of a file, and its other lines."""
    first, *lines = read_all_lines(path)
    if not first.strip().isdigit():
        raise build_field_error(
            path,
            1,
            None,
            got=format_excerpt(first.strip()),
            wanted="a number: how many follow",
            fix="Repair it",
        )
    return int(first), lines


def _read_openke_triples(path: Path, limits: tuple[int, ...]) -> NDArray[np.int64]:
    """Read triples (n, 3): head, relation, tail. limits: of head, tail and relation."""
    count, lines = _read_counted_lines(path)
    if len(lines) != count:
        raise DataError(
            f"{path}: got {len(lines)} triples, wanted {count} as in its first line. The file is cut off, or "
            "was joined from others; get it again"
        )
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
                wanted=f"`head tail relation`: entities below {limits[0]}, a relation below {limits[2]}",
                fix="Repair the line",
            )
    numbers = np.array(b" ".join(lines).split(), dtype=np.int64).reshape(-1, 3)
    return numbers[:, [0, 2, 1]]
