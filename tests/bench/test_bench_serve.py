"""Bench serve: latencies count from when requests are due, searches end at the limit, peers score the same."""

from __future__ import annotations

import http.server
import json
import mmap
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))  # benches are scripts, not part of the package

import serve as bench  # noqa: E402
from harness import Measured  # noqa: E402
from tables import serve as tables  # noqa: E402
from tables.rate_search import RateSearch  # noqa: E402
from workers import serve_client as client  # noqa: E402
from workers.serve_model import build_demo_config, write_export  # noqa: E402
from workers.serve_network import load_model  # noqa: E402
from workers.serve_processes import pinned, read_private_bytes  # noqa: E402
from workers.serve_publication import find_delays  # noqa: E402
from workers.serve_requests import (  # noqa: E402
    RequestPool,
    build_body,
    draw_ids,
    load_requests,
    write_requests,
)

from colonnade import Predictor  # noqa: E402
from colonnade.serve.protocol import parse_infer_request  # noqa: E402
from colonnade.serve.tensors import build_batch, build_signature  # noqa: E402


def test_a_quantile_is_a_value_that_enough_others_do_not_exceed():
    values = [float(value) for value in range(1, 101)]
    assert client.quantile(values, 0.99) == 99.0
    assert client.quantile(values, 0.5) == 50.0
    assert client.quantile(values, 1.0) == 100.0
    assert client.quantile([7.0], 0.01) == 7.0
    # The 99th percentile of 150 values is above 148.5 of them.
    assert client.quantile([float(value) for value in range(150)], 0.99) == 148.0


def test_requests_are_due_at_random_moments_of_one_rate():
    arrivals = client.draw_arrivals(200.0, 50.0, seed=3)
    gaps = np.diff([0.0, *arrivals])
    assert arrivals == sorted(arrivals) and arrivals[-1] < 50.0
    assert len(arrivals) == pytest.approx(10_000, rel=0.04)
    # Gaps of a Poisson process: the standard deviation is the mean, and a share 1 / e is longer than the mean.
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)
    assert (gaps > gaps.mean()).mean() == pytest.approx(np.exp(-1), abs=0.02)
    assert client.draw_arrivals(200.0, 50.0, seed=4) != arrivals
    assert client.draw_arrivals(0.001, 1.0, seed=0) == [0.0]


@pytest.mark.parametrize("limit", [3.0, 130.0, 517.0, 990.0])
def test_a_search_ends_just_below_the_limit(limit: float):
    search = RateSearch(400.0, 1050.0, tolerance=0.03)
    rates = []
    while not search.is_done:
        rates.append(search.rate)
        search.add(search.rate, is_met=search.rate <= limit)
    assert limit / 1.03 <= search.best <= limit
    assert len(rates) <= 22 and len(set(rates)) == len(rates)
    if limit > 400:
        assert len(rates) <= 7


def test_a_search_that_nothing_meets_ends_with_nothing():
    search = RateSearch(400.0, 1050.0, tolerance=0.03)
    for _ in range(60):
        if search.is_done:
            break
        search.add(search.rate, is_met=False)
    assert search.is_done and search.best == 0.0


