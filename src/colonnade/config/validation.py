"""Validation of frozen dataclasses by their field types. Pydantic checks them; the messages are Colonnade's."""

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
    """Text that describes valid values of a field: `lr: Annotated[float, Limits(gt=0), Expected("more than 0")]`."""


NonNegative = Annotated[
    float, AllowInfNan(False), Limits(ge=0), Expected("a finite number, 0 or more")
]
Fraction = Annotated[float, Limits(ge=0, lt=1), Expected("a number of 0 or more, below 1")]

WANTED_TYPES = {
    "int": "wanted a whole number",
    "float": "wanted a number",
    "bool": "wanted true or false",
    "string": "wanted text",
    "list": "wanted a list",
    "tuple": "wanted a list",
}
"""Message for a value of the wrong type, by prefix of pydantic's error type."""


def validate_dataclass_fields(
    instance: Any, message_subject: str | None = None, *, strict: bool | None = True
) -> None:
    """Check the fields of a frozen dataclass against their types, and store the converted values.

    message_subject: prefix of the message; default: the class name; "": no prefix. strict: whether to reject text as a
    number and a list as a tuple; None: as the types declare.
    Raises ConfigError with the field, its value and the wanted value (the type's `Expected`, else pydantic's text).
    """
    for name, (adapter, expected) in _build_field_validators(
        cast(Hashable, type(instance))
    ).items():
        current = getattr(instance, name)
        try:
            checked = adapter.validate_python(current, strict=strict)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            wanted = f"wanted {expected}" if expected else describe_wanted_value(problem)
            message_subject = (
                type(instance).__name__ if message_subject is None else message_subject
            )
            prefix = f"{message_subject}: " if message_subject else ""
            raise ConfigError(f"{prefix}got {name}={current!r}, {wanted}") from None
        object.__setattr__(instance, name, checked)


def describe_wanted_value(pydantic_error: Mapping[str, Any]) -> str:
    """Return the "wanted" part of a message for a pydantic error: a type, a limit or a list of words.

    Other errors keep pydantic's text.
    """
    if pydantic_error["type"] == "literal_error":
        return _suggest_word(pydantic_error["input"], pydantic_error["ctx"]["expected"])
    kind, _, _ = pydantic_error["type"].partition("_")
    if (
        pydantic_error["type"].endswith(("_type", "_parsing", "_from_float"))
        and kind in WANTED_TYPES
    ):
        return WANTED_TYPES[kind]
    return pydantic_error["msg"].replace("Input should be", "wanted", 1)


def _suggest_word(value: Any, expected: str) -> str:
    """Return a hint with the nearest word, or all words. expected: pydantic's list, "'a', 'b' or 'c'"."""
    words = [word.strip(" '") for word in expected.replace(" or ", ", ").split(",")]
    closest_choices = difflib.get_close_matches(str(value), words, n=1, cutoff=0.6)
    choices = f"choose from {', '.join(words)}"
    return f"did you mean {closest_choices[0]}? Else {choices}" if closest_choices else choices


@cache
def _build_field_validators(dataclass_type: Any) -> dict[str, tuple[TypeAdapter, str]]:
    """Return the validator and the `Expected` text of each field."""
    hints = get_type_hints(dataclass_type, include_extras=True)
    adapters = {}
    for field in dataclasses.fields(dataclass_type):
        notes = getattr(hints[field.name], "__metadata__", ())
        expected = next((note for note in notes if isinstance(note, Expected)), "")
        adapters[field.name] = TypeAdapter(hints[field.name]), expected
    return adapters
