"""Fixtures for the tests of this folder, and how many examples Hypothesis tries in `make test-all`."""

from command_tree import build_commands_once
from hypothesis import settings

__all__ = ["build_commands_once"]

settings.register_profile("thorough", settings.get_profile("colonnade"))
