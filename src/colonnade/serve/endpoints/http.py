"""HTTP: routes, limits of bodies and time, and the checks around each request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from colonnade import __version__
from colonnade.serve.metrics import CONTENT_TYPE
from colonnade.serve.options import ServeOptions
from colonnade.serve.protocol import (
    HEADER_LENGTH,
    RequestError,
    parse_request_json,
    quote_value,
)
from colonnade.serve.scheduler import Job, ScoreJob
from colonnade.serve.service import RequestRecord, Service, describe_error

Handler = Callable[[Service, Request], Awaitable[Response]]
EXTENSIONS = ["binary_tensor_data", "model_configuration"]
PAGE = Path(__file__).with_name("page.html")
PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
}
KEEP_ALIVE_SECONDS = 30
LINGER_SECONDS = 2.0
"""Wait for the rest of a body that was refused, so that its sender can read the answer first."""
MAX_HEADER_BYTES = 65536
"""Limit on a request's header, and on bytes of a body that carry none of it: chunk extensions and trailers."""
HEADER_TOO_LARGE = f"got a header or trailers of more than {MAX_HEADER_BYTES:,} bytes; send less"
SHORT_BODY_BYTES = 65536
"""Limit on the body of a request that is scored in the event loop."""
READ = ("GET", "HEAD")
WRITE = ("POST",)


def build_app(service: Service) -> Gate:
    """Build the ASGI application of a service."""

    def route(path: str, name: str, handler: Handler, methods: Sequence[str] = READ) -> Route:
        return Route(path, Endpoint(service, name, handler, methods))

    model = "/v2/models/{name:path}"
    version = "/versions/{version}"
    routes = [
        route(f"{model}{version}/infer", "infer", infer, WRITE),
        route(f"{model}/infer", "infer", infer, WRITE),
        route("/score", "score", score, WRITE),
        route("/recommend", "recommend", recommend, WRITE),
        route("/feedback", "feedback", add_feedback, WRITE),
        route("/v2/health/live", "live", live),
        route("/v2/health/ready", "ready", ready),
        route("/v2", "server", server_metadata),
        route(f"{model}{version}/config", "config", model_config),
        route(f"{model}/config", "config", model_config),
        route(f"{model}{version}/ready", "ready", model_ready),
        route(f"{model}/ready", "ready", model_ready),
        route(f"{model}{version}", "model", model_metadata),
        route(model, "model", model_metadata),
        route("/metrics", "metrics", metrics),
        route("/status", "status", status),
        route("/admin/{action}", "admin", administrate, WRITE),
        route("/", "page", page),
    ]
    return Gate(
        service,
        Router(routes, redirect_slashes=False, default=Endpoint(service, "none", refuse_path)),
    )


class Gate:
    """Outermost ASGI application: checks who calls, limits requests in progress, counts and logs each answer."""

    def __init__(self, service: Service, app: Any) -> None:
        self.service = service
        self.app = app
        self.num_in_progress = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1003})
            return
        started = time.perf_counter()
        record = scope["record"] = RequestRecord()
        answered = 0

        async def send_and_note(message: Any) -> None:
            nonlocal answered
            if message["type"] == "http.response.start":
                answered = message["status"]
            await send(message)

        self.num_in_progress += 1
        self.service.metrics.in_progress.inc()
        try:
            try:
                self._check(scope)
            except RequestError as error:
                await build_error_response(error)(scope, receive, send_and_note)
            else:
                await self.app(scope, receive, send_and_note)
        finally:
            self.num_in_progress -= 1
            self.service.metrics.in_progress.dec()
            self._log_request(scope, record, answered, time.perf_counter() - started)

    def _check(self, scope: Any) -> None:
        headers = scope["headers_by_name"] = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        if sum(name == b"host" for name, _ in scope["headers"]) > 1:
            raise RequestError(400, "Host: got it twice, wanted it once")
        num_bytes = sum(len(name) + len(value) for name, value in scope["headers"])
        if num_bytes + len(scope["raw_path"]) + len(scope["query_string"]) > MAX_HEADER_BYTES:
            raise RequestError(431, HEADER_TOO_LARGE)
        self.service.policy.check(scope["method"], scope["path"], headers)
        limit = self.service.options.max_requests
        if self.num_in_progress > limit and not scope["path"].startswith("/v2/health"):
            raise RequestError(
                503,
                f"got {self.num_in_progress} requests in progress, wanted at most {limit}; send this one again "
                "later, fewer at a time",
                retry_seconds=1,
            )

    def _log_request(
        self, asgi_scope: Any, request_record: RequestRecord, answer_status: int, seconds: float
    ) -> None:
        service = self.service
        service.metrics.observe_request(request_record.route, answer_status, seconds)
        client = asgi_scope.get("client")
        service.log.write(
            "request",
            {
                "method": asgi_scope["method"],
                "path": asgi_scope["path"],
                "status": answer_status,
                "route": request_record.route,
                "ms": round(1000 * seconds, 3),
                "samples": request_record.samples,
                "step": request_record.step,
                "client": client[0] if client else None,
            },
        )


