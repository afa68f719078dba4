"""Validation of frozen dataclasses by the types of their fields: pydantic checks them, the messages are Colonnade's."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Hashable, Mapping
from functools import cache
from typing import Annotated, Any, cast, get_type_hints

from pydantic import AllowInfNan, TypeAdapter, ValidationError
from pydantic import Field as Limits

from colonnade.errors import ConfigError


class Expected(str):
    """Words for what a field should hold: `lr: Annotated[float, Limits(gt=0), Expected("more than 0")]`."""


NonNegative = Annotated[
    float, AllowInfNan(False), Limits(ge=0), Expected("a finite number, 0 or more")
]
Fraction = Annotated[float, Limits(ge=0, lt=1), Expected("a number of 0 or more, below 1")]

WORDS = {
    "int": "wanted a whole number",
    "float": "wanted a number",
    "bool": "wanted true or false",
    "string": "wanted text",
    "list": "wanted a list",
    "tuple": "wanted a list",
}
"""Words for the type that a value should have, by how the kind of pydantic's error begins."""


def validate_fields(value: Any, subject: str | None = None, *, strict: bool | None = True) -> None:
    """Check the fields of a frozen dataclass against their types, and store what pydantic makes of them.

    subject: what the message names first; default: the class, "": nothing. strict: whether text is refused as a number
    and a list as a tuple; None: as the types say.
    Raises ConfigError with the field, its value and what is wanted: the type's `Expected`, or else pydantic's words.
    """
    for name, (adapter, expected) in _build_adapters(cast(Hashable, type(value))).items():
        current = getattr(value, name)
        try:
            checked = adapter.validate_python(current, strict=strict)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            wanted = f"wanted {expected}" if expected else describe_problem(problem)
            subject = type(value).__name__ if subject is None else subject
            prefix = f"{subject}: " if subject else ""
            raise ConfigError(f"{prefix}got {name}={current!r}, {wanted}") from None
        object.__setattr__(value, name, checked)


def describe_problem(problem: Mapping[str, Any]) -> str:
    """Say what one of pydantic's errors wants: a type, a limit, one of some words; else return its own words."""
    if problem["type"] == "literal_error":
        return _suggest_word(problem["input"], problem["ctx"]["expected"])
    kind, _, _ = problem["type"].partition("_")
    if problem["type"].endswith(("_type", "_parsing", "_from_float")) and kind in WORDS:
        return WORDS[kind]
    return problem["msg"].replace("Input should be", "wanted", 1)


def _suggest_word(value: Any, expected: str) -> str:
    """Name the nearest of some words, else all. expected: as pydantic lists them, "'a', 'b' or 'c'"."""
    known = [word.strip(" '") for word in expected.replace(" or ", ", ").split(",")]
    near = difflib.get_close_matches(str(value), known, n=1, cutoff=0.6)
    choices = f"choose from {', '.join(known)}"
    return f"did you mean {near[0]}? Else {choices}" if near else choices


@cache
def _build_adapters(kind: Any) -> dict[str, tuple[TypeAdapter, str]]:
    """Return the validator and the `Expected` words of each field."""
    hints = get_type_hints(kind, include_extras=True)
    adapters = {}
    for field in dataclasses.fields(kind):
        notes = getattr(hints[field.name], "__metadata__", ())
        expected = next((note for note in notes if isinstance(note, Expected)), "")
        adapters[field.name] = TypeAdapter(hints[field.name]), expected
    return adapters
