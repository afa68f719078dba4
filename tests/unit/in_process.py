"""Helpers of the tests of a server in this process: requests without a socket, and publications that move."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import served
import torch
from served import to_binary, to_tensors

from colonnade import Predictor
from colonnade.publish.deltas import CURRENT
from colonnade.serve.control import copy_published_step
from colonnade.serve.endpoints.http import build_app
from colonnade.serve.protocol import HEADER_LENGTH
from colonnade.serve.service import Service

INFER = "/v2/models/model/infer"


class Client:
    """Requests to a service in this process."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.transport = httpx.ASGITransport(build_app(service), client=("127.0.0.1", 1))

    def __call__(self, method: str, path: str, **fields: Any) -> httpx.Response:
        return self.all([(method, path, fields)])[0]

    def all(self, requests: list) -> list[httpx.Response]:
        """Send requests at the same time."""

        async def send() -> list[httpx.Response]:
            base = "http://localhost:8000"
            async with httpx.AsyncClient(
                transport=self.transport, base_url=base, timeout=60
            ) as client:
                return await asyncio.gather(
                    *(client.request(method, path, **fields) for method, path, fields in requests)
                )

        return asyncio.run(send())


@contextmanager
def opened(path: Path, state: Path, **changes: Any) -> Iterator[Client]:
    service = Service(served.options(path, state, **changes))
    service.start()
    try:
        yield Client(service)
    finally:
        service.close()


def score_step(trained: Path, batch: Any, step: int) -> torch.Tensor:
    """Scores by a predictor of an export of the step."""
    with Predictor.open(trained / "run", at=step) as predictor:
        return predictor(batch)


def scores_of(answer: httpx.Response) -> np.ndarray:
    """The scores in an answer of either form."""
    assert answer.status_code == 200, answer.text
    length = answer.headers.get(HEADER_LENGTH)
    if length is None:
        output = answer.json()["outputs"][0]
        return np.array(output["data"]).reshape(output["shape"])
    return np.frombuffer(answer.content[int(length) :])


def fields_of(answer: httpx.Response) -> dict:
    length = answer.headers.get(HEADER_LENGTH)
    return json.loads(answer.content if length is None else answer.content[: int(length)])


def infer(client: Client, batch: Any, path: str = INFER) -> httpx.Response:
    body, headers = to_binary(to_tensors(batch))
    return client("POST", path, content=body, headers=headers)


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.01)


def publish(trained: Path, live: Path, step: int) -> None:
    """Put a publication that ends at `step` in place of an earlier one, the pointer last."""
    part = live.with_name(f"part-{step}")
    copy_published_step(trained / "published", part, step)
    live.mkdir(exist_ok=True)
    for path in part.iterdir():
        if path.name != CURRENT and not (live / path.name).exists():
            path.rename(live / path.name)
    (part / CURRENT).rename(live / CURRENT)
