"""Delta publishing: a run publishes one full export and then a delta for each checkpoint, which predictors apply.

PUBLISHED/published.json                   current pointer: written last, each time; lists all valid files
PUBLISHED/base-<number>-<tag>/             base: an export (export.py) of the checkpoint after delta <number>
PUBLISHED/change-<number>                  delta: rows and dense weights that differ from the previous checkpoint

A delta is a safetensors file with a checksum (files/durable.py): `rows/<table>/ids` (N,) int64, `rows/<table>/weights`
(N, width), `rows/<table>/gone` (G,) int64, `dense/<name>`. Its metadata has the tags of the checkpoints before and
after it. Only saved checkpoints are published. So a run that is killed and resumed never retracts or repeats a delta.

Legend: N changed rows, G deleted rows.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from colonnade.checkpoint.header import header_path, read_header
from colonnade.checkpoint.states import load_state
from colonnade.checkpoint.stores import find_row_folders_by_slice
from colonnade.errors import (
    CheckpointError,
    ColonnadeError,
    ConfigError,
    CorruptionError,
    StorageError,
)
from colonnade.files.disk import Disk
from colonnade.files.durable import VerifiedFile, read_verified, verify_file, write_durably
from colonnade.files.untrusted import (
    FileName,
    StrictRecord,
    folder_inside,
    open_inside,
    parse_json,
    parse_stamped,
)
from colonnade.formats import make_format_stamp
from colonnade.publish.model_files import MODEL, Count, verify_each_file
from colonnade.publish.model_writer import check_dense_finite, check_rows_finite, export_run
from colonnade.store.log.commits import CommitDifference, IncomparableCommits, diff_commits
from colonnade.table import ITEM_BYTES

FORMAT = "colonnade publication"
CURRENT = "published.json"
MIN_BYTES_FOR_BASE = 1 << 20  # of all deltas together, below which a new base is not worth its cost
REMEDY = "remove the publication's folder, and let the run publish a new one"
MAX_HEADER_BYTES = 1 << 24  # of a delta's list of tensors
NUM_OLD_BASES = 1  # kept in addition to the newest, for predictors that still read them


@dataclass(frozen=True, slots=True)
class BaseExport(StrictRecord):
    """Full export, and the number of the last delta that it includes."""

    folder: FileName
    number: Count
    tag: str
    num_bytes: Count


@dataclass(frozen=True, slots=True)
class CurrentPointer(StrictRecord):
    """Content of published.json: the current base and delta of a publication."""

    run: str
    number: Count
    """Number of the newest delta or base."""
    step: Count
    tag: str
    """Tag of the newest published checkpoint."""
    bases: tuple[BaseExport, ...]
    """Bases in ascending order of numbers; the last is the newest."""
    change_bytes: Count
    """Total size of the deltas since the newest base."""


@dataclass(frozen=True, slots=True)
class DeltaHeader(StrictRecord):
    """Metadata of a delta: the checkpoints before and after it."""

    run: str
    number: Count
    before: str
    """Tag of the checkpoint that the delta applies to."""
    tag: str
    step: Count


@dataclass(frozen=True, slots=True)
class TableDelta:
    """Delta of one table: ids (N,) and weights (N, width) of new or changed rows, ids (G,) of deleted rows."""

    ids: Tensor
    weights: Tensor
    gone: Tensor


@dataclass(frozen=True, slots=True)
class Delta:
    """Changes from one checkpoint to a later one."""

    header: DeltaHeader
    tables: tuple[TableDelta, ...]
    dense: dict[str, Tensor]


class DeltaPublisher:
    """Publisher of a run's checkpoints as deltas, on rank 0.

    A failure is printed, and the next checkpoint publishes the missing changes. The run's checkpoints do not depend on
    it.
    """

    def __init__(
        self,
        run_folder: Path,
        folder: Path,
        disk: Disk,
        *,
        only_best: bool = True,
        every_steps: int = 1,
        num_old_bases: int = NUM_OLD_BASES,
    ) -> None:
        """only_best: publish only checkpoints with the best validation score so far, if there is a validation part.
        every_steps: publish only checkpoints of multiples of this step. num_old_bases: kept beside the newest."""
        self.run_folder = run_folder
        self.folder = folder
        self.disk = disk
        self.only_best = only_best
        self.every_steps = every_steps
        self.num_old_bases = num_old_bases
        self.problem: ColonnadeError | OSError | None = None  # of the newest checkpoint

    def send(
        self, newest_step: int, retained_steps: Sequence[int], print_line: Callable[[str], None]
    ) -> None:
        """Publish the saved checkpoint of `newest_step`. The delta needs the previously published checkpoint to exist,
        too."""
        step = newest_step
        if step % self.every_steps:
            return
        try:
            header = read_header(self.run_folder, step)
            best = header.get("best_step")
            if self.only_best and best is not None and best != step:
                step = best
                header = read_header(self.run_folder, step)
            self._publish_delta_or_base(step, header)
            self.problem = None
        except (ColonnadeError, OSError) as error:
            self.problem = error
            print_line(
                f"{self.folder}: could not publish step {step}: {error}. Training continues; the next "
                "checkpoint publishes it"
            )

    def close(self) -> None:
        """Raise StorageError if the newest checkpoint was not published."""
        if self.problem is not None:
            raise self.problem

    def _publish_delta_or_base(self, step: int, header: Mapping[str, Any]) -> None:
        """Publish a step as a delta, or as a new base if the difference is unknown or deltas are large."""
        self.disk.make_dir(self.folder)
        current = read_current(self.folder)
        tag = checkpoint_tag(self.run_folder, step)
        if current is None:
            self._write_current(
                self._export_new_base(CurrentPointer(header["run"], 0, step, tag, (), 0))
            )
            return
        check_publication_owner(self.folder, current, header["run"])
        if current.tag == tag:
            return
        next_number = current.number + 1
        try:
            delta = build_delta(self.run_folder, current, step, header, next_number, tag)
        except (IncomparableCommits, CheckpointError, CorruptionError):
            # The previous checkpoint is deleted, damaged or has other shardings, so the difference is unknown.
            self._write_current(
                self._export_new_base(
                    CurrentPointer(current.run, next_number, step, tag, current.bases, 0)
                )
            )
            return
        write_durably(self.disk, self.folder / delta_file_name(next_number), delta)
        total_delta_bytes = current.change_bytes + len(delta)
        updated = CurrentPointer(
            current.run, next_number, step, tag, current.bases, total_delta_bytes
        )
        try:
            if total_delta_bytes > max(MIN_BYTES_FOR_BASE, current.bases[-1].num_bytes):
                updated = self._export_new_base(updated)
        finally:  # without space for a base, the delta alone is still valid
            self._write_current(updated)

    def _export_new_base(self, current: CurrentPointer) -> CurrentPointer:
        """Export the current checkpoint as a base; return the pointer with it."""
        name = f"base-{current.number:012d}-{current.tag}"
        if not (self.folder / name).exists():
            export_run(self.run_folder, self.folder / name, at=current.step)
        size = sum(path.stat().st_size for path in (self.folder / name).iterdir())
        bases = (*current.bases, BaseExport(name, current.number, current.tag, size))[
            -1 - self.num_old_bases :
        ]
        return CurrentPointer(current.run, current.number, current.step, current.tag, bases, 0)

    def _write_current(self, current: CurrentPointer) -> None:
        """Write the current pointer, then delete bases and deltas that it does not need."""
        fields = {**make_format_stamp(FORMAT), **asdict(current)}
        write_durably(self.disk, self.folder / CURRENT, json.dumps(fields, indent=2).encode())
        base_folders = {base.folder for base in current.bases}
        for path in self.folder.iterdir():
            kind, _, suffix = path.name.partition("-")
            is_torn = kind == ".base"  # incomplete export of a killed writer
            if is_torn or (kind == "base" and path.name not in base_folders):
                shutil.rmtree(path, ignore_errors=True)
            elif kind == "change" and suffix.isdigit() and int(suffix) <= current.bases[0].number:
                self.disk.unlink(path)


def build_delta(
    run_folder: Path,
    current_pointer: CurrentPointer,
    step: int,
    header: Mapping[str, Any],
    delta_number: int,
    new_tag: str,
) -> bytes:
    """Build the file of a delta from the currently published checkpoint to that of `step`.

    Raises IncomparableCommits, CheckpointError if the difference between the two is unknown, NonFiniteError for weights
    that are NaN or inf.
    """
    if (
        current_pointer.step >= step
        or checkpoint_tag(run_folder, current_pointer.step) != current_pointer.tag
    ):
        raise CheckpointError(
            f"{run_folder} has no checkpoint of step {current_pointer.step} as it was published"
        )
    previous_header = read_header(run_folder, current_pointer.step)
    for name in ("shardings", "num_ranks", "model"):
        if previous_header.get(name) != header.get(name):
            raise IncomparableCommits(
                f"{run_folder}: {name} changed after step {current_pointer.step}"
            )
    tensors: dict[str, Tensor] = {}
    for table_index, table_header in enumerate(header["model"]["tables"].values()):
        delta = _build_table_delta(
            run_folder, header, table_index, table_header, current_pointer.step, step
        )
        check_rows_finite(list(header["model"]["tables"])[table_index], delta.ids, delta.weights)
        tensors[f"rows/{table_index}/ids"] = delta.ids
        tensors[f"rows/{table_index}/gone"] = delta.gone
        tensors[f"rows/{table_index}/weights"] = delta.weights
    dense_path = run_folder / "checkpoints" / f"{step:012d}" / "dense"
    dense = load_state(dense_path, header["run"])["model"]
    check_dense_finite(dense)
    for name, value in dense.items():
        tensors[f"dense/{name}"] = value.contiguous().clone()
    delta_header = DeltaHeader(
        current_pointer.run, delta_number, current_pointer.tag, new_tag, step
    )
    return save(tensors, metadata={"change": json.dumps(asdict(delta_header))})


def _build_table_delta(
    run_folder: Path,
    header: Mapping[str, Any],
    table_index: int,
    table_header: Mapping[str, Any],
    earlier_step: int,
    later_step: int,
) -> TableDelta:
    """Compute the difference of a table between two steps, from the manifests of its stores."""
    dtype = table_header["dtype"].split()[0]
    dims = table_header["dim"]
    width = sum(dims.values()) if isinstance(dims, Mapping) else dims
    differences: list[tuple[tuple[int, int], CommitDifference]] = []
    for columns, paths in find_row_folders_by_slice(header, table_index):
        first, last = columns or (0, width)
        for path in paths:
            part = diff_commits(run_folder / "rows" / path, earlier_step, later_step)
            differences.append(((first, last), part))
    slices = sorted({columns for columns, _ in differences})
    merged = [
        _merge_differences([part for part_columns, part in differences if part_columns == columns])
        for columns in slices
    ]
    ids = merged[0].ids
    gone = merged[0].gone
    if any(not np.array_equal(part.ids, ids) for part in merged):
        raise IncomparableCommits(
            f"{run_folder}: slices of table {table_index} changed other rows than its first"
        )
    item_bytes = ITEM_BYTES[dtype]
    rows = [
        part.records[:, : (b - a) * item_bytes] for (a, b), part in zip(slices, merged, strict=True)
    ]
    weights = torch.from_numpy(np.ascontiguousarray(np.concatenate(rows, axis=1)))
    shaped = weights.view(getattr(torch, dtype)).view(len(ids), width)
    return TableDelta(torch.from_numpy(ids), shaped, torch.from_numpy(gone))


def _merge_differences(store_differences: list[CommitDifference]) -> CommitDifference:
    """Merge the differences of stores with different rows of one table; ids ascending."""
    ids = np.concatenate([part.ids for part in store_differences])
    order = ids.argsort(kind="stable")
    records = np.concatenate([part.records for part in store_differences])[order]
    return CommitDifference(
        ids[order], records, np.sort(np.concatenate([part.gone for part in store_differences]))
    )


def read_current(folder: Path) -> CurrentPointer | None:
    """Read the current pointer of a publication; None if nothing is published.

    Raises CorruptionError, CheckpointError for another version.
    """
    path = folder / CURRENT
    if not path.exists():
        return None
    return parse_current(_read_checked(path), path)


def parse_current(content: bytes, path: Path) -> CurrentPointer:
    """Parse the content of published.json at `path`.

    Raises CheckpointError for another version, CorruptionError for any other content.
    """
    current = parse_stamped(CurrentPointer, content, path, FORMAT, REMEDY)
    if not current.bases:
        raise CorruptionError(f"{path}: got a publication without a base; {REMEDY}")
    newest = current.bases[-1]
    numbers = [*(base.number for base in current.bases), current.number]
    # Followers of such a pointer would open its base again and again.
    is_forged = newest.number == current.number and newest.tag != current.tag
    if numbers != sorted(numbers) or is_forged:
        raise CorruptionError(
            f"{path}: got bases and a newest change of numbers {numbers} and of tags {newest.tag} and {current.tag}, "
            f"wanted numbers that ascend, and one tag for one number; {REMEDY}"
        )
    return current


def list_changes_by_base(
    folder: Path, current: CurrentPointer
) -> Iterator[tuple[BaseExport, Iterable[int]]]:
    """Yield each base on disk, and the numbers of the changes that lead from it to later checkpoints.

    Changes end at the next base. Those of an older base end at the first missing one: a follower's copy has only what
    it needed.
    """
    newest = current.bases[-1]
    bases = [b for b in current.bases if b is newest or folder_inside(folder, b.folder).exists()]
    ends = [*(base.number for base in bases[1:]), current.number]
    for base, end in zip(bases, ends, strict=True):
        numbers = range(base.number + 1, end + 1)
        stored = takewhile(lambda number: (folder / delta_file_name(number)).exists(), numbers)
        yield base, numbers if base is newest else stored


def check_publication_owner(folder: Path, current: CurrentPointer, run: str) -> None:
    """Raise ConfigError if the folder is another run's."""
    if current.run != run:
        raise ConfigError(
            f"{folder} publishes run {current.run}, this is run {run}; give train.publish (or a predictor's copy) a "
            "folder of its own"
        )


