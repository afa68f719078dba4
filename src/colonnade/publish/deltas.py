"""Publication of a run for predictors: a folder with one base and what each later checkpoint changed of it, written and
followed.

PUBLISHED/published.json                   the word: written last, each time; what it does not name is not there
PUBLISHED/base-<number>-<tag>/             an export (export.py) of the checkpoint that change <number> led to
PUBLISHED/change-<number>                  rows and dense weights that one checkpoint has and the one before has not

A change is a checked file (store/durable.py) of safetensors: `rows/<table>/ids` (N,) int64, `rows/<table>/weights`
(N, width), `rows/<table>/gone` (G,) int64, `dense/<name>`; its metadata names the checkpoints between which it leads.
Only
what was saved is published, so a run that is killed and goes on never takes anything back, and nothing is told
twice. Legend: N rows that changed, G rows that are gone.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from colonnade.checkpoint.header import header_path, read_header
from colonnade.checkpoint.states import load_state
from colonnade.checkpoint.stores import holders
from colonnade.errors import (
    CheckpointError,
    ColonnadeError,
    ConfigError,
    CorruptionError,
)
from colonnade.formats import stamp
from colonnade.publish.export import check_dense, check_rows, export_run
from colonnade.publish.exported import Count, verify_export
from colonnade.store.difference import Difference, Incomparable, difference
from colonnade.store.disk import Disk
from colonnade.store.durable import read_verified, write_durably
from colonnade.store.untrusted import STRICT, FileName, folder_inside, parse_json, parse_stamped
from colonnade.store.verification import Verified, verify_file
from colonnade.table import ITEM_BYTES

FORMAT = "colonnade publication"
WORD = "published.json"
LEAST_BYTES = 1 << 20  # changes smaller than this together are never worth another base
REMEDY = "remove the publication's folder, and let the run publish a new one"
OLD_BASES = 1  # that stay beside the newest: somebody may be reading one


@dataclass(frozen=True, slots=True)
class Base:
    """A whole export, and the number of the change that led to its checkpoint."""

    __pydantic_config__ = STRICT

    folder: FileName
    number: Count
    tag: str
    num_bytes: Count


@dataclass(frozen=True, slots=True)
class Published:
    """What a publication's word says."""

    __pydantic_config__ = STRICT

    run: str
    number: Count
    """Of the newest change, or base."""
    step: Count
    tag: str
    """Of the newest checkpoint."""
    bases: tuple[Base, ...]
    """Ascending numbers; the last is the newest."""
    change_bytes: Count
    """Of all changes since the newest base."""


@dataclass(frozen=True, slots=True)
class ChangeHeader:
    """Checkpoints between which a change leads, as its file says."""

    __pydantic_config__ = STRICT

    run: str
    number: Count
    before: str
    """Tag of the checkpoint it applies to."""
    tag: str
    step: Count


@dataclass(frozen=True, slots=True)
class TableChange:
    """Of one table: ids (N,) and weights (N, width) of rows that are new or have changed, gone (G,) ids."""

    ids: Tensor
    weights: Tensor
    gone: Tensor


@dataclass(frozen=True, slots=True)
class ChangeSet:
    """From one checkpoint to a later one."""

    header: ChangeHeader
    tables: tuple[TableChange, ...]
    dense: dict[str, Tensor]