class Endpoint:
    """ASGI application of one route: a handler, whose errors become answers in the form of the protocol."""

    def __init__(
        self, service: Service, name: str, handler: Handler, methods: Sequence[str] | None = None
    ) -> None:
        self.service = service
        self.name = name
        self.handler = handler
        self.methods = methods

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        scope["record"].route = self.name
        try:
            if self.methods is not None and scope["method"] not in self.methods:
                raise RequestError(
                    405,
                    f"got {quote_value(scope['method'])}, wanted {self.methods[0]} for {self.name}",
                )
            response = await self.handler(self.service, Request(scope, receive))
        except ClientGone:
            return
        except Exception as error:
            response = build_error_response(error)
        await response(scope, receive, send)


class ClientGone(Exception):
    """Client that closed its connection before its request was complete."""


async def read_body(service: Service, request: Request) -> bytearray:
    """Read a body within the limits of size and time. Raises RequestError (408, 413, 415), ClientGone."""
    options = service.options
    headers = request.scope["headers_by_name"]
    encoding = headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise RequestError(
            415,
            f"Content-Encoding: got {quote_value(encoding)}, wanted a body that is not compressed",
        )
    length = headers.get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > options.max_body_bytes:
        raise refuse_large_body(options.max_body_bytes)
    body = bytearray()
    with TimeLimit(
        options.body_seconds,
        f"got {{}} bytes of the body in {options.body_seconds:g} s, wanted all of it; send it faster",
        lambda: len(body),
    ):
        while True:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            body += message.get("body", b"")
            if len(body) > options.max_body_bytes:
                raise refuse_large_body(options.max_body_bytes)
            if not message.get("more_body"):
                return body


def refuse_large_body(limit: int) -> RequestError:
    """Return the error of a body that is too large."""
    return RequestError(
        413,
        f"body: got more than {limit:,} bytes; send fewer candidates a request, or raise --max-body",
    )


class TimeLimit:
    """Context that cancels the current task's wait after `seconds`, and raises RequestError (408) instead."""

    def __init__(self, seconds: float, text: str, count: Callable[[], int]) -> None:
        self.seconds = seconds
        self.text = text
        self.count = count
        self.has_passed = False

    def __enter__(self) -> None:
        self.task = asyncio.current_task()
        self.timer = asyncio.get_running_loop().call_later(self.seconds, self._cancel)

    def _cancel(self) -> None:
        self.has_passed = True
        assert self.task is not None
        self.task.cancel()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.timer.cancel()
        if self.has_passed and isinstance(error, asyncio.CancelledError):
            if hasattr(self.task, "uncancel"):  # Python 3.11
                self.task.uncancel()  # type: ignore[union-attr]
            raise RequestError(408, self.text.format(self.count())) from None


