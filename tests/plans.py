"""Settings of plans, for tests that have them by setting or as the values of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from colonnade.staleness import TableCache


def by_table(**settings: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    """Join settings by table: `by_table(exchange={"a": "rows"})` is `{"a": {"exchange": "rows"}}`.

    A replicated table has no exchange to name, so what `exchange` says of it is left out.
    """
    tables: dict[str, dict[str, Any]] = {}
    for setting, values in settings.items():
        for name, value in (values or {}).items():
            tables.setdefault(name, {})[setting] = value
    for own in tables.values():
        if own.get("sharding") is not None and own["sharding"].is_replicated:
            own.pop("exchange", None)
    return tables


def cache_settings(
    caches: Mapping[str, TableCache] | None, tier: str = "dram"
) -> dict[str, Any] | None:
    """Return the settings (`plan.cache`) of these copies, by table, and of no others."""
    if not caches:
        return None
    windows = {cache.window for cache in caches.values() if cache.window}
    tables = {
        name: {
            "size": cache.rows, "policy": cache.policy,
            "read_bound": cache.clock.read_bound, "write_bound": cache.clock.write_bound,
            "write_share": cache.clock.write_share, "step_bound": cache.clock.step_bound,
        }
        for name, cache in caches.items()
    }  # fmt: skip
    window = max(windows, default=None)
    return {"size": None, "tier": tier, "window": window, "step_bound": None, "tables": tables}
