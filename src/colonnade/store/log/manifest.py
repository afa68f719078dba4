"""Manifests: `manifest-<step>.json` lists the segments of one commit. Format: store/format.md."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from colonnade.errors import CheckpointError, CorruptionError
from colonnade.files.disk import Disk
from colonnade.files.durable import read_verified, write_durably
from colonnade.formats import check_format_version, make_format_stamp, parse_json_object
from colonnade.store.contract import Manifest, SegmentEntry
from colonnade.store.log import key_list, live, segment
from colonnade.store.log.segment import SegmentShape, owner_digest
from colonnade.store.log.stripes import Stripes

FORMAT = "colonnade store manifest"
FILE_NAME = re.compile(r"manifest-(0|[1-9]\d*)\.json")


Size = Annotated[int, Field(ge=0)]
Hexadecimal = Annotated[str, Field(pattern=r"^[0-9a-f]+$")]


class _Live(TypedDict):
    file: Annotated[str, Field(pattern=r"^live-\d+\.bits$")]
    bytes: Size
    crc: Hexadecimal


class _Segment(TypedDict):
    file: Annotated[str, Field(pattern=r"^segment-\d{8}\.rows$")]
    stripe: Size
    bytes: Size
    keys: Size
    header: Hexadecimal
    checksum: Hexadecimal
    records: Size
    live_rows: Size


class _Fields(TypedDict):
    """Fields of a manifest in store/format.md, other than its format and version."""

    step: int
    table: str
    identity: str
    record_bytes: Size
    num_rows: Size
    lifetime_bytes: Size
    live: _Live
    store: str
    stripes: dict[Annotated[str, Field(pattern=r"^\d+$")], str]
    segments: list[_Segment]


_FIELDS = TypeAdapter(_Fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogTable:
    """Table of a log, and the share of its rows. A log opens for its own table, width and identity alone."""

    name: str
    record_bytes: int
    identity: str
    """Name of the run, rank and world."""
    rows: int | None = None
    """Size of a vocabulary table, of which the log has the ids of owner `owner_index` only; None: any id."""
    num_owners: int = 1
    owner_index: int = 0

    @property
    def shape(self) -> SegmentShape:
        return SegmentShape(self.record_bytes, owner_digest(self.name, self.identity))


def manifest_file_name(step: int) -> str:
    return f"manifest-{step}.json"


def committed_steps(directory: Path) -> list[int]:
    """List the steps committed in a store's directory, ascending, without reading their content."""
    if not directory.is_dir():
        return []
    matches = [FILE_NAME.fullmatch(path.name) for path in directory.iterdir()]
    return sorted(int(match[1]) for match in matches if match)


def write_manifest(disk: Disk, directory: Path, manifest: Manifest) -> None:
    """Write a manifest; it is durable when this returns."""
    fields = {
        **make_format_stamp(FORMAT),
        "step": manifest.step,
        "table": manifest.table,
        "identity": manifest.identity,
        "record_bytes": manifest.record_bytes,
        "num_rows": manifest.num_rows,
        "lifetime_bytes": manifest.lifetime_bytes,
        "live": {
            "file": live.live_file_name(manifest.step),
            "bytes": manifest.live_bytes,
            "crc": f"{manifest.live_crc:08x}",
        },
        "store": manifest.store_id,
        "stripes": {str(number): path for number, path in manifest.stripe_paths.items()},
        "segments": [
            {
                "file": segment.segment_file_name(entry.number),
                "stripe": entry.stripe,
                "bytes": entry.num_bytes,
                "keys": entry.keys_bytes,
                "header": f"{entry.header_crc:08x}",
                "checksum": f"{entry.checksum:016x}",
                "records": entry.num_records,
                "live_rows": entry.num_live,
            }
            for entry in manifest.segments
        ],
    }
    write_durably(disk, directory / manifest_file_name(manifest.step), json.dumps(fields).encode())


def read_manifest_fields(directory: Path, step: int) -> dict[str, Any]:
    """Read a commit's manifest without knowing the table. Raises CorruptionError, CheckpointError."""
    path = directory / manifest_file_name(step)
    if not path.exists():
        raise CheckpointError(
            f"{path}: missing, but its run's commit names it. Restore it from a copy"
        )
    fields = parse_json_object(path, read_verified(path))
    check_format_version(path, fields, FORMAT)
    try:
        _FIELDS.validate_python(fields)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise CorruptionError(
            f"{path}: got a manifest with a bad {field}: {first['msg']}. Restore it from a copy, or go back to an "
            "older commit"
        ) from None
    return fields


