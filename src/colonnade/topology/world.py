"""World of a run as a plain value: hosts, ranks per host, roles of ranks, speed of links."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from colonnade.errors import ConfigError

Origin = Literal["assumed", "planned", "measured"]
ShardingKind = Literal["row_wise", "host_wise", "table_wise", "column_wise", "grid", "replicated"]


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """Ranks of a run, numbered host by host: rank r is on host r // ranks_per_host. Links are full duplex.

    A rank is a trainer, which has samples and the dense network, or a server, which stores rows and nothing else.
    Without servers the trainers store the rows."""

    num_hosts: int = 1
    ranks_per_host: int = 1
    servers_per_host: int = 0
    """Number of servers on each host: its last ranks."""
    local_bytes_per_second: float = 5e9
    """Payload that a rank receives from ranks of its host per second while all of them receive."""
    remote_bytes_per_second: float = 125e6
    """Payload that a host receives per second over its uplink, which its ranks share (1 Gbit/s)."""
    message_seconds: float = 1e-4
    """Fixed cost of one message of an all-to-all to a rank of the same host."""
    remote_message_seconds: float = 1e-4
    """Fixed cost of one message of an all-to-all to a rank of another host."""
    byte_processor_seconds: float = 0.0
    """Processor time of a rank for each byte that it sends and each that it receives; 0: not measured."""
    message_processor_seconds: float = 0.0
    """Processor time of a rank for sending one message and receiving one."""
    crowding: float = 1.0
    """Compute threads on a host per processor, at least 1: above 1, each thread is slowed down by this factor."""
    origin: Origin = "assumed"
    """Source of the link speeds: defaults, numbers set by the user, or measured by `planning.measure`."""

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
        """Number of ranks on all hosts."""
        return self.num_hosts * self.ranks_per_host

    def host(self, rank: int) -> int:
        """Return the host of a rank."""
        return rank // self.ranks_per_host

    @property
    def has_servers(self) -> bool:
        """True if some ranks are servers."""
        return self.servers_per_host > 0

    def is_server(self, rank: int) -> bool:
        """Return whether a rank is a server."""
        return rank % self.ranks_per_host >= self.trainers_per_host

    @property
    def trainers_per_host(self) -> int:
        """Number of trainers on each host."""
        return self.ranks_per_host - self.servers_per_host

    @property
    def num_trainers(self) -> int:
        """Number of ranks that share each step's samples."""
        return self.num_hosts * self.trainers_per_host

    @property
    def trainers(self) -> tuple[int, ...]:
        """Ranks that train, ascending."""
        return tuple(rank for rank in range(self.num_ranks) if not self.is_server(rank))

    @property
    def servers(self) -> tuple[int, ...]:
        """Ranks that are servers, ascending."""
        return tuple(rank for rank in range(self.num_ranks) if self.is_server(rank))

    @property
    def owners(self) -> tuple[int, ...]:
        """Ranks that can own rows: the servers if there are any, else all ranks."""
        return self.servers or self.trainers

    def with_servers(self, per_host: int) -> World:
        """Return the same ranks and links with the last `per_host` ranks of each host as servers.

        Raises ConfigError if no trainer remains."""
        return replace(self, servers_per_host=per_host)

    def trainer_world(self) -> World:
        """Return the world of the trainers alone."""
        return replace(self, ranks_per_host=self.trainers_per_host, servers_per_host=0)

    @property
    def call_seconds(self) -> float:
        """Seconds of an all-to-all of all ranks with empty messages."""
        local = self.ranks_per_host - 1
        remote = self.num_ranks - self.ranks_per_host
        return local * self.message_seconds + remote * self.remote_message_seconds

    @property
    def call_processor_seconds(self) -> float:
        """Processor time of each rank for an all-to-all of all ranks with empty messages."""
        return (self.num_ranks - 1) * self.message_processor_seconds

    def __str__(self) -> str:
        if self.num_ranks == 1:
            return "1 rank: nothing is sent"
        parts = [f"{self.num_hosts} x {self.ranks_per_host} ranks, links {self.origin}"]
        if self.has_servers:
            last = f"last {self.servers_per_host}" if self.servers_per_host > 1 else "last"
            parts.append(f"the {last} of each host for rows only")
        if self.ranks_per_host > 1:
            parts.append(
                f"in a host {self.local_bytes_per_second / 1e6:,.0f} MB/s a rank, "
                f"{self.message_seconds * 1e6:,.0f} us a message"
            )
        if self.num_hosts > 1:
            parts.append(
                f"between hosts {self.remote_bytes_per_second / 1e6:,.0f} MB/s a host, "
                f"{self.remote_message_seconds * 1e6:,.0f} us a message"
            )
        return "; ".join(parts)
