"""Options of a server: addresses, limits and folders, as one value that worker processes receive as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options of `colonnade serve`; each worker process has the same."""

    path: str
    """Run folder, exported folder, or publication: a folder, or a URL with `copy`."""
    name: str = "model"
    copy: str | None = None
    at: str | None = None
    items_file: str | None = None
    """JSON array with the records of all items that a retrieval model may recommend; None: its data's catalogue."""
    network: str | None = None
    """FILE.py:FUNCTION that builds the network of a run of `colonnade.fit`; None: the configuration does."""
    poll_seconds: float = 0.5
    """Seconds between looks for a newer checkpoint."""

    host: str = "127.0.0.1"
    token: str | None = field(default=None, repr=False)
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    tls_certificate: str | None = None
    tls_key: str | None = None
    grpc_port: int | None = None
    """None: no gRPC."""
    is_grpc_shared: bool = False
    """True if several workers listen on the port."""

    max_body_bytes: int = 16 << 20
    max_candidates: int = 10_000
    max_queue: int = 64
    """Requests that wait to be scored; more are answered 503."""
    max_requests: int = 256
    """Requests in progress in a worker, their bodies included; more are answered 503."""
    max_connections: int = 1024
    timeout_seconds: float = 5.0
    """Limit from the end of a request's body to its answer; then 504."""
    body_seconds: float = 10.0
    """Limit for a request's header, and for its body; then 408."""
    drain_seconds: float = 30.0
    """Limit for requests in progress when the server is stopped."""
    micro_batch: int = 1
    """Limit of waiting requests that are scored as one batch; 1: each by itself."""

    max_versions: int = 2
    """Open older steps that are not pinned."""
    max_version_bytes: int = 1 << 30
    """Memory of the rows of all open older steps that are newer than their mapped files."""
    max_pins: int = 4

    row_memory_bytes: int | None = None
    """Memory of a worker for the rows of the newest step; None: rows are read from their mapped files."""
    threads: int = 1
    """Threads of torch in a worker."""
    access_log: str | None = None
    """File of one JSON object per request; "-": standard output."""
    state_folder: str = ""
    """Private folder with the control file and pinned steps."""

    def to_json(self) -> str:
        """Return the options as JSON, the token included."""
        return json.dumps(asdict(self))


def parse_options(text: str) -> ServeOptions:
    """Return the options that `to_json` wrote."""
    fields = json.loads(text)
    for name in ("allowed_hosts", "allowed_origins"):
        fields[name] = tuple(fields[name])
    return ServeOptions(**fields)
