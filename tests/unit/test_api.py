"""The public names: each is there, explains itself, and is on the reference page."""

from __future__ import annotations

import inspect

import pytest

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
