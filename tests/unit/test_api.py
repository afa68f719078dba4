"""The public names: each is there, explains itself, and is on the reference page."""

from __future__ import annotations

import inspect
import re

import pytest
from public_api import FILE, MODULES, list_names

import colonnade


@pytest.mark.parametrize("name", colonnade.__all__)
def test_a_public_name_explains_itself(name):
    value = getattr(colonnade, name)
    text = inspect.getdoc(value)
    assert text, name
    if inspect.isclass(value):
        assert not text.startswith(f"{name}("), f"{name} has only the words dataclass gives it"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Tabel'"):
        _ = colonnade.Tabel
    assert set(colonnade.__all__) <= set(dir(colonnade))


def test_the_public_api_is_as_it_was_declared():
    """A difference is shown line by line; `python tests/public_api.py` accepts it."""
    assert list_names() == FILE.read_text(encoding="utf-8").splitlines()


ROOT = FILE.parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHOWN = [*sorted((ROOT / "recipes").glob("*.py")), *PAGES]


@pytest.mark.parametrize("path", SHOWN, ids=lambda path: path.name)
def test_what_users_read_imports_public_names_alone(path):
    imports = re.findall(
        r"^\s*(?:from (colonnade[\w.]*) import|import (colonnade[\w.]*))", path.read_text(), re.M
    )
    assert {a or b for a, b in imports} <= set(MODULES)
