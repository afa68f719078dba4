"""CONTRIBUTING.md sends authors to files that exist, and to names that are in them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "colonnade"
OUTSIDE = ("native/", "tests/", "docs/", "bench/")
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
REFERENCE = re.compile(r"`([\w./-]+\.(?:py|cc|h|md|json|txt))(?:: (\w+))?`")
REFERENCES = sorted(
    {(path, name) for path, name in REFERENCE.findall(TEXT) if "NAME" not in Path(path).stem}
)
KINDS = (
    "an exchange",
    "a tier",
    "a model",
    "a file format",
    "a codec",
    "a metric",
    "a verb of the command line",
    "an eviction policy",
    "an optimizer",
)


@pytest.mark.parametrize(("path", "name"), REFERENCES, ids=lambda value: value)
def test_a_named_file_has_the_name(path, name):
    file = (ROOT if path.startswith(OUTSIDE) else SOURCE) / path
    assert file.is_file(), f"CONTRIBUTING.md names {path}, which does not exist"
    if name:
        assert re.search(rf"\b{name}\b", file.read_text(encoding="utf-8")), f"{path} has no {name}"


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_addition_names_its_files(kind):
    section = TEXT.partition(f"\n## Add {kind}\n")[2].partition("\n## ")[0]
    assert len(REFERENCE.findall(section)) >= 2
