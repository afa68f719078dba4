"""Open-loop HTTP client of `bench serve`, on raw sockets: one process, one thread, prebuilt requests.

A request is sent when it is due, whether or not earlier ones were answered, and its latency is counted from then: a
server that stalls is charged for each request that came meanwhile (coordinated omission). Requests are due at random
moments of a constant rate, as those of many independent users are. If all connections are in use, a request waits
here, and its latency goes on.

    parent                                              worker
    {"port", "requests": FILE, "rate", "seconds"}       a `Window`, as a dict
    {"port", "requests": FILE, "clients", "seconds"}    {"rate": answers per second of a closed loop}
    {"port", "requests": FILE, "index"}                 {"scores": of that request}
"""

from __future__ import annotations

import gc
import json
import math
import re
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from workers.loop import open_channel
from workers.serve_requests import HEADER_LENGTH, RequestPool, load_requests, parse_scores

PATH = "/v2/models/model/infer"
NUM_CONNECTIONS = 60
"""Fewer than a server's queue holds (64): a client that waits measures more than one that is refused."""
GIVE_UP_SECONDS = 1.0
"""Wait of the oldest request that ends a window early: the server does not keep up."""
DRAIN_SECONDS = 3.0
SPIN_SECONDS = 100e-6
"""Wait that is not slept: a sleeping process is late by about this much."""
END = b"\r\n\r\n"
CONTENT_LENGTH = re.compile(rb"\ncontent-length: *(\d+)", re.IGNORECASE)
JSON_LENGTH = re.compile(b"\n" + HEADER_LENGTH.encode() + rb": *(\d+)", re.IGNORECASE)
STEP = re.compile(rb'"model_version": ?"(\d+)"')


@dataclass
class Window:
    """Measurements of one window of requests, times in milliseconds."""

    rate: float
    """Answers per second."""
    sent: int
    failed: int
    """Answers other than 200, lost connections, and requests that were given up."""
    is_overloaded: bool
    """True if the window ended early, because requests waited too long."""
    p50: float
    p90: float
    p99: float
    p999: float
    max: float
    late_p99: float
    """Delay of the client itself: from when a request was due, and a connection free, to its being sent."""
    steps: dict[str, float] = field(default_factory=dict)
    """Time (Unix) of the first answer of each step of the model."""


def draw_arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """Return when requests are due: a Poisson process of this rate, with at least one request."""
    generator = np.random.default_rng(seed)
    count = int(rate * seconds + 6 * math.sqrt(rate * seconds) + 10)
    times = np.cumsum(generator.exponential(1 / rate, count))
    return times[times < seconds].tolist() or [0.0]


def quantile(ordered: Sequence[float], q: float) -> float:
    """Return the least value of an ascending sequence that at least a share q of its values does not exceed."""
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]


class Connection:
    """Keep-alive connection with at most one request in progress."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self.socket.setblocking(False)
        self.unsent = memoryview(b"")
        self.content = bytearray()
        self.request = -1
        """Number of the request in progress."""

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, request: int, content: bytes) -> None:
        self.request, self.unsent = request, memoryview(content)
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes."""
        try:
            self.unsent = self.unsent[self.socket.send(self.unsent) :]
        except BlockingIOError:
            pass

    def receive(self) -> tuple[int, bytes, bytes] | None:
        """Return status, header and body if the answer is complete. Raises OSError for a lost connection."""
        part = self.socket.recv(1 << 16)
        if not part:
            raise ConnectionResetError
        self.content += part
        end = self.content.find(END)
        if end < 0:
            return None
        head = bytes(self.content[:end])
        length = CONTENT_LENGTH.search(head)
        begin = end + len(END)
        size = int(length[1]) if length else 0
        if len(self.content) < begin + size:
            return None
        body = bytes(self.content[begin : begin + size])
        self.content.clear()
        return int(head[9:12]), head, body

    def close(self) -> None:
        self.socket.close()


class Target:
    """Server and the requests that it gets, one after another from one window to the next."""

    def __init__(self, port: int, pool: RequestPool) -> None:
        self.port = port
        head = (
            f"POST {PATH} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/octet-stream\r\n"
            f"{HEADER_LENGTH}: {pool.header_length}\r\ncontent-length: {pool.bodies.shape[1]}\r\n\r\n"
        ).encode()
        self.requests = [head + body.tobytes() for body in pool.bodies]
        self.position = 0

    def take_request(self) -> bytes:
        """Return the next request."""
        self.position = (self.position + 1) % len(self.requests)
        return self.requests[self.position]


