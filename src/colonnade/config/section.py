"""Base class of all configuration sections."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

from pydantic import BaseModel, ConfigDict, ValidationError

from colonnade.config.problems import explain_errors
from colonnade.errors import ConfigError

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)


class _SectionType(ModelMetaclass):
    """Metaclass that reports bad settings as ConfigError.

    Pydantic builds nested sections without this call, so their problems keep the full dotted name of the setting.
    """

    def __call__(cls, *args: Any, **settings: Any) -> Any:
        try:
            return super().__call__(*args, **settings)
        except ValidationError as error:
            raise ConfigError(explain_errors(error, cast(type[BaseModel], cls))) from None


class Section(BaseModel, metaclass=_SectionType):
    """Frozen group of settings. Unknown names and bad values raise ConfigError."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


FIXED = "fixed on resume"
CHANGEABLE = "changeable on resume"
"""Marks of a setting, or of a section's settings without marks of their own: whether a run may resume with another
value. Settings without any mark may change. Those that decide scores or the form of saved state are fixed."""


def iterate_fixed_settings(
    config_value: Any, setting_path: str = "", inherited_mark: str = CHANGEABLE
) -> Iterator[tuple[str, Any]]:
    """Yield dotted name and value of each fixed setting in `config_value`. inherited_mark: of the setting at
    `setting_path`."""
    if isinstance(config_value, Section):
        for name, field in type(config_value).model_fields.items():
            own_mark = next(
                (part for part in field.metadata if part in (FIXED, CHANGEABLE)), inherited_mark
            )
            yield from iterate_fixed_settings(
                getattr(config_value, name), f"{setting_path}.{name}", own_mark
            )
    elif isinstance(config_value, Mapping):
        for key, part in config_value.items():
            yield from iterate_fixed_settings(part, f"{setting_path}.{key}", inherited_mark)
    elif inherited_mark == FIXED:
        yield setting_path.removeprefix("."), config_value