def delta_file_name(number: int) -> str:
    """Return the file name of a delta."""
    return f"change-{number:012d}"


def read_delta(folder: Path, delta_number: int) -> Delta:
    """Read and check a delta. Raises StorageError if it is missing, CorruptionError if it is damaged or no delta."""
    path = folder / delta_file_name(delta_number)
    content = _read_checked(path)
    try:
        end = 8 + int.from_bytes(content[:8], "little")
        text = str(json.loads(content[8:end])["__metadata__"]["change"])
        tensors = load(content)
        tables: list[TableDelta] = []
        while f"rows/{len(tables)}/gone" in tensors:
            names = (f"rows/{len(tables)}/{part}" for part in ("ids", "weights", "gone"))
            tables.append(TableDelta(*(tensors.pop(name) for name in names)))
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
    header = parse_json(DeltaHeader, text.encode(), path, REMEDY)
    return Delta(header, tuple(tables), dense)


def read_delta_header(folder: Path, number: int) -> DeltaHeader:
    """Read a delta's metadata alone, unchecked, to list steps: `read_delta` checks what is applied.

    Raises StorageError if it is missing, CorruptionError if it is no delta.
    """
    path = folder / delta_file_name(number)
    file = open_inside(folder, path.name)
    try:
        size = int.from_bytes(os.pread(file.fd, 8, 0), "little")
        content = os.pread(file.fd, min(size, MAX_HEADER_BYTES), 8)
        text = str(json.loads(content)["__metadata__"]["change"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CorruptionError(
            f"{path}: got no change of a publication ({error}); {REMEDY}"
        ) from None
    finally:
        file.close()
    return parse_json(DeltaHeader, text.encode(), path, REMEDY)


def _check_ids(ids: Tensor) -> None:
    if ids.dtype != torch.int64 or ids.dim() != 1 or not bool((ids[1:] > ids[:-1]).all()):
        raise ValueError("ids that are not int64 (N,), ascending")


def read_linked_delta(
    folder: Path, delta_number: int, previous_tag: str, current_pointer: CurrentPointer
) -> Delta:
    """Read change `delta_number` as `read_delta`, and check that it leads from checkpoint `previous_tag` ("": any) to
    the next one.

    Raises CheckpointError for another publication's, and if the pointer states another next one, where followers would
    start over forever.
    """
    delta = read_delta(folder, delta_number)
    header = delta.header
    tags = {base.number: base.tag for base in current_pointer.bases} | {
        current_pointer.number: current_pointer.tag
    }
    got = (header.run, header.number, header.before, header.tag)
    wanted = (
        current_pointer.run,
        delta_number,
        previous_tag or header.before,
        tags.get(delta_number, header.tag),
    )
    if got != wanted:
        raise CheckpointError(
            f"{folder}: change {delta_number}: got one of run {got[0]} that leads from checkpoint {got[2]} "
            f"to {got[3]}, "
            f"wanted run {wanted[0]}, from {wanted[2]} to {wanted[3]}: it is another publication's. Publish to a "
            "folder of its own"
        )
    return delta


def verify_publication(folder: Path) -> Iterator[VerifiedFile]:
    """Read every byte of every step that is still published, check that its tags connect them, and yield each file.

    Raises CheckpointError, CorruptionError, StorageError if published.json cannot be read.
    """
    current = read_current(folder)
    if current is None:
        raise CheckpointError(f"{folder} holds no publication")
    yield verify_file(folder / CURRENT, lambda: None)
    for base, numbers in list_changes_by_base(folder, current):
        base_folder = folder_inside(folder, base.folder)
        tag = base.tag
        try:
            yield from verify_each_file(base_folder)
        except (CheckpointError, StorageError) as error:
            yield VerifiedFile(base_folder / MODEL, 0, str(error))
        for number in numbers:
            read = partial(read_linked_delta, folder, number, tag, current)
            file = verify_file(folder / delta_file_name(number), read)
            yield file
            if not file.path.exists():
                break
            tag = "" if file.problem else read_delta_header(folder, number).tag


def _read_checked(path: Path) -> bytes:
    """Read a file of a publication and check its checksum. Raises CorruptionError, StorageError."""
    try:
        return read_verified(path)
    except CorruptionError:
        raise CorruptionError(f"{path}: got a file that is torn or altered; {REMEDY}") from None


def checkpoint_tag(run_folder: Path, step: int) -> str:
    """Return the digest of a checkpoint's header, which identifies it among all runs. CheckpointError if missing."""
    return hashlib.blake2b(_read_header_bytes(run_folder, step), digest_size=8).hexdigest()


def _read_header_bytes(run_folder: Path, step: int) -> bytes:
    path = header_path(run_folder, step)
    if not path.exists():
        raise CheckpointError(f"{run_folder} has no checkpoint of step {step}")
    return read_verified(path)
