"""Error messages for settings that pydantic rejects: got, wanted, and the nearest known name."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from colonnade.config.validation import describe_wanted_value


def explain_errors(error: ValidationError, section: type[BaseModel]) -> str:
    """Return one line for each problem. section: class that was validated."""
    return "\n".join(_explain_validation_error(problem, section) for problem in error.errors())


def _explain_validation_error(pydantic_error: Any, config_section: Any) -> str:
    path = [str(part) for part in pydantic_error["loc"]]
    name = ".".join(path)
    if pydantic_error["type"] == "extra_forbidden":
        for part in path[:-1]:
            is_by_name = get_origin(config_section) is dict
            config_section = _unwrap_optional(
                get_args(config_section)[1]
                if is_by_name
                else config_section.model_fields[part].annotation
            )
        return explain_unknown_setting(name, config_section.model_fields, name)
    if pydantic_error["type"] in ("model_type", "dict_type"):
        return (
            f"{name}: got {_short_repr(pydantic_error['input'])}, wanted settings of it by name, such as "
            f"{name}.NAME=VALUE"
        )
    if (wanted := describe_wanted_value(pydantic_error)) != pydantic_error["msg"]:
        return f"{name}: got {_short_repr(pydantic_error['input'])}, {wanted}"
    message = pydantic_error["msg"].removeprefix("Value error, ")
    if not name or message.startswith("unknown setting"):  # a check of several settings together
        return message
    return (
        f"{name}: {message}"
        if message.startswith("got ")
        else f"{name}: got {_short_repr(pydantic_error['input'])}: {message}"
    )


def explain_unknown_setting(name: str, known_settings: Mapping[str, Any], typed_name: str) -> str:
    """Return the message for an unknown setting, with the nearest known name of its section, or all names.

    known_settings: fields or values of the section, by name. typed_name: name as the user typed it.
    """
    key = name.split(".")[-1]
    prefix = name[: len(name) - len(key)]
    closest_names = difflib.get_close_matches(key, known_settings, n=1, cutoff=0.5)
    inner = {
        inside: f"{section}.{inside}"
        for section, value in known_settings.items()
        for inside in (value if isinstance(value, Mapping) else _section_fields(value))
    }
    if not closest_names and (inside := difflib.get_close_matches(key, inner, n=1, cutoff=0.7)):
        closest_names = [inner[inside[0]]]
    hint = (
        f"did you mean {prefix}{closest_names[0]}?"
        if closest_names
        else f"choose from {', '.join(known_settings)}"
    )
    return f"unknown setting {typed_name!r}; {hint}"


def _short_repr(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]} ... ({len(text):,} characters)"


def _section_fields(field: Any) -> Mapping[str, Any]:
    """Return the settings of a field that is a section; an empty mapping for other fields."""
    annotation = _unwrap_optional(getattr(field, "annotation", None))
    return getattr(annotation, "model_fields", {})


def _unwrap_optional(annotation: Any) -> Any:
    """Return X for an optional section `X | None`; any other annotation unchanged."""
    if get_origin(annotation) not in (Union, UnionType):
        return annotation
    kinds = [kind for kind in get_args(annotation) if kind is not NoneType]
    return kinds[0] if len(kinds) == 1 else annotation