class Run:
    """Progress of one window."""

    def __init__(self, target: Target, give_up_seconds: float = GIVE_UP_SECONDS) -> None:
        self.target, self.give_up_seconds = target, give_up_seconds
        self.num_failed = 0
        self.steps: dict[str, float] = {}
        self.idle: list[Connection] = []
        self.busy: set[Connection] = set()

    def open(self, count: int) -> None:
        self.idle = [Connection(self.target.port) for _ in range(count)]
        time.sleep(0.05)  # the server accepts them

    def close(self) -> None:
        """Wait for the answers in progress, so that the next window finds an idle server, and close all connections."""
        deadline = time.perf_counter() + DRAIN_SECONDS
        while self.busy and time.perf_counter() < deadline:
            self.wait(0.1)
        for connection in (*self.idle, *self.busy):
            connection.close()

    def send(self, request: int) -> None:
        connection = self.idle.pop()
        self.busy.add(connection)
        connection.send(request, self.target.take_request())

    def wait(self, seconds: float) -> list[int]:
        """Wait at most this long for answers; return the numbers of the requests that got one, or none any more."""
        unsent = [connection for connection in self.busy if connection.unsent]
        readable, writable, _ = select.select(self.busy, unsent, [], seconds)
        for connection in writable:
            connection.flush()
        finished = []
        for connection in readable:
            try:
                answer = connection.receive()
            except OSError:
                self.num_failed += 1
                finished.append(connection.request)
                self.busy.remove(connection)
                connection.close()
                self.idle.append(Connection(self.target.port))
                continue
            if answer is not None:
                self.note_answer(*answer)
                finished.append(connection.request)
                self.busy.remove(connection)
                self.idle.append(connection)
        return finished

    def note_answer(self, status: int, head: bytes, body: bytes) -> None:
        self.num_failed += status != 200
        step = STEP.search(body)
        if step is not None:
            self.steps.setdefault(step[1].decode(), time.time())

    def send_on_schedule(self, arrivals: Sequence[float]) -> Window:
        """Send requests when they are due, and wait for all answers."""
        count, num_sent, num_done, is_overloaded = len(arrivals), 0, 0, False
        latencies, lateness = [0.0] * count, []
        waiting: deque[int] = deque()  # due, and no connection is free
        num_due, free_since = 0, 0.0
        begin = time.perf_counter()
        while num_done < count:
            now = time.perf_counter() - begin
            while num_due < count and arrivals[num_due] <= now:
                waiting.append(num_due)
                num_due += 1
            while waiting and self.idle:
                request = waiting.popleft()
                self.send(request)
                num_sent += 1
                now = time.perf_counter() - begin
                lateness.append(now - max(arrivals[request], free_since))
            if waiting and now - arrivals[waiting[0]] > self.give_up_seconds:
                is_overloaded = True
                break
            until_due = arrivals[num_due] - now if num_due < count else 0.1
            seconds = 0.1 if waiting else max(0.0, until_due - SPIN_SECONDS)
            had_none_free = not self.idle
            for request in self.wait(min(seconds, 0.1)):
                latencies[request] = time.perf_counter() - begin - arrivals[request]
                num_done += 1
            if had_none_free and self.idle:
                free_since = time.perf_counter() - begin
        seconds = time.perf_counter() - begin
        for request in (*(c.request for c in self.busy), *waiting):
            latencies[request] = seconds - arrivals[request]
        self.num_failed += num_due - num_done
        return summarise(
            latencies[:num_due], lateness, seconds=seconds, num_done=num_done, num_failed=self.num_failed,
            is_overloaded=is_overloaded, steps=self.steps,
        )  # fmt: skip

    def send_back_to_back(self, seconds: float) -> float:
        """Keep all connections busy; return the answers per second."""
        begin, num_done = time.perf_counter(), 0
        while (now := time.perf_counter()) - begin < seconds:
            while self.idle:
                self.send(0)
            num_done += len(self.wait(0.1))
        return num_done / (now - begin)


def summarise(
    latencies: Sequence[float],
    lateness: Sequence[float],
    *,
    seconds: float,
    num_done: int,
    num_failed: int,
    is_overloaded: bool,
    steps: dict[str, float],
) -> Window:
    """Return the quantiles of a window, in milliseconds, from seconds."""
    ordered = sorted(1e3 * latency for latency in latencies)
    late = sorted(1e3 * value for value in lateness)
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999, "max": 1.0}
    return Window(
        rate=num_done / seconds, sent=len(lateness), failed=num_failed, is_overloaded=is_overloaded,
        late_p99=quantile(late, 0.99), steps=steps,
        **{name: quantile(ordered, q) for name, q in shares.items()},
    )  # fmt: skip


def ask(target: Target, index: int) -> list[float]:
    """Return the scores of one request."""
    connection = Connection(target.port)
    connection.socket.setblocking(True)
    connection.socket.settimeout(60)
    connection.socket.sendall(target.requests[index])
    while (answer := connection.receive()) is None:
        pass
    connection.close()
    status, head, body = answer
    length = JSON_LENGTH.search(head)
    if status != 200 or length is None:
        raise RuntimeError(f"got {status} {body[:500]!r}, wanted a binary answer")
    return parse_scores(body, int(length[1]))


def answer_message(target: Target, message: dict[str, Any], seed: int) -> dict[str, Any]:
    """Do what the parent asks for."""
    if "index" in message:
        return {"scores": ask(target, message["index"])}
    run = Run(target, message.get("give_up_seconds", GIVE_UP_SECONDS))
    run.open(message.get("clients", NUM_CONNECTIONS))
    try:
        if "clients" in message:
            return {"rate": run.send_back_to_back(message["seconds"]), "failed": run.num_failed}
        arrivals = draw_arrivals(message["rate"], message["seconds"], seed)
        return asdict(run.send_on_schedule(arrivals))
    finally:
        run.close()


def main() -> None:
    channel = open_channel()
    gc.disable()  # a collection would delay requests
    print(json.dumps({"ready": {}}), file=channel)
    targets: dict[tuple[int, str], Target] = {}
    pools: dict[str, RequestPool] = {}
    for seed, line in enumerate(sys.stdin):
        message = json.loads(line)
        port, path = message["port"], message["requests"]
        if (port, path) not in targets:
            if path not in pools:
                pools[path] = load_requests(path)
            targets[port, path] = Target(port, pools[path])
        print(json.dumps(answer_message(targets[port, path], message, seed)), file=channel)


if __name__ == "__main__":
    main()
