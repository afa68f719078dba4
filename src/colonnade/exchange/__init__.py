"""Exchanges: what is sent between the ranks that own rows and those that look them up.

`open_exchange` opens the one of a plan; `hops.kinds.EXCHANGES` lists what tables can choose.
"""

from colonnade.exchange.opening import check_sharding_fits_exchange, open_exchange
from colonnade.hops.kinds import EXCHANGES

__all__ = ["EXCHANGES", "check_sharding_fits_exchange", "open_exchange"]
