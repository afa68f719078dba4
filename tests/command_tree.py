"""Build the command line's tree of verbs and options once a process: typer builds it for every command."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import typer.main


@pytest.fixture(scope="session", autouse=True)
def build_commands_once() -> Iterator[None]:
    """Cache the tree, which commands read and do not change.

    Building it takes longer than most commands that tests run: more than half of the hostile tests' time.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", functools.cache(typer.main.get_command))
        yield