class Publication:
    """Rank 0's writer. A failure is said and made up for at the next checkpoint; the run's checkpoints do not depend
    on it."""

    def __init__(
        self, run_folder: Path, folder: Path, disk: Disk, *, only_best: bool = True
    ) -> None:
        """only_best: where a validation part chooses, checkpoints that are not the best so far are left out."""
        self.run_folder, self.folder, self.disk = run_folder, folder, disk
        self.only_best = only_best
        self.problem: ColonnadeError | OSError | None = None  # of the newest checkpoint

    def send(self, step: int, kept: Sequence[int], say: Callable[[str], None]) -> None:
        """Publish the checkpoint of `step`, which is there, as the one that was published last may still be."""
        try:
            header = read_header(self.run_folder, step)
            best = header.get("best_step")
            if self.only_best and best is not None and best != step:
                step, header = best, read_header(self.run_folder, best)
            self._send(step, header)
            self.problem = None
        except (ColonnadeError, OSError) as error:
            self.problem = error
            say(
                f"{self.folder}: could not publish step {step}: {error}. Training goes on; the next "
                f"checkpoint makes it up"
            )

    def close(self) -> None:
        """Raises StorageError if the newest checkpoint was not published."""
        if self.problem is not None:
            raise self.problem

    def _send(self, step: int, header: Mapping[str, Any]) -> None:
        self.disk.make_dir(self.folder)
        word, tag = read_word(self.folder), tag_of(self.run_folder, step)
        if word is None:
            self._write(self._with_base(Published(header["run"], 0, step, tag, (), 0)))
            return
        check_owner(self.folder, word, header["run"])
        if word.tag == tag:
            return
        number = word.number + 1
        try:
            content = change_bytes(self.run_folder, word, step, header, number, tag)
        except (
            Incomparable,
            CheckpointError,
        ):  # gone, or laid out otherwise: nothing tells what changed
            self._write(self._with_base(Published(word.run, number, step, tag, word.bases, 0)))
            return
        write_durably(self.disk, self.folder / change_name(number), content)
        grown = word.change_bytes + len(content)
        said = Published(word.run, number, step, tag, word.bases, grown)
        try:
            if grown > max(LEAST_BYTES, word.bases[-1].num_bytes):
                said = self._with_base(said)
        finally:  # where there is no room for a base, the change alone still says it
            self._write(said)

    def _with_base(self, said: Published) -> Published:
        name = f"base-{said.number:012d}-{said.tag}"
        if not (self.folder / name).exists():
            export_run(self.run_folder, self.folder / name, at=said.step)
        size = sum(path.stat().st_size for path in (self.folder / name).iterdir())
        bases = (*said.bases, Base(name, said.number, said.tag, size))[-1 - OLD_BASES :]
        return Published(said.run, said.number, said.step, said.tag, bases, 0)

    def _write(self, said: Published) -> None:
        """The word, and then nothing that it does not need."""
        fields = {**stamp(FORMAT), **asdict(said)}
        write_durably(self.disk, self.folder / WORD, json.dumps(fields, indent=2).encode())
        kept = {base.folder for base in said.bases}
        for path in self.folder.iterdir():
            kind, _, rest = path.name.partition("-")
            is_torn = kind == ".base"  # an export whose writer was killed
            if is_torn or (kind == "base" and path.name not in kept):
                shutil.rmtree(path, ignore_errors=True)
            elif kind == "change" and rest.isdigit() and int(rest) <= said.bases[0].number:
                self.disk.unlink(path)


def change_bytes(
    run_folder: Path, word: Published, step: int, header: Mapping[str, Any], number: int, tag: str
) -> bytes:
    """A change's file: from the checkpoint that the word names to that of `step`. Raises Incomparable, CheckpointError
    where nothing tells what changed between the two, NonFiniteError for weights that are NaN or inf."""
    if word.step >= step or tag_of(run_folder, word.step) != word.tag:
        raise CheckpointError(
            f"{run_folder} has no checkpoint of step {word.step} as it was published"
        )
    earlier = read_header(run_folder, word.step)
    for name in ("shardings", "num_ranks", "model"):
        if earlier.get(name) != header.get(name):
            raise Incomparable(f"{run_folder}: {name} changed after step {word.step}")
    tensors: dict[str, Tensor] = {}
    for t, of_table in enumerate(header["model"]["tables"].values()):
        change = _table_change(run_folder, header, t, of_table, word.step, step)
        check_rows(list(header["model"]["tables"])[t], change.ids, change.weights)
        tensors[f"rows/{t}/ids"], tensors[f"rows/{t}/gone"] = change.ids, change.gone
        tensors[f"rows/{t}/weights"] = change.weights
    place = run_folder / "checkpoints" / f"{step:012d}" / "dense"
    dense = load_state(place, header["run"])["model"]
    check_dense(dense)
    for name, value in dense.items():
        tensors[f"dense/{name}"] = value.contiguous().clone()
    said = ChangeHeader(word.run, number, word.tag, tag, step)
    return save(tensors, metadata={"change": json.dumps(asdict(said))})


def _table_change(
    run_folder: Path,
    header: Mapping[str, Any],
    number: int,
    of_table: Mapping[str, Any],
    earlier: int,
    later: int,
) -> TableChange:
    dtype = of_table["dtype"].split()[0]
    dims = of_table["dim"]
    width = sum(dims.values()) if isinstance(dims, Mapping) else dims
    found: list[tuple[tuple[int, int], Difference]] = []
    for columns, places in holders(header, number):
        first, last = columns or (0, width)
        for place in places:
            each = difference(run_folder / "rows" / place, earlier, later)
            found.append(((first, last), each))
    slices = sorted({columns for columns, _ in found})
    joined = [_joined([each for at, each in found if at == columns]) for columns in slices]
    ids, gone = joined[0].ids, joined[0].gone
    if any(not np.array_equal(each.ids, ids) for each in joined):
        raise Incomparable(
            f"{run_folder}: slices of table {number} changed other rows than its first"
        )
    item = ITEM_BYTES[dtype]
    rows = [each.records[:, : (b - a) * item] for (a, b), each in zip(slices, joined, strict=True)]
    weights = torch.from_numpy(np.ascontiguousarray(np.concatenate(rows, axis=1)))
    shaped = weights.view(getattr(torch, dtype)).view(len(ids), width)
    return TableChange(torch.from_numpy(ids), shaped, torch.from_numpy(gone))


