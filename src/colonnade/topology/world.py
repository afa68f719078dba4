"""The world as a plain value: how many hosts, how many ranks on each, how fast the links between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from colonnade.errors import ConfigError

Origin = Literal["assumed", "planned", "measured"]


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """Ranks are numbered host by host: rank r lives on host r // ranks_per_host. Links carry both ways at once."""

    num_hosts: int = 1
    ranks_per_host: int = 1
    local_bytes_per_second: float = 5e9
    """Payload a rank gets from ranks of its host while all of them do."""
    remote_bytes_per_second: float = 125e6
    """Payload a host gets over its uplink, which its ranks share (1 Gbit/s)."""
    message_seconds: float = 1e-4
    """Fixed cost of one message of an all-to-all to a rank of the same host."""
    remote_message_seconds: float = 1e-4
    """The same to a rank of another host."""
    byte_processor_seconds: float = 0.0
    """Of a rank's processor, for each byte that it sends and each that it gets; 0: nobody looked."""
    message_processor_seconds: float = 0.0
    """Of a rank's processor, for each message that it sends, and gets one for."""
    crowding: float = 1.0
    """Threads that compute on a host, by its processors: where they are more, each has so much less of one."""
    origin: Origin = "assumed"
    """Where the numbers of the links come from: nobody looked, a person said them, `topology.links` measured them."""

    def __post_init__(self) -> None:
        if self.num_hosts < 1 or self.ranks_per_host < 1:
            raise ConfigError(
                f"got num_hosts={self.num_hosts}, ranks_per_host={self.ranks_per_host}; "
                "wanted at least 1 of each"
            )
        if self.crowding < 1:
            raise ConfigError(f"got crowding={self.crowding:g}, wanted 1 or more")
        if min(self.local_bytes_per_second, self.remote_bytes_per_second) <= 0:
            raise ConfigError(
                f"got {self.local_bytes_per_second:g} bytes/s inside a host, {self.remote_bytes_per_second:g} between "
                "hosts; wanted more than 0"
            )

    @property
    def num_ranks(self) -> int:
        return self.num_hosts * self.ranks_per_host

    def host(self, rank: int) -> int:
        return rank // self.ranks_per_host

    @property
    def call_seconds(self) -> float:
        """Of an all-to-all of all ranks that carries next to nothing."""
        local = self.ranks_per_host - 1
        remote = self.num_ranks - self.ranks_per_host
        return local * self.message_seconds + remote * self.remote_message_seconds

    @property
    def call_processor_seconds(self) -> float:
        """Of each rank's processor, for an all-to-all of all ranks that carries next to nothing."""
        return (self.num_ranks - 1) * self.message_processor_seconds

    def __str__(self) -> str:
        if self.num_ranks == 1:
            return "1 rank: nothing travels"
        said = [f"{self.num_hosts} x {self.ranks_per_host} ranks, links {self.origin}"]
        if self.ranks_per_host > 1:
            said.append(
                f"in a host {self.local_bytes_per_second / 1e6:,.0f} MB/s a rank, "
                f"{self.message_seconds * 1e6:,.0f} us a message"
            )
        if self.num_hosts > 1:
            said.append(
                f"between hosts {self.remote_bytes_per_second / 1e6:,.0f} MB/s a host, "
                f"{self.remote_message_seconds * 1e6:,.0f} us a message"
            )
        return "; ".join(said)
