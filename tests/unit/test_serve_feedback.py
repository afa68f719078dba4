"""Feedback: AUC equal to counting pairs, a bounded window that all processes share, hostile bodies, the page."""

from __future__ import annotations

import asyncio
import errno
import html
import os
import random
import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
import served
from browser import CHROMIUM, FLAGS
from served import bearer, serving

from colonnade.serve import feedback
from colonnade.serve.endpoints.http import build_app
from colonnade.serve.feedback import PAIR, FeedbackSummary, FeedbackWindow
from colonnade.serve.service import Service


def count_auc(pairs: list[tuple[float, int]]) -> float | None:
    """Count over all pairs of a positive and a negative how often the positive scores higher; ties are half."""
    positives = [score for score, label in pairs if label]
    negatives = [score for score, label in pairs if not label]
    wins = [(p > n) + (p == n) / 2 for p in positives for n in negatives]
    return sum(wins) / len(wins) if wins else None


def draw_pairs(draw: random.Random, count: int) -> list[tuple[float, int]]:
    """Draw pairs with many equal scores, 0 and -0 among them."""
    return [
        (draw.choice([0.0, -0.0, 0.1, 0.25, 0.5, 1e9, -3.5]), draw.randrange(2))
        for _ in range(count)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_the_auc_is_that_of_the_newest_pairs(tmp_path, seed):
    draw = random.Random(seed)
    window, pairs = FeedbackWindow(tmp_path / "feedback", size=50), []
    for _ in range(12):
        newer = draw_pairs(draw, draw.choice([1, 7, 49, 50, 51, 130]))
        pairs += newer
        window.add_pairs(np.array(newer, PAIR))
        newest, summary = pairs[-50:], window.summarise()
        expected = count_auc(newest)
        assert summary.auc == (None if expected is None else pytest.approx(expected, abs=1e-12))
        positives = sum(label for _, label in newest)
        assert (summary.pairs, summary.positives, summary.total) == (
            len(newest),
            positives,
            len(pairs),
        )
        assert (tmp_path / "feedback").stat().st_size == window.num_bytes


def test_one_class_has_no_auc(tmp_path):
    window = FeedbackWindow(tmp_path / "feedback", size=4)
    assert window.summarise() == FeedbackSummary(None, 0, 0, 0)
    window.add_pairs(np.array([(0.5, 1), (0.7, 1)], PAIR))
    assert window.summarise() == FeedbackSummary(None, 2, 2, 2)


def test_writers_do_not_lose_one_anothers_pairs(tmp_path):
    """Windows of one file, as those of several workers, and several threads of each."""
    windows = [FeedbackWindow(tmp_path / "feedback", size=4000) for _ in range(3)]

    def write(window: FeedbackWindow, label: int) -> None:
        for _ in range(50):
            window.add_pairs(np.array([(0.25 + label / 2, label)] * 4, PAIR))

    threads = [threading.Thread(target=write, args=(w, label)) for w in windows for label in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for window in windows:
        assert window.summarise() == FeedbackSummary(1.0, 1200, 600, 1200)


def test_a_file_with_another_window_starts_anew(tmp_path):
    FeedbackWindow(tmp_path / "feedback", size=9).add_pairs(np.array([(0.5, 1)] * 5, PAIR))
    window = FeedbackWindow(tmp_path / "feedback", size=4)
    assert window.summarise() == FeedbackSummary()
    window.add_pairs(np.array([(0.5, 1), (0.25, 0)], PAIR))
    assert window.summarise() == FeedbackSummary(1.0, 2, 1, 2)


class Client:
    """Requests to a service in this process."""

    def __init__(self, service: Service) -> None:
        self.transport = httpx.ASGITransport(build_app(service), client=("127.0.0.1", 1))

    def __call__(self, method: str, path: str, **fields) -> httpx.Response:
        async def send() -> httpx.Response:
            base = "http://localhost:8000"
            async with httpx.AsyncClient(transport=self.transport, base_url=base) as client:
                return await client.request(method, path, **fields)

        return asyncio.run(send())


@contextmanager
def opened(folder: Path, **changes) -> Iterator[Client]:
    """A service that waits for its first checkpoint: feedback needs no model."""
    service = Service(served.options(folder / "published", folder / "state", **changes))
    service.start()
    try:
        yield Client(service)
    finally:
        service.close()


@pytest.fixture
def client(tmp_path):
    with opened(tmp_path) as client:
        yield client


def test_feedback_is_counted_and_its_auc_shown(client):
    pairs = [(0.9, 1), (0.2, 0), (0.4, 1), (0.6, 0), (0.4, 0)]
    scores, labels = [score for score, _ in pairs], [label for _, label in pairs]
    answer = client("POST", "/feedback", json={"scores": scores[:3], "labels": labels[:3]})
    assert answer.status_code == 200 and answer.json() == {"pairs": 3}
    booleans = [bool(label) for label in labels[3:]]
    assert (
        client("POST", "/feedback", json={"scores": scores[3:], "labels": booleans}).status_code
        == 200
    )
    expected = count_auc(pairs)
    assert client("GET", "/status").json()["feedback"] == {
        "auc": pytest.approx(expected), "pairs": 5, "positives": 2, "total": 5,
    }  # fmt: skip
    text = client("GET", "/metrics").text
    assert 'colonnade_feedback_pairs_total{label="1"} 2.0' in text
    assert 'colonnade_feedback_pairs_total{label="0"} 3.0' in text
    assert f"colonnade_feedback_auc {expected}" in text
    assert client("GET", "/status").json()["requests"] == {}  # no request that scores


def test_without_feedback_there_is_no_auc(client):
    assert client("GET", "/status").json()["feedback"]["auc"] is None
    assert "colonnade_feedback_auc NaN" in client("GET", "/metrics").text


HUGE = b"1" + b"0" * 400
WRONG = [
    (b"", 400), (b"{", 400), (b"[]", 400), (b"3", 400), (b"null", 400), (b"{}", 400),
    (b'{"scores": [0.5]}', 400), (b'{"scores": [0.5], "labels": [1], "step": 3}', 400),
    (b'{"scores": 0.5, "labels": 1}', 400), (b'{"scores": {}, "labels": {}}', 400),
    (b'{"scores": "ab", "labels": "ab"}', 400), (b'{"scores": [], "labels": []}', 400),
    (b'{"scores": [0.5, 0.5], "labels": [1]}', 400), (b'{"scores": ["0.5"], "labels": [1]}', 400),
    (b'{"scores": [null], "labels": [1]}', 400), (b'{"scores": [true], "labels": [1]}', 400),
    (b'{"scores": [[0.5]], "labels": [1]}', 400), (b'{"scores": [NaN], "labels": [1]}', 400),
    (b'{"scores": [1e999], "labels": [1]}', 400), (b'{"scores": [' + HUGE + b'], "labels": [1]}', 400),
    (b'{"scores": [0.5], "labels": [2]}', 400), (b'{"scores": [0.5], "labels": [0.5]}', 400),
    (b'{"scores": [0.5], "labels": [-1]}', 400), (b'{"scores": [0.5], "labels": [null]}', 400),
    (b'{"scores": [0.5], "labels": ["1"]}', 400), (b'{"scores": [0.5], "labels": [[1]]}', 400),
    (b'{"scores": [0.5], "labels": [' + HUGE + b"]}", 400), (b'{"scores": [0.5], "labels": [{}]}', 400),
    (b'{"\\ud800": 1, "labels": [1]}', 400), (b"[" * 5000, 400),
    (b'{"scores": [' + b"0," * 30 + b'0], "labels": [' + b"0," * 30 + b"0]}", 413),
    (b'{"scores": [' + b"0," * 5000 + b'0], "labels": [1]}', 413),
]  # fmt: skip


def test_each_wrong_body_is_answered_in_words(tmp_path):
    """And none of its pairs is counted."""
    with opened(tmp_path, max_candidates=30, max_body_bytes=10_000) as client:
        for body, code in WRONG:
            answer = client("POST", "/feedback", content=body)
            assert answer.status_code == code, (body[:80], answer.text)
            text = answer.json()["error"]
            assert ("got" in text and "wanted" in text) or "send" in text, text
            assert text.isprintable() and len(text) < 300, text
        assert client("GET", "/status").json()["feedback"]["total"] == 0


def test_the_rules_are_those_of_other_requests(tmp_path):
    body = {"json": {"scores": [0.5], "labels": [1]}}
    with opened(tmp_path) as client:
        assert (
            client(
                "POST", "/feedback", **body, headers={"origin": "https://evil.example"}
            ).status_code
            == 403
        )
        assert (
            client("POST", "/feedback", **body, headers={"host": "evil.example"}).status_code == 403
        )
        assert client("GET", "/feedback").status_code == 405
    with opened(tmp_path / "open", host="0.0.0.0") as client:
        assert client("POST", "/feedback", **body).status_code == 401
        assert client("POST", "/feedback", **body, headers=bearer()).status_code == 200


def test_a_full_disk_is_named(client, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(feedback.os, "posix_fallocate", refuse)
    answer = client("POST", "/feedback", json={"scores": [0.5], "labels": [1]})
    assert answer.status_code == 503 and "No space left" in answer.json()["error"]
    assert client("GET", "/status").json()["feedback"]["total"] == 0


@pytest.mark.slow
def test_workers_share_the_pairs_and_the_page_shows_them(tmp_path):
    with serving(tmp_path / "published", "--wait", "--workers", "2") as server:
        for number in range(10):  # to whichever worker
            with server.client() as client:
                fields = {"scores": [0.1, 0.5], "labels": [number % 5 == 0, number % 5 > 0]}
                assert client.post("/feedback", json=fields).status_code == 200
        for _ in range(6):
            with server.client() as client:
                status = client.get("/status").json()["feedback"]
                assert status == {"auc": 0.8, "pairs": 20, "positives": 10, "total": 20}
        with server.client() as client:
            assert "colonnade_feedback_auc 0.8\n" in client.get("/metrics").text
        if CHROMIUM is None:
            pytest.skip("no chromium on this machine to look at pages with")
        output = look_at(server.url, tmp_path)
    assert output["auc"] == "0.800 of the newest 20"
    assert output["labels"] == "20 50.0 % are 1"
    assert output["state"] == "not ready" and "no checkpoint yet" in output["problem"]


def look_at(url: str, folder: Path) -> dict[str, str]:
    """Return the texts of the live page by id, as Chromium shows them after some seconds of its own clock."""
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder / 'profile'}", "--dump-dom", f"{url}/"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert "CONSOLE" not in ended.stderr, ended.stderr[-2000:]
    texts = re.findall(r'<(\w+) id="([\w-]+)"[^>]*>(.*?)</\1>', ended.stdout, re.DOTALL)
    return {
        name: " ".join(html.unescape(re.sub(r"<[^>]*>", " ", text)).split())
        for _, name, text in texts
    }
