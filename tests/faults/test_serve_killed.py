"""Trainer and server are killed at random moments: each answer is that of the checkpoint that it names."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path

import httpx
import numpy as np
import pytest
import served
from served import Server, to_binary, to_tensors
from small_run import CONFIG

from colonnade import Predictor
from colonnade.checkpoint.header import list_checkpoints

SETTINGS = {
    "train.publish": "published",
    "train.checkpoint_steps": 3,
    "train.keep_checkpoints": 10_000,
    "train.epochs": 40,
}


class Trainer:
    """A training run in a process of its own, which is killed and resumed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process: subprocess.Popen | None = None
        self.num_kills = 0

    def ensure_running(self) -> None:
        """Start the run, or go on with it. A run that is complete stays so."""
        if self.process is not None and self.process.poll() is None:
            return
        sets = {**CONFIG["train"], **SETTINGS}
        sets = {(k if "." in k else f"train.{k}"): v for k, v in sets.items()}
        sets |= {f"model.{k}": v for k, v in CONFIG["model"].items()}
        sets |= {f"data.options.{k}": v for k, v in CONFIG["data"]["options"].items()}
        words = [
            word
            for k, v in sets.items()
            for word in ("--set", f"{k}={json.dumps(v) if isinstance(v, list) else v}")
        ]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "colonnade", "train", "--data", "synthetic", "--run", "run", *words],
            cwd=self.folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def wait_for_checkpoint(self) -> None:
        """Wait until the run publishes something, or ends: to start it takes long on a busy machine."""
        before, deadline = self._published_at(), time.monotonic() + 120
        while self._published_at() == before and self.process.poll() is None:
            assert time.monotonic() < deadline, "no checkpoint came"
            time.sleep(0.02)

    def _published_at(self) -> int | None:
        try:
            return os.stat(self.folder / "published" / "published.json").st_mtime_ns
        except FileNotFoundError:
            return None

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
            self.num_kills += 1


class Asker:
    """A thread that asks without a pause, and keeps each answer by the step that it names."""

    def __init__(self, body: bytes, headers: dict[str, str]) -> None:
        self.body, self.headers = body, headers
        self.url = ""
        self.scores: dict[int, set[bytes]] = defaultdict(set)
        self.num_answers = self.num_refused = 0
        self.faults: list[str] = []
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._ask)
        self.thread.start()

    def _ask(self) -> None:
        while not self.stop.is_set():
            try:
                with httpx.Client(base_url=self.url, timeout=30) as client:
                    while not self.stop.is_set():
                        self._note(
                            client.post(
                                "/v2/models/model/infer", content=self.body, headers=self.headers
                            )
                        )
            except (httpx.HTTPError, httpx.InvalidURL, httpx.UnsupportedProtocol):
                time.sleep(0.02)  # the server was killed

    def _note(self, answer: httpx.Response) -> None:
        if answer.status_code == 503:
            self.num_refused += 1
            time.sleep(0.02)
            return
        if answer.status_code != 200:
            self.faults.append(f"{answer.status_code} {answer.text}")
            return
        length = int(answer.headers["Inference-Header-Content-Length"])
        fields = json.loads(answer.content[:length])
        self.scores[int(fields["model_version"])].add(answer.content[length:])
        self.num_answers += 1

    def close(self) -> None:
        self.stop.set()
        self.thread.join()


@pytest.mark.slow  # the shortest takes two minutes of processor time
@pytest.mark.parametrize(
    ("seconds", "workers"),
    [(8, 1), (600, 1), (600, 2)],
)
def test_each_answer_is_the_checkpoints_that_it_names(tmp_path, seconds, workers):
    seed = int(os.environ.get("COLONNADE_KILL_SEED", "7"))
    rng = random.Random(seed)
    batch = served.samples(16)[0]
    trainer, asker = Trainer(tmp_path), Asker(*to_binary(to_tensors(batch)))
    server: Server | None = None
    num_server_kills = 0
    deadline = time.monotonic() + seconds
    try:
        while time.monotonic() < deadline or asker.num_answers < 20:
            assert time.monotonic() < deadline + 300, asker.faults[:3]
            trainer.ensure_running()
            if server is None or server.process.poll() is not None:
                server = Server(
                    tmp_path / "published", "--wait", "--poll", "0.1", "--workers", workers
                )
                asker.url = server.url
            if rng.random() < 0.8:
                trainer.wait_for_checkpoint()
            time.sleep(rng.uniform(0.0, 1.0))
            if rng.random() < 0.6:
                trainer.kill()
            if rng.random() < 0.3 and asker.num_answers:
                server.stop(signal.SIGKILL)
                num_server_kills += 1
    finally:
        asker.close()
        trainer.kill()
        if server is not None:
            server.stop(signal.SIGKILL)
    assert asker.faults == [] and asker.num_answers
    steps = list_checkpoints(tmp_path / "run")
    assert set(asker.scores) <= set(steps)
    for step, answers in asker.scores.items():
        with Predictor.open(tmp_path / "run", at=step) as predictor:
            assert answers == {np.ascontiguousarray(predictor(batch)[:, 0].numpy()).tobytes()}, step
    print(
        f"{asker.num_answers} answers of {len(asker.scores)} steps, {asker.num_refused} refused; {trainer.num_kills} "
        f"kills of the trainer, {num_server_kills} of the server"
    )
