"""Verification of every byte of a commit of one store against its checksums, file by file, past damaged files.

Manifests have all it needs to know of the table. Opening a store checks in addition that no id is live twice.
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
class VerifiedFile:
    """Result of the verification of one file."""

    path: Path
    num_bytes: int
    problem: str = ""
    """Description of the damage; "" if every byte is right."""


def verify_file(path: Path, read: Callable[[], object]) -> VerifiedFile:
    """Verify one file. read: reads the file and raises what is wrong with it."""
    try:
        read()
        return VerifiedFile(path, path.stat().st_size)
    except (CorruptionError, CheckpointError, StorageError) as error:
        problem = (
            str(error.strerror if error.strerror else error)
            if isinstance(error, OSError)
            else str(error)
        )
        return VerifiedFile(path, path.stat().st_size if path.is_file() else 0, problem)


def verify_store(
    directory: Path, step: int, *, places: Sequence[Path] = ()
) -> Iterator[VerifiedFile]:
    """Verify the files of a commit of one table's shard, in the order: manifest, bitmaps, then key lists and segments.

    places: present paths of directories of the store that are not where the manifest says. Raises no error of a file.
    """
    path = directory / manifest.file_name(step)
    opened: list[tuple[manifest.Manifest, bytes, Stripes]] = []

    def read_manifest() -> None:
        fields = manifest.read_manifest_fields(directory, step)
        table = fields["table"]
        identity = fields["identity"]
        width = fields["record_bytes"]
        commit, store_id, known = manifest.read_manifest(
            directory, step, table=table, identity=identity, record_bytes=width
        )
        wanted = [Stripe(place, 1) for place in places]
        stripes = open_stripes(
            directory, wanted, disk=None, home_lock=None, known=known, store_id=store_id
        )
        opened.append((commit, segment.owner_digest(table, identity), stripes))

    yield verify_file(path, read_manifest)
    if not opened:
        return
    commit, owner, stripes = opened[0]
    yield verify_file(
        directory / live_name(step), lambda: manifest.read_live_bitmaps(directory, commit)
    )
    shape = SegmentShape(commit.record_bytes, owner)
    for entry in commit.segments:
        yield from _verify_segment(entry, shape, stripes)


def _verify_segment(
    entry: SegmentEntry, shape: SegmentShape, stripes: Stripes
) -> Iterator[VerifiedFile]:
    """Verify a key list, then its segment: without ids, only the segment's header and length can be checked."""
    rows_name = segment.file_name(entry.number)
    keys_name = key_list.file_name(entry.number)
    # The last known directory, in case it is out of reach.
    last = Path(stripes.known.get(entry.stripe, stripes.home))
    stripe = stripes.find_stripe(rows_name, entry.stripe)
    directory = last if stripe is None else stripes.directories[stripe]
    rows = directory / rows_name
    path = directory / keys_name
    keys: list[key_list.Keys] = []

    def read_keys() -> None:
        file = key_list.open_key_list(stripes.find_stripe_file(keys_name, entry.stripe))
        keys.append(key_list.read_key_list(file, entry.number, entry.num_records, entry.checksum))

    def read_rows() -> None:
        at = stripes.find_stripe_file(rows_name, entry.stripe)
        file = segment.open_sealed_segment(at, shape, entry.num_bytes, entry.header_crc)
        if not keys:
            raise CorruptionError(
                f"{rows}: its records cannot be told without {path.name}. Restore that file from a copy, or go "
                "back to an older commit"
            )
        segment.verify_records(file, entry.number, shape, keys[0], entry.header_crc, entry.checksum)

    yield verify_file(path, read_keys)
    yield verify_file(rows, read_rows)


def verify_durable(path: Path) -> VerifiedFile:
    """Verify a small file that has a checksum line."""
    return verify_file(path, lambda: read_verified(path))