def _joined(parts: list[Difference]) -> Difference:
    """Of stores that have different rows of one table: ids ascending."""
    ids = np.concatenate([each.ids for each in parts])
    order = ids.argsort(kind="stable")
    records = np.concatenate([each.records for each in parts])[order]
    return Difference(ids[order], records, np.sort(np.concatenate([each.gone for each in parts])))


def read_word(folder: Path) -> Published | None:
    """None where nothing is published. Raises CorruptionError, CheckpointError for another version."""
    path = folder / WORD
    if not path.exists():
        return None
    return parse_word(_whole(path), path)


def parse_word(content: bytes, path: Path) -> Published:
    """Of the word's content, which lies at `path`. Raises CheckpointError for another version, CorruptionError for
    anything that is no publication's word."""
    said = parse_stamped(Published, content, path, FORMAT, REMEDY)
    if not said.bases:
        raise CorruptionError(f"{path}: got a publication without a base; {REMEDY}")
    return said


def check_owner(folder: Path, word: Published, run: str) -> None:
    """Raises ConfigError where the folder is another run's."""
    if word.run != run:
        raise ConfigError(
            f"{folder} publishes run {word.run}, this is run {run}; give train.publish (or a predictor's copy) a "
            "folder of its own"
        )


def change_name(number: int) -> str:
    return f"change-{number:012d}"


def read_change(folder: Path, number: int) -> ChangeSet:
    """Raises StorageError where it is not there, CorruptionError where a byte differs or it is no change."""
    path = folder / change_name(number)
    content = _whole(path)
    try:
        end = 8 + int.from_bytes(content[:8], "little")
        text = str(json.loads(content[8:end])["__metadata__"]["change"])
        tensors = load(content)
        tables: list[TableChange] = []
        while f"rows/{len(tables)}/gone" in tensors:
            names = (f"rows/{len(tables)}/{part}" for part in ("ids", "weights", "gone"))
            tables.append(TableChange(*(tensors.pop(name) for name in names)))
        for table in tables:
            _check_ids(table.ids)
            _check_ids(table.gone)
            if bool(torch.isin(table.gone, table.ids).any()):
                raise ValueError("ids that are gone and have changed")
        dense = {name.removeprefix("dense/"): value for name, value in tensors.items()}
        if not all(name.startswith("dense/") for name in tensors):
            raise ValueError(f"tensors {sorted(tensors)}")
        for value in (*dense.values(), *(table.weights for table in tables)):
            if not bool(value.isfinite().all()):
                raise ValueError("weights that are NaN or inf")
    except Exception as error:  # safetensors raises its own kind
        raise CorruptionError(
            f"{path}: got a file that is no change of a publication ({' '.join(str(error).split())}); {REMEDY}"
        ) from None
    header = parse_json(ChangeHeader, text.encode(), path, REMEDY)
    return ChangeSet(header, tuple(tables), dense)


def _check_ids(ids: Tensor) -> None:
    if ids.dtype != torch.int64 or ids.dim() != 1 or not bool((ids[1:] > ids[:-1]).all()):
        raise ValueError("ids that are not int64 (N,), ascending")


def verify_publication(folder: Path) -> Iterator[Verified]:
    """Read every byte that followers of the newest base need and yield each file. Raises CheckpointError,
    CorruptionError, StorageError where the word or a base's model.json cannot be read."""
    word = read_word(folder)
    if word is None:
        raise CheckpointError(f"{folder} holds no publication")
    yield verify_file(folder / WORD, lambda: None)
    yield from verify_export(folder_inside(folder, word.bases[-1].folder))
    for number in range(word.bases[-1].number + 1, word.number + 1):
        yield verify_file(folder / change_name(number), partial(read_change, folder, number))


def _whole(path: Path) -> bytes:
    """Of a file of a publication. Raises CorruptionError, StorageError."""
    try:
        return read_verified(path)
    except CorruptionError:
        raise CorruptionError(f"{path}: got a file that is torn or altered; {REMEDY}") from None


def tag_of(run_folder: Path, step: int) -> str:
    """What tells a checkpoint from every other, of this run or of another one. Raises CheckpointError where it is
    gone."""
    return hashlib.blake2b(_content(run_folder, step), digest_size=8).hexdigest()


def _content(run_folder: Path, step: int) -> bytes:
    path = header_path(run_folder, step)
    if not path.exists():
        raise CheckpointError(f"{run_folder} has no checkpoint of step {step}")
    return read_verified(path)
