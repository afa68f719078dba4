"""Every byte of a commit of one store, compared with what its checksums say: file by file, on past what is damaged.

Nothing needs to be known of the table: manifests say it. Opening a store checks beyond this that
no id is live twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from colonnade.errors import CheckpointError, CorruptionError, StorageError
from colonnade.store import key_list, manifest, segment
from colonnade.store.contract import SegmentEntry
from colonnade.store.durable import read_verified
from colonnade.store.live import file_name as live_name
from colonnade.store.segment import SegmentShape
from colonnade.store.stripes import Stripe, Stripes, open_stripes


@dataclass(frozen=True, slots=True)
class Verified:
    """A file that was read."""

    path: Path
    num_bytes: int
    problem: str = ""
    """What is wrong with it, in words; "" where all of it is as it was written."""


def verify_file(path: Path, read: Callable[[], object]) -> Verified:
    """`read` raises what is wrong with the file."""
    try:
        read()
        return Verified(path, path.stat().st_size)
    except (CorruptionError, CheckpointError, StorageError) as error:
        said = (
            str(error.strerror if error.strerror else error)
            if isinstance(error, OSError)
            else str(error)
        )
        return Verified(path, path.stat().st_size if path.is_file() else 0, said)


def verify_store(directory: Path, step: int, *, places: Sequence[Path] = ()) -> Iterator[Verified]:
    """The files of a commit of one table's shard as they are read: manifest, bitmaps, then segments and key lists.

    places: where directories of the store lie now that are not where the manifest says. Raises nothing of the files.
    """
    path = directory / manifest.file_name(step)
    found: list[tuple[manifest.Manifest, bytes, Stripes]] = []

    def read_manifest() -> None:
        said = manifest.describe(directory, step)
        table, identity, width = said["table"], said["identity"], said["record_bytes"]
        whole, store_id, known = manifest.read_manifest(
            directory, step, table=table, identity=identity, record_bytes=width
        )
        wanted = [Stripe(place, 1) for place in places]
        stripes = open_stripes(
            directory, wanted, disk=None, home_lock=None, known=known, store_id=store_id
        )
        found.append((whole, segment.owner_digest(table, identity), stripes))

    yield verify_file(path, read_manifest)
    if not found:
        return
    whole, owner, stripes = found[0]
    yield verify_file(directory / live_name(step), lambda: manifest.read_live(directory, whole))
    shape = SegmentShape(whole.record_bytes, owner)
    for entry in whole.segments:
        yield from _segment(entry, shape, stripes)


def _segment(entry: SegmentEntry, shape: SegmentShape, stripes: Stripes) -> Iterator[Verified]:
    """The key list first: without it, of the segment only header and length can be told."""
    rows_name, keys_name = segment.file_name(entry.number), key_list.file_name(entry.number)
    # Where it was last, if that directory is out of reach.
    last = Path(stripes.known.get(entry.stripe, stripes.home))
    stripe = stripes.lies_in(rows_name, entry.stripe)
    directory = last if stripe is None else stripes.directories[stripe]
    rows, path = directory / rows_name, directory / keys_name
    found: list[key_list.Keys] = []

    def read_keys() -> None:
        file = key_list.open_key_list(stripes.find(keys_name, entry.stripe))
        found.append(key_list.read_key_list(file, entry.number, entry.num_records, entry.checksum))

    def read_rows() -> None:
        at = stripes.find(rows_name, entry.stripe)
        file = segment.open_segment(at, shape, entry.num_bytes, entry.header_crc)
        if not found:
            raise CorruptionError(
                f"{rows}: its records cannot be told without {path.name}. Restore that file from a copy, or go "
                "back to an older commit"
            )
        segment.check_rows(file, entry.number, shape, found[0], entry.header_crc, entry.checksum)

    yield verify_file(path, read_keys)
    yield verify_file(rows, read_rows)


def verify_durable(path: Path) -> Verified:
    """A small file that carries its checksum."""
    return verify_file(path, lambda: read_verified(path))
