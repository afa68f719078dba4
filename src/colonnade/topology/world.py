"""The world as a plain value: how many hosts, how many ranks on each, what they do, how fast the links between them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from colonnade.errors import ConfigError

Origin = Literal["assumed", "planned", "measured"]


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """Ranks are numbered host by host: rank r lives on host r // ranks_per_host. Links carry both ways at once.

    A rank is a trainer, which has samples and the dense network, or a server, which has rows and nothing else. Without
    servers the trainers have the rows."""

    num_hosts: int = 1
    ranks_per_host: int = 1
    servers_per_host: int = 0
    """The last ranks of each host."""
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
        if not 0 <= self.servers_per_host < self.ranks_per_host:
            raise ConfigError(
                f"plan.servers: got {self.servers_per_host} of the {self.ranks_per_host} ranks of each host, wanted "
                f"0 .. {self.ranks_per_host - 1}: at least one rank of a host must train. Start more processes on each "
                "host, or name fewer servers"
            )
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
    def has_servers(self) -> bool:
        return self.servers_per_host > 0

    def is_server(self, rank: int) -> bool:
        return rank % self.ranks_per_host >= self.trainers_per_host

    @property
    def trainers_per_host(self) -> int:
        return self.ranks_per_host - self.servers_per_host

    @property
    def num_trainers(self) -> int:
        """Ranks that share each step's samples."""
        return self.num_hosts * self.trainers_per_host

    @property
    def trainers(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.num_ranks) if not self.is_server(rank))

    @property
    def servers(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.num_ranks) if self.is_server(rank))

    @property
    def owners(self) -> tuple[int, ...]:
        """Ranks that rows may lie on: the servers, where there are any, else all."""
        return self.servers or self.trainers

    def with_servers(self, per_host: int) -> World:
        """The same ranks and links. Raises ConfigError where none would be left to train."""
        return replace(self, servers_per_host=per_host)

    def of_trainers(self) -> World:
        """The trainers as a world of their own."""
        return replace(self, ranks_per_host=self.trainers_per_host, servers_per_host=0)

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
        if self.has_servers:
            last = f"last {self.servers_per_host}" if self.servers_per_host > 1 else "last"
            said.append(f"the {last} of each host for rows only")
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
