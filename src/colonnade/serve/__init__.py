"""Online server of a trained model: Open Inference Protocol v2 over HTTP and gRPC, raw records, and live updates.

Needs the optional packages of `pip install 'colonnade[serve]'`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from colonnade.serve.options import ServeOptions


def run_server(
    options: ServeOptions,
    port: int,
    num_workers: int,
    on_ready: Callable[[str, dict[str, Any]], None],
) -> int:
    """Bind the address and serve until stopped. Return the exit status: not 0 if the workers could not start.

    on_ready: gets the URL, and what `run_worker` reports, when all workers accept requests. Raises ConfigError."""
    from colonnade.serve.control import ControlFolder
    from colonnade.serve.security import build_policy
    from colonnade.serve.workers import Supervisor, bind_socket, run_worker

    build_policy(options.host, options.token, options.allowed_hosts, options.allowed_origins)
    listener = bind_socket(options.host, port)
    if options.grpc_port is not None and (options.grpc_port or num_workers > 1):
        # Raises if another server has it: gRPC writes a line of its own.
        with bind_socket(options.host, options.grpc_port, "--host, --grpc-port") as free:
            options = replace(options, grpc_port=free.getsockname()[1])
    scheme = "http" if options.tls_certificate is None else "https"
    address = f"[{options.host}]" if ":" in options.host else options.host
    url = f"{scheme}://{address}:{listener.getsockname()[1]}"

    def announce(fields: dict[str, Any]) -> None:
        on_ready(url, fields)

    ControlFolder(Path(options.state_folder)).reset_stop()
    with listener:
        if num_workers > 1:
            return Supervisor(options, listener, num_workers, announce).run()
        run_worker(options, listener, announce)
    return 0
