"""Error messages for settings that pydantic rejects: got, wanted, and the nearest known name."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from colonnade.config.validation import describe_validation_error


def explain_errors(error: ValidationError, section: type[BaseModel]) -> str:
    """Return one line for each problem. section: class that was validated."""
    return "\n".join(_explain_validation_error(problem, section) for problem in error.errors())


def _explain_validation_error(problem: Any, section: Any) -> str:
    path = [str(part) for part in problem["loc"]]
    name = ".".join(path)
    if problem["type"] == "extra_forbidden":
        for part in path[:-1]:
            is_by_name = get_origin(section) is dict
            section = _unwrap_optional(
                get_args(section)[1] if is_by_name else section.model_fields[part].annotation
            )
        return explain_unknown_setting(name, section.model_fields, name)
    if problem["type"] in ("model_type", "dict_type"):
        return f"{name}: got {_short_repr(problem['input'])}, wanted settings of it by name, such as {name}.NAME=VALUE"
    if (wanted := describe_validation_error(problem)) != problem["msg"]:
        return f"{name}: got {_short_repr(problem['input'])}, {wanted}"
    message = problem["msg"].removeprefix("Value error, ")
    if not name or message.startswith("unknown setting"):  # a check of several settings together
        return message
    return (
        f"{name}: {message}"
        if message.startswith("got ")
        else f"{name}: got {_short_repr(problem['input'])}: {message}"
    )


def explain_unknown_setting(name: str, known: Mapping[str, Any], path: str) -> str:
    """Return the message for an unknown setting, with the nearest known name of its section, or all names.

    known: fields or values of the section, by name. path: name as the user typed it.
    """
    key = name.split(".")[-1]
    prefix = name[: len(name) - len(key)]
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    inner = {
        inside: f"{section}.{inside}"
        for section, value in known.items()
        for inside in (value if isinstance(value, Mapping) else _section_fields(value))
    }
    if not near and (inside := difflib.get_close_matches(key, inner, n=1, cutoff=0.7)):
        near = [inner[inside[0]]]
    hint = f"did you mean {prefix}{near[0]}?" if near else f"known here: {', '.join(known)}"
    return f"unknown setting {path!r}; {hint}"


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
