"""The table of exchanges: what travels between the ranks."""

from __future__ import annotations

from colonnade.exchange.rows import RowsExchange

EXCHANGES = {"rows": RowsExchange}
