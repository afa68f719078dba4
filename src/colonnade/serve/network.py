"""Networks of runs of `colonnade.fit`, which no configuration describes: a function in a Python file builds them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

from torch import nn

from colonnade.errors import ConfigError

MODULE = "colonnade_network"
"""Name of the file's module, so that its `if __name__ == "__main__"` does not run."""


def load_network_builder(text: str) -> Callable[[], nn.Module]:
    """Load the function that FILE.py:FUNCTION names. Runs the file. Raises ConfigError.

    The function takes no arguments and returns a new network at each call.
    """
    file, colon, name = text.rpartition(":")
    path = Path(file)
    if not colon or not name.isidentifier() or not path.is_file():
        raise ConfigError(
            f"--network: got {text!r}, wanted FILE.py:FUNCTION, a file and the function in it that builds the network"
        )
    spec = importlib.util.spec_from_file_location(MODULE, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"--network: got {file!r}, wanted a file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module
    sys.path.insert(0, str(path.resolve().parent))  # as for a script, which imports files beside it
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"--network: {file} ended with {type(error).__name__}: {error}; give a file that can be imported"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(
            f"--network: {file} has no function {name!r}; give the one that builds the network"
        )

    def build_network() -> nn.Module:
        try:
            network = function()
        except Exception as error:
            raise ConfigError(
                f"--network: {name}() of {file} ended with {type(error).__name__}: {error}; give a function without "
                "arguments that builds the network"
            ) from error
        if not isinstance(network, nn.Module):
            raise ConfigError(
                f"--network: {name} returned a {type(network).__name__}, wanted the nn.Module that was trained"
            )
        return network

    return build_network