async def run_job(service: Service, build_job: Callable[..., Job], *, is_short_job: bool) -> Any:
    """Submit a job and wait for its result, at most the time-out. Raises its error, RequestError (503, 504).

    is_short_job: it may run in the event loop.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    thread = threading.get_ident()
    seconds = service.options.timeout_seconds

    def settle(result: Any, error: BaseException | None) -> None:
        if not future.done():
            future.set_result(result) if error is None else future.set_exception(error)

    def resolve(result: Any, error: BaseException | None) -> None:
        if threading.get_ident() == thread:
            settle(result, error)
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, error)

    job = build_job(resolve=resolve, deadline=time.monotonic() + seconds)
    service.queue.submit(job, loop if is_short_job else None)
    late = RequestError(
        504,
        f"got no result in {seconds:g} s; send fewer candidates, or raise --timeout",
        retry_seconds=1,
    )
    timer = loop.call_later(seconds, settle, None, late)
    try:
        return await future
    finally:
        timer.cancel()


async def open_version(service: Service, step: int | None) -> None:
    """Open an older step in a thread of its own, so that other requests do not wait for it."""
    if not service.model.has_open(step):
        await asyncio.to_thread(service.model.open_version, step)


async def infer(service: Service, request: Request) -> Response:
    step = resolve_model(service, request)
    await open_version(service, step)
    body = await read_body(service, request)
    header_length = request.scope["headers_by_name"].get(HEADER_LENGTH.lower())
    prepare, finish = service.plan_infer(body, header_length, request.scope["record"])
    build_job = partial(ScoreJob, prepare=prepare, finish=finish, step=step)
    content, length = await run_job(service, build_job, is_short_job=len(body) <= SHORT_BODY_BYTES)
    if length is None:
        return build_response(content)
    return Response(
        content, headers={HEADER_LENGTH: str(length)}, media_type="application/octet-stream"
    )


async def score(service: Service, request: Request) -> Response:
    await open_version(service, None)
    body = await read_body(service, request)
    prepare, finish = service.plan_score(body, request.scope["record"])
    build_job = partial(ScoreJob, prepare=prepare, finish=finish)
    is_short = len(body) <= SHORT_BODY_BYTES
    return build_response(await run_job(service, build_job, is_short_job=is_short))


async def recommend(service: Service, request: Request) -> Response:
    body = await read_body(service, request)
    plan = partial(service.recommend, body, request.scope["record"])
    return build_response(await run_job(service, partial(Job, run=plan), is_short_job=False))


async def add_feedback(service: Service, request: Request) -> Response:
    body = await read_body(service, request)
    record = request.scope["record"]
    return build_json(await asyncio.to_thread(service.add_feedback, body, record))


async def live(service: Service, request: Request) -> Response:
    return build_json({"live": True})


async def ready(service: Service, request: Request) -> Response:
    return build_json(service.describe_readiness(), 200 if service.is_ready else 503)


async def model_ready(service: Service, request: Request) -> Response:
    step = resolve_model(service, request)
    if step is not None:
        await asyncio.to_thread(service.describe_model, step)  # raises if it is not available
    return await ready(service, request)


async def server_metadata(service: Service, request: Request) -> Response:
    return build_json({"name": "colonnade", "version": __version__, "extensions": EXTENSIONS})


async def model_metadata(service: Service, request: Request) -> Response:
    step = resolve_model(service, request)
    return build_json(await asyncio.to_thread(service.describe_model, step))


async def model_config(service: Service, request: Request) -> Response:
    resolve_model(service, request)
    return build_json(await asyncio.to_thread(service.describe_config))


async def metrics(service: Service, request: Request) -> Response:
    text = await asyncio.to_thread(service.metrics_text.get, time.monotonic())
    return Response(text, media_type=CONTENT_TYPE)


async def status(service: Service, request: Request) -> Response:
    return build_json(await asyncio.to_thread(service.status.get, time.monotonic()))


async def administrate(service: Service, request: Request) -> Response:
    action = request.path_params["action"]
    if action not in ADMIN_ACTIONS:
        raise RequestError(
            404,
            f"action: got {quote_value(action)}, wanted one of {', '.join(ADMIN_ACTIONS)}",
        )
    body = await read_body(service, request)
    fields = parse_request_json(body) if body else {}
    if not isinstance(fields, dict):
        raise RequestError(
            400,
            f'body: got {quote_value(fields)}, wanted an object such as {{"step": 1200}}',
        )
    return build_json(await asyncio.to_thread(service.administrate, action, fields))


async def page(service: Service, request: Request) -> Response:
    return Response(PAGE.read_bytes(), media_type="text/html; charset=utf-8", headers=PAGE_HEADERS)


async def refuse_path(service: Service, request: Request) -> Response:
    raise RequestError(
        404,
        f"path: got {quote_value(request.scope['path'])}, wanted /v2/..., /score, /recommend, /feedback, "
        "/metrics or /",
    )


ADMIN_ACTIONS = ("rollback", "follow", "pin", "unpin", "shutdown")


def resolve_model(service: Service, request: Request) -> int | None:
    """Return the step that a path asks for; None: the newest. Raises RequestError (404)."""
    service.check_name(request.path_params["name"])
    return service.parse_version(request.path_params.get("version"))


def build_response(content: bytes, status: int = 200) -> Response:
    return Response(content, status, media_type="application/json")


def build_json(fields: Any, status: int = 200) -> Response:
    return build_response(json.dumps(fields).encode(), status)


def build_error_response(error: BaseException) -> Response:
    """Return the answer to an error, in the protocol's form."""
    code, text, retry_seconds = describe_error(error)
    response = build_json({"error": text}, code)
    if retry_seconds is not None:
        response.headers["retry-after"] = str(retry_seconds)
    if code == 401:
        response.headers["www-authenticate"] = "Bearer"
    return response


