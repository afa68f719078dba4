"""Helpers of the tests of `colonnade serve`: small models, requests, and real server processes."""

from __future__ import annotations

import contextlib
import json
import random
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from forked_command import ForkedCommand
from small_run import CONFIG, opened

from colonnade import Mesh
from colonnade.config.run import build_config, override_settings
from colonnade.run.run import open_run
from colonnade.serve.options import ServeOptions

TOKEN = "0123456789abcdef-token"
STEPS = {"train.epochs": 1, "train.checkpoint_steps": 4, "train.keep_checkpoints": 20}


def train(folder: Path, publication: Path, settings: dict | None = None) -> Any:
    """Train a small model that publishes each fourth step, and return its configuration."""
    config = override_settings(
        build_config(CONFIG), {**STEPS, "train.publish": str(publication), **(settings or {})}
    )
    run = open_run(config, Mesh(), folder, data=opened(config))
    run.train()
    run.close()
    return config


def train_pairs(folder: Path) -> None:
    """Train and publish a small retrieval model: pairs of 40 users with 30 items, in the form of Gowalla's."""
    rng, data = random.Random(0), folder / "gowalla"
    data.mkdir(parents=True)
    for name, count in (("train", 8), ("valid", 3)):
        lines = [
            f"{user} " + " ".join(map(str, sorted(rng.sample(range(30), count))))
            for user in range(40)
        ]
        (data / f"{name}.txt").write_text("\n".join([*lines, ""]))
    config = build_config({
        "data": {"name": "gowalla", "path": str(data)},
        "model": {"name": "two_tower", "dim": 8, "temperature": 0.2},
        "train": {"batch_size": 32, "epochs": 2, "checkpoint_steps": 5, "keep_checkpoints": 20,
                  "publish": str(folder / "published"),
                  "publish_at": "last"},
    })  # fmt: skip
    run = open_run(config, Mesh(), folder / "run")
    run.train()
    run.close()


def open_data() -> Any:
    """The data of `train`."""
    return opened(build_config(CONFIG))


def samples(size: int = 64) -> list:
    """Batches of the test part of `train`'s data."""
    return list(open_data().test.batches(size))


def to_tensors(batch: Any) -> dict[str, np.ndarray]:
    """The input tensors of a batch."""
    tensors = {"dense": batch.dense.numpy()} if batch.dense.shape[1] else {}
    for name, ids in batch.ids.items():
        tensors[name] = ids.values.numpy()
        if ids.offsets is not None:
            tensors[f"{name}.lengths"] = ids.counts.numpy()
    return tensors


def to_json(tensors: dict[str, np.ndarray]) -> dict[str, Any]:
    """An inference request as JSON."""
    kinds = {"f": "FP32", "i": "INT64"}
    return {
        "inputs": [
            {"name": name, "datatype": kinds[t.dtype.kind], "shape": list(t.shape), "data": t.ravel().tolist()}
            for name, t in tensors.items()
        ]
    }  # fmt: skip


def to_binary(tensors: dict[str, np.ndarray]) -> tuple[bytes, dict[str, str]]:
    """An inference request with binary tensors: body and headers."""
    kinds = {"f": "FP32", "i": "INT64"}
    inputs, parts = [], []
    for name, t in tensors.items():
        parts.append(np.ascontiguousarray(t).tobytes())
        inputs.append({
            "name": name, "datatype": kinds[t.dtype.kind], "shape": list(t.shape),
            "parameters": {"binary_data_size": len(parts[-1])},
        })  # fmt: skip
    header = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    return b"".join([header, *parts]), {"Inference-Header-Content-Length": str(len(header))}


def options(path: Path, state: Path, **changes: Any) -> ServeOptions:
    """Options of a server in this process."""
    values = {"poll_seconds": 0.05, "token": TOKEN, **changes}
    return ServeOptions(str(path), state_folder=str(state), **values)


def bearer(token: str = TOKEN) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


class Server:
    """A `colonnade serve` process."""

    def __init__(self, *arguments: object) -> None:
        self.process = ForkedCommand(["serve", *map(str, arguments), "--port", "0"])
        self.errors = ""
        self._reader = threading.Thread(target=self._read_errors, daemon=True)
        self._reader.start()
        self.line = self.process.stdout.readline()
        match = re.search(
            r"on (https?://\S+:(\d+))(?:, gRPC on port (\d+))?", self.line.replace("\n", " ")
        )
        if match is None:
            self.process.wait(30)
            self._reader.join(5)
            raise AssertionError(f"no server: {self.line!r} {self.errors}")
        self.url, self.port, self.grpc_port = match[1], int(match[2]), match[3]

    def _read_errors(self) -> None:
        for line in self.process.stderr:
            self.errors += line

    def client(self, **settings: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30, **settings)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Stop the server and return its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(60)
        self._reader.join(5)
        self.process.stdout.close()
        self.process.stderr.close()
        return code


@contextlib.contextmanager
def serving(*arguments: object) -> Iterator[Server]:
    """A server process that must end well."""
    server = Server(*arguments)
    try:
        yield server
    except BaseException:
        server.stop(signal.SIGKILL)
        raise
    assert server.stop() == 0, server.errors
