"""Colonnade trains recommendation models whose embedding tables outgrow memory."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module

from colonnade.processors import limit_openmp_spinning

limit_openmp_spinning()  # before torch is loaded: OpenMP reads the settings then

TYPE_CHECKING = False  # typing's own would be the slowest import here
if TYPE_CHECKING:
    from typing import Any


def _attach_stub(
    package: str, init_file: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package, from the stub beside its `__init__.py`.

    The stub, which type checkers read too, is the only list of the public names. Each is imported at its first use, so
    that `colonnade --help` does not load torch.
    """
    with open(f"{init_file}i", encoding="utf-8") as stub:
        nodes = ast.parse(stub.read()).body
    module_of_name = {
        alias.name: str(node.module)
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }
    namespace = vars(sys.modules[package])

    def get_attribute(name: str) -> Any:
        if name not in module_of_name:
            try:
                # A submodule, such as colonnade.errors, without `import colonnade.errors`.
                return import_module(f"{package}.{name}")
            except ModuleNotFoundError as error:
                if name.startswith("_") or error.name == f"{package}.{name}":
                    raise AttributeError(f"module {package!r} has no attribute {name!r}") from None
                raise
        namespace[name] = getattr(import_module(module_of_name[name]), name)
        return namespace[name]

    def list_names() -> list[str]:
        return sorted([*namespace, *module_of_name])

    return get_attribute, list_names, sorted(module_of_name)


_get_export, __dir__, __all__ = _attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("colonnade")
    return _get_export(name)
