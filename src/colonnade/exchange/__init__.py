"""Exchanges: what is sent between the ranks that own rows and those that look them up.

`open_exchange` opens the one of a plan; `lookup.hops.EXCHANGES` lists what tables can choose.
"""

from colonnade.exchange.opening import check_sharding_fits_exchange, implied_exchange, open_exchange
from colonnade.lookup.hops import EXCHANGES

__all__ = ["EXCHANGES", "check_sharding_fits_exchange", "implied_exchange", "open_exchange"]
