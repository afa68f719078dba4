"""Names and versions of the file formats that Colonnade writes, and what to say of a file that has another one.

The binary files of a store have their versions in their headers (`store/segment.py`, `key_list.py`, `live.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from colonnade.errors import CheckpointError, CorruptionError

VERSIONS = {
    "colonnade commit": 3,
}
"""Version of each format, as the files state it under `format` and `version`."""

REMEDY = "read it with the Colonnade that wrote it, or write it again with this one"


def stamp(name: str) -> dict[str, Any]:
    """Return the two fields that state a file's format."""
    return {"format": name, "version": VERSIONS[name]}


def check_stamp(where: Path | str, fields: Mapping[str, Any], name: str) -> None:
    """Raise CheckpointError, which gives both versions, unless `fields` state format `name` in the version known."""
    got, wanted = (fields.get("format"), fields.get("version")), (name, VERSIONS[name])
    if got != wanted:
        raise CheckpointError(
            f"{where}: got format {got[0]!r} version {got[1]!r}, this Colonnade reads {name!r} version {wanted[1]}; "
            f"{REMEDY}"
        )


def parse_yaml(text: str, loader: Any = yaml.SafeLoader) -> Any:
    """Parse YAML. Raises ValueError, which says why in one line, for text that is none or is nested too deeply."""
    try:
        return yaml.load(text, Loader=loader)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that is none
        raise ValueError(" ".join(str(error).split())) from None
    except RecursionError:
        raise ValueError("values are nested too deeply") from None


def parse_object(where: Path | str, content: str | bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises CorruptionError for anything else."""
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
        raise CorruptionError(
            f"{where}: got text that is no JSON ({why}), wanted an object; restore it from a copy"
        ) from None
    if not isinstance(fields, dict):
        raise CorruptionError(
            f"{where}: got a JSON {type(fields).__name__}, wanted an object; restore it from a copy"
        )
    return fields
