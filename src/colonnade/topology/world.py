"""The world as a plain value: how many hosts, how many ranks on each, how fast the links between them."""

from __future__ import annotations

from dataclasses import dataclass

from colonnade.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """Ranks are numbered host by host: rank r lives on host r // ranks_per_host."""

    num_hosts: int = 1
    ranks_per_host: int = 1
    local_bytes_per_second: float = 5e9
    """Payload a rank moves to another rank of its host."""
    remote_bytes_per_second: float = 125e6
    """Payload a host moves over its uplink (1 Gbit/s)."""
    message_seconds: float = 1e-4
    """Fixed cost of one message."""

    def __post_init__(self) -> None:
        if self.num_hosts < 1 or self.ranks_per_host < 1:
            raise ConfigError(
                f"got num_hosts={self.num_hosts}, ranks_per_host={self.ranks_per_host}; "
                "wanted at least 1 of each"
            )

    @property
    def num_ranks(self) -> int:
        return self.num_hosts * self.ranks_per_host

    def host(self, rank: int) -> int:
        return rank // self.ranks_per_host