@dataclass(frozen=True, slots=True)
class CommitFile:
    """File that a manifest lists: path, length, and a checksum that distinguishes contents of one name."""

    path: Path
    num_bytes: int
    content: str


def list_commit_files(directory: Path, manifest_fields: dict[str, Any]) -> Iterator[CommitFile]:
    """List the segments and key lists of a commit. manifest_fields: its manifest as read by `read_manifest_fields`."""
    stripes = Stripes(directory)
    stripes.directories |= {int(n): Path(path) for n, path in manifest_fields["stripes"].items()}
    for part in manifest_fields["segments"]:
        content = f"{part['header']}{part['checksum']}"
        rows = stripes.find_stripe_file(part["file"], part["stripe"])
        yield CommitFile(rows, part["bytes"], content)
        keys = stripes.find_stripe_file(
            key_list.key_list_file_name(segment_number(part["file"])), part["stripe"]
        )
        yield CommitFile(keys, part["keys"], content)


def live_bitmap_path(directory: Path, fields: dict[str, Any]) -> Path:
    return directory / str(fields["live"]["file"])


def segment_number(file: str) -> int:
    """Parse a segment's number from its file's name."""
    return int(file[8:16])


def read_manifest(directory: Path, step: int, table: LogTable | None = None) -> Manifest:
    """Read a manifest. table: the log's; None: whatever the manifest says.

    Raises CorruptionError (altered), CheckpointError (absent, or of another table, run or version).
    """
    path = directory / manifest_file_name(step)
    if table is not None and not path.exists():
        steps = ", ".join(map(str, committed_steps(directory))) or "none"
        raise CheckpointError(
            f"{directory}: step {step} was not committed here; committed steps: {steps}. Open one of "
            "these, or step=None for an empty store"
        )
    fields = read_manifest_fields(directory, step)
    wanted: dict[str, object] = {"step": step}
    if table is not None:
        wanted["table"] = table.name
        wanted["identity"] = table.identity
        wanted["record_bytes"] = table.record_bytes
    for name, value in wanted.items():
        if fields.get(name) != value:
            raise CheckpointError(
                f"{path}: got {name} {fields.get(name)!r}, wanted {value!r}. Name the run, rank and table "
                "that wrote this directory, or start a new one"
            )
    segments = tuple(
        SegmentEntry(
            number=segment_number(part["file"]),
            stripe=part["stripe"],
            num_bytes=part["bytes"],
            keys_bytes=part["keys"],
            header_crc=int(part["header"], 16),
            checksum=int(part["checksum"], 16),
            num_records=part["records"],
            num_live=part["live_rows"],
        )
        for part in fields["segments"]
    )
    return Manifest(
        step=step,
        table=fields["table"],
        record_bytes=fields["record_bytes"],
        num_rows=fields["num_rows"],
        lifetime_bytes=fields["lifetime_bytes"],
        live_bytes=fields["live"]["bytes"],
        live_crc=int(fields["live"]["crc"], 16),
        identity=fields["identity"],
        store_id=fields["store"],
        stripe_paths={int(n): stripe for n, stripe in fields["stripes"].items()},
        segments=segments,
    )


def find_lost_commits(commits: Iterable[Manifest], stripes: Stripes) -> dict[int, str]:
    """Map the step of each commit with a segment in a missing stripe to the last known directory of that stripe."""
    return {
        m.step: stripes.recorded_paths.get(entry.stripe, f"stripe {entry.stripe}")
        for m in commits
        for entry in m.segments
        if stripes.find_stripe(segment.segment_file_name(entry.number), entry.stripe) is None
    }


def read_live_bitmaps(directory: Path, manifest: Manifest) -> list[live.LiveRecords]:
    """Read the live bitmaps of a commit, in order of its segments. Raises CorruptionError, StorageError."""
    path = directory / live.live_file_name(manifest.step)
    if not path.exists():
        raise segment.missing_file_error(path)
    content = read_verified(path)
    got = (len(content), segment.crc32c(content))
    if got != (manifest.live_bytes, manifest.live_crc):
        raise CorruptionError(
            f"{path}: got {got[0]} bytes of crc {got[1]:08x}, wanted {manifest.live_bytes} of "
            f"{manifest.live_crc:08x}: they are of another commit. Restore it from a copy, or go back to an "
            "older commit"
        )
    parts = live.parse_live_bitmaps(path, content, manifest.step)
    listed = [(p.segment, p.num_records, p.num_live) for p in parts]
    if listed != [(s.number, s.num_records, s.num_live) for s in manifest.segments]:
        raise CorruptionError(
            f"{path}: got other segments than {manifest_file_name(manifest.step)} lists. Go back to an older commit"
        )
    return parts
