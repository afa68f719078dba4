"""Base class of all configuration sections."""

from __future__ import annotations

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