class StallingHandler(http.server.BaseHTTPRequestHandler):
    """Answers at once, but for one stall that all requests have to sit out."""

    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # an answer is one packet
    lock = threading.Lock()
    stall_at, stall_seconds, count = 50, 0.4, 0
    status = 200

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        with self.lock:
            type(self).count += 1
            if self.count == self.stall_at:
                time.sleep(self.stall_seconds)
        body = b'{"model_version": "%d"}' % (1 + (self.count > self.stall_at))
        self.send_response(self.status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def stalling():
    """A server with a handler class of its own."""
    handler = type("Handler", (StallingHandler,), {"lock": threading.Lock()})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port, handler
    server.shutdown()
    server.server_close()


def open_run(port: int, connections: int, give_up_seconds: float = 5.0) -> client.Run:
    pool = RequestPool(np.zeros((3, 20_000), np.uint8), 8)
    run = client.Run(client.Target(port, pool), give_up_seconds)
    run.open(connections)
    return run


def test_a_stall_is_charged_to_all_requests_that_came_meanwhile(stalling):
    """100 requests a second and a stall of 0.4 s: 40 requests are late by 0.4 to 0 s, and not one."""
    port, _ = stalling
    run = open_run(port, connections=4)
    window = run.send_on_schedule([0.01 * number for number in range(150)])
    run.close()
    assert window.sent == 150 and window.failed == 0 and not window.is_overloaded
    assert window.max >= 390
    # 36 requests waited for 40 ms and more, which are 24 % of all; a closed loop would have seen four.
    assert window.p90 >= 150 and window.p50 < 100
    assert list(window.steps) == ["1", "2"] and window.steps["2"] - window.steps["1"] > 0.5


def test_a_server_that_does_not_keep_up_ends_the_window(stalling):
    port, handler = stalling
    handler.stall_at, handler.stall_seconds = 3, 1.0
    run = open_run(port, connections=1, give_up_seconds=0.2)
    window = run.send_on_schedule([0.005 * number for number in range(2000)])
    run.close()
    assert window.is_overloaded and window.failed > 0 and window.sent < 100
    assert not bench.is_within({"is_overloaded": True, "failed": 0, "p99": 1.0}, 10.0)


def test_answers_that_are_errors_count_as_failures(stalling):
    port, handler = stalling
    handler.status = 503
    run = open_run(port, connections=2)
    window = run.send_on_schedule([0.01 * number for number in range(20)])
    run.close()
    assert window.failed == 20
    assert not bench.is_within(vars(window), 1000.0)


def test_a_step_is_fresh_once_it_or_a_later_one_answers():
    published = {10: 100.0, 20: 101.0, 30: 102.0, 40: 110.0}
    answered = {10: 100.4, 30: 102.9}
    assert find_delays(published, answered, 99.0, 105.0) == pytest.approx([0.4, 1.9, 0.9])
    assert find_delays(published, {10: 100.4, 20: 103.0}, 101.5, 105.0) == pytest.approx([1.0])


def test_ids_have_the_skew_and_stay_in_the_table():
    generator = np.random.default_rng(0)
    ids = draw_ids(1000, 1.05, (200_000,), 3, generator)
    assert ids.min() >= 0 and ids.max() < 1000
    counts = np.sort(np.bincount(ids, minlength=1000))[::-1]
    # Ranks follow the integral of the density: the share of the first of 1,000, and of the first hundred.
    total = 1 - 1001**-0.05
    assert counts[0] / len(ids) == pytest.approx((1 - 2**-0.05) / total, rel=0.03)
    assert counts[:100].sum() / len(ids) == pytest.approx((1 - 101**-0.05) / total, rel=0.03)
    assert set(draw_ids(1, 1.05, (5,), 0, generator)) == {0}
    assert draw_ids(3, 1.05, (999,), 25, generator).max() == 2


def test_a_body_is_what_the_server_reads(tmp_path: Path):
    write_requests(
        tmp_path / "r.npz", [7, 3], num_candidates=5, num_requests=4, exponent=1.05, num_shared=1
    )
    pool = load_requests(tmp_path / "r.npz")
    request = parse_infer_request(pool.bodies[2].tobytes(), str(pool.header_length))
    assert request.is_binary and list(request.inputs) == ["dense", "C1", "C2"]
    shapes = [tensor.shape for tensor in request.inputs.values()]
    assert shapes == [(1, 13), (1,), (5,)]
    body, length = build_body({"x": np.arange(3)})
    assert np.array_equal(parse_infer_request(body, str(length)).inputs["x"], [0, 1, 2])


def test_the_peer_serves_the_same_model(tmp_path: Path):
    """A demo export with small tables: plain torch, in both forms, scores as `Predictor` does."""
    config = build_demo_config(40)
    write_export(tmp_path / "model", config)
    rows = tables.read_field_rows(tmp_path / "model")
    assert rows == [40] * 26 and tables.count_row_bytes(tmp_path / "model") == 26 * 40 * 16 * 4
    write_requests(tmp_path / "r.npz", rows, num_candidates=9, num_requests=2, exponent=1.05)
    pool = load_requests(tmp_path / "r.npz")
    inputs = parse_infer_request(bytearray(pool.bodies[1]), str(pool.header_length)).inputs
    with Predictor.open(tmp_path / "model", verify="full") as predictor:
        scores = predictor(build_batch(build_signature(predictor.schema, 100), inputs))[:, 0]
    assert scores.std() > 1e-3, "all candidates score the same"
    dense, *ids = [torch.from_numpy(tensor) for tensor in inputs.values()]
    for is_stacked in (False, True):
        peer = load_model(tmp_path / "model", is_stacked=is_stacked)
        torch.testing.assert_close(peer(dense, ids), scores, rtol=0, atol=1e-6)


def test_ratios_are_named_as_their_limits():
    def rows(case: str, system: str, unit: str, *values: float) -> Measured:
        return Measured(case, system, unit, list(values))

    measured = [
        rows("100 candidates", "colonnade", tables.RATE, 500.0, 600.0, 700.0),
        rows("100 candidates", "colonnade", tables.P99_STEADY, 4.0, 6.0),
        rows("1 candidate", "colonnade", tables.RATE, 2000.0),
        rows("100 candidates in turns", "colonnade", "candidates/s", 60.0, 80.0),
        rows("100 candidates in turns", "direct calls", "candidates/s", 100.0, 160.0),
        rows("1 candidate beside fastapi", "colonnade", tables.RATE, 1500.0),
        rows("1 candidate beside fastapi", "fastapi", tables.RATE, 500.0),
        rows("one call", "colonnade", "ms", 0.1, 0.3, 0.2),
        rows("fresh", "colonnade", "s", *[0.5] * 98, 1.5, 9.0),
        rows("private memory demo", "colonnade", "MiB", 20.0, 30.0),
        rows("ready", "colonnade", "s", 2.0),
        rows("beyond memory", "colonnade", "ms p99", 2.0, 4.0),
        rows("beyond memory", tables.LIMITED, "ms p99", 6.0, 8.0),
        rows("top-k of 1", "colonnade", "queries/s", 10.0),
        rows("top-k of 1", "faiss", "queries/s", 20.0),
        rows("top-k of 64", "colonnade", "queries/s", 30.0),
        rows("top-k of 64", "faiss", "queries/s", 20.0),
    ]
    ratios = tables.ratios_of(measured)
    expected = {
        "rate_at_p99_10ms": 600.0, "p99_ms_at_60_percent": 5.0, "rate_at_p99_5ms_1": 2000.0, "fixed_cost_ms": 0.2,
        "of_direct_call": 0.55, "rate_vs_fastapi_1": 3.0, "fresh_seconds": 1.5, "fresh_seconds_median": 0.5,
        "private_mib_per_worker": 30.0, "ready_seconds": 2.0, "p99_beyond_memory": 2.5, "topk_vs_faiss": 0.5,
        "topk_vs_faiss_1": 0.5, "topk_vs_faiss_64": 1.5,
    }  # fmt: skip
    assert ratios == pytest.approx(expected)
    assert tables.describe_limit("fixed_cost_ms") == " (wanted <= 0.2)"
    assert tables.describe_limit("topk_vs_faiss_64") == ""


def test_cores_and_memory_of_processes():
    own = bench.os.sched_getaffinity(0)
    with pinned([min(own)]):
        assert bench.os.sched_getaffinity(0) == {min(own)}
    assert bench.os.sched_getaffinity(0) == own
    before = read_private_bytes(bench.os.getpid())
    with mmap.mmap(-1, 32 << 20, flags=mmap.MAP_PRIVATE) as content:  # not memory that was freed
        content.write(b"x" * len(content))
        assert read_private_bytes(bench.os.getpid()) - before >= len(content) * 0.9


class SimulatedClient:
    """Client of simulated servers: a port is the highest rate with a p99 of 10 ms. Notes what it is sent."""

    def __init__(self, late_windows: int = 0) -> None:
        self.messages: list[dict] = []
        self.late_windows = late_windows

    def send(self, message: dict) -> None:
        self.messages.append(message)

    def answer(self) -> dict:
        message = self.messages[-1]
        capacity = message["port"]
        if "clients" in message:
            return {"rate": 1.3 * capacity, "failed": 0}
        p99 = 10.0 * message["rate"] / capacity
        window = {"p50": p99 / 2, "p99": p99, "late_p99": 0.1, "failed": 0, "is_overloaded": False}
        if self.late_windows:
            self.late_windows -= 1
            return {**window, "p99": 500.0, "late_p99": 30.0}
        return window


def open_bench(tmp_path: Path, monkeypatch) -> bench.Bench:
    monkeypatch.setattr(bench, "choose_cores", lambda: (0, 1))
    return bench.Bench(tmp_path, bench.FULL, bench.PieceFile(None, "serve"), Console())


def test_servers_are_measured_in_turns_up_to_the_limit(tmp_path: Path, monkeypatch):
    client, servers = (
        SimulatedClient(),
        [SimpleNamespace(name=n, port=p) for n, p in (("a", 800), ("b", 300))],
    )
    figures = open_bench(tmp_path, monkeypatch).measure_rates(client, servers, tmp_path, 10.0, 2, 3)
    for name, capacity in (("a", 800), ("b", 300)):
        assert figures[name].closed_loop == pytest.approx(1.3 * capacity)
        assert len(figures[name].best) == 2
        assert all(capacity / 1.03 <= best <= capacity for best in figures[name].best)
        assert [w["p99"] for w in figures[name].steady] == pytest.approx([6.0] * 3, rel=0.03)
    ports = [m["port"] for m in client.messages if "rate" in m]
    assert ports[:8] == [800, 300] * 4 and ports[-6:] == [800, 300] * 3
    seconds = sum(m["seconds"] for m in client.messages)
    assert seconds / 2 < 130, (
        "a piece with one server would take more than four minutes with its start"
    )


def test_a_window_in_which_the_client_was_late_is_tried_again(tmp_path: Path, monkeypatch):
    client, server = SimulatedClient(late_windows=1), SimpleNamespace(name="a", port=800)
    window = open_bench(tmp_path, monkeypatch).send_window(client, server, tmp_path, 400.0)
    assert window["p99"] == pytest.approx(5.0) and len(client.messages) == 2
    client = SimulatedClient(late_windows=9)
    window = open_bench(tmp_path, monkeypatch).send_window(client, server, tmp_path, 400.0)
    assert window["p99"] == 500.0 and len(client.messages) == bench.WINDOW_TRIES


def test_results_are_gone_on_with_piece_by_piece(tmp_path: Path, monkeypatch):
    """A piece that is in the file is not measured again; one that cannot be measured is named."""
    calls = []

    def list_pieces(self):
        def measure(name: str):
            def run(stack):
                calls.append(name)
                if name == "topk":
                    raise bench.LeftOut("no faiss")
                return [Measured("one call", "colonnade", "ms", [0.1])]

            return run

        return {name: measure(name) for name in ("calls", "topk")}

    monkeypatch.setattr(bench.Bench, "list_pieces", list_pieces)
    monkeypatch.setattr(bench, "others_share", lambda since: 0.0)
    path = tmp_path / "serve.json"
    bench.main(["--json", str(path), "--quick", "--only", "calls"])
    bench.main(["--json", str(path), "--quick"])
    assert calls == ["calls", "topk"]
    result = json.loads(path.read_text())
    assert result["ratios"] == {"fixed_cost_ms": 0.1}
    assert result["machine"]["left_out"] == ["topk: no faiss"]
