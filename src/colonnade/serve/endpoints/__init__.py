"""Endpoints of a worker process: HTTP, and gRPC if it has a port."""

from __future__ import annotations

import gc
import socket
from collections.abc import Callable
from typing import Any

from colonnade.serve.endpoints.grpc import GrpcServer
from colonnade.serve.endpoints.http import HttpServer
from colonnade.serve.service import Service


def serve_requests(
    service: Service,
    listener: socket.socket,
    should_stop: Callable[[], bool],
    on_ready: Callable[[dict[str, Any]], None],
) -> None:
    """Open the model and answer requests until `should_stop`; then answer those in progress, and close the service.

    on_ready: gets the step, and the port of gRPC, when requests are accepted."""
    options = service.options
    rpc = None

    def announce() -> None:
        on_ready({"step": service.model.step, "grpc_port": rpc.port if rpc else None})

    try:
        service.start()
        if options.grpc_port is not None:
            rpc = GrpcServer(
                service, options.host, options.grpc_port, is_shared=options.is_grpc_shared
            )
            rpc.start()
        gc.collect()
        gc.freeze()  # later collections then look at requests only
        HttpServer(service, should_stop, announce).run(sockets=[listener])
    finally:
        if rpc is not None:
            rpc.close(options.drain_seconds)
        service.close()
