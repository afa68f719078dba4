"""Fixtures for the tests of this folder."""

from command_tree import build_commands_once

__all__ = ["build_commands_once"]
