"""Numbers of examples that Hypothesis tries: few by default, many under `--hypothesis-profile thorough` (`make
test-all`)."""

from __future__ import annotations

from hypothesis import settings


def examples(few: int, many: int) -> int:
    """Return the number of examples of a test in this run."""
    return many if settings.get_current_profile_name() == "thorough" else few