class LimitedProtocol(HttpToolsProtocol):
    """Connection with limits on the number of connections, and on the time and size of a request's header."""

    def __init__(self, *arguments: Any, options: ServeOptions, **fields: Any) -> None:
        super().__init__(*arguments, **fields)
        self.options = options
        self.limit_timer: asyncio.TimerHandle | None = None
        self.read_timer: asyncio.TimerHandle | None = None
        self.is_in_header = self.is_in_body = self.has_progress = False
        self.header_bytes = self.num_unread = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        count = len(self.connections)
        limit = self.options.max_connections
        if count > limit:
            self.refuse(
                "503 Service Unavailable",
                f"got {count} connections, wanted at most {limit}; try again later",
            )
            return
        self.arm(self.options.body_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self.disarm()
        if self.read_timer is not None:
            self.read_timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        # Pieces of the limit's size: what belongs to the header that ends inside a piece is not known.
        for first in range(0, len(data), MAX_HEADER_BYTES):
            piece = data[first : first + MAX_HEADER_BYTES]
            self.has_progress = False
            super().data_received(piece)
            if self.transport.is_closing():
                return
            self.header_bytes = 0 if self.has_progress else self.header_bytes + len(piece)
            if self.header_bytes > MAX_HEADER_BYTES:
                self.refuse_header()
                return
        is_idle = self.cycle is None or self.cycle.response_complete
        if self.is_in_header or (is_idle and not self.is_in_body):
            self.arm(self.options.body_seconds)
        elif not is_idle:
            self.disarm()

    def refuse_header(self) -> None:
        """End a connection with a header, or trailers, beyond the limit; an answer that has begun is the last one."""
        if self.is_in_body and self.cycle.response_started:
            self.transport.close()
            return
        self.refuse("431 Request Header Fields Too Large", HEADER_TOO_LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.is_in_header = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.is_in_header:  # trailers are no headers of the request
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self.is_in_header = False
        self.is_in_body = True
        self.has_progress = True
        super().on_headers_complete()

    def on_chunk_header(self) -> None:
        self.has_progress = True

    def on_body(self, body: bytes) -> None:
        self.has_progress = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self.is_in_body = False
        self.has_progress = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.is_in_body and self.cycle.response_complete:
            self.arm(LINGER_SECONDS)
        if self.transport.get_write_buffer_size():
            self.limit_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.limit_reading()

    def limit_reading(self) -> None:
        """End the connection if its client does not read what was written to it: it would wait without a limit."""
        if self.read_timer is None:
            self.num_unread = self.transport.get_write_buffer_size()
            self.read_timer = self.loop.call_later(self.options.body_seconds, self.check_reading)

    def check_reading(self) -> None:
        """End a connection that has read nothing since the last check; check again if it has read a part."""
        self.read_timer = None
        num_unread = self.transport.get_write_buffer_size()
        if num_unread >= self.num_unread > 0:
            self.transport.abort()
        elif num_unread:
            self.limit_reading()

    def arm(self, seconds: float) -> None:
        """Let the connection end in `seconds`, unless it is limited already."""
        if self.limit_timer is None:
            self.limit_timer = self.loop.call_later(seconds, self.give_up)

    def disarm(self) -> None:
        if self.limit_timer is not None:
            self.limit_timer.cancel()
            self.limit_timer = None

    def give_up(self) -> None:
        """End a connection that was too slow."""
        if self.is_in_header:
            seconds = self.options.body_seconds
            self.refuse(
                "408 Request Timeout", f"got no complete header in {seconds:g} s; send it faster"
            )
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        self.refuse(
            "400 Bad Request",
            "got bytes that are not HTTP/1.1, wanted a request; use an HTTP client",
        )

    def refuse(self, status: str, text: str) -> None:
        """Answer without a request, and close the connection."""
        body = json.dumps({"error": text}).encode()
        head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        if status.startswith("503"):
            head += "retry-after: 1\r\n"
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()


class HttpServer(uvicorn.Server):
    """HTTP server of a service, until `should_stop`; it then answers what is in progress."""

    def __init__(
        self, service: Service, should_stop: Callable[[], bool], on_ready: Callable[[], None]
    ) -> None:
        options = service.options
        protocol: Any = partial(LimitedProtocol, options=options)
        super().__init__(
            uvicorn.Config(
                build_app(service),
                http=protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="critical",
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=max(1, round(options.drain_seconds)),
                ssl_certfile=options.tls_certificate,
                ssl_keyfile=options.tls_key,
            )
        )
        self.service = service
        self.should_stop = should_stop
        self.on_ready = on_ready

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `should_stop`."""
        yield

    async def on_tick(self, counter: int) -> bool:
        if self.should_stop():
            self.service.is_draining = self.should_exit = True
        return await super().on_tick(counter)

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self.on_ready()
