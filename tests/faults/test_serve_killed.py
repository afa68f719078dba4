"""Trainer, publisher and server are killed at random moments: each answer is that of the checkpoint that it names.

COLONNADE_KILL_SECONDS and COLONNADE_KILL_SEED choose how long, and which moments.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path

import httpx
import numpy as np
import pytest
import served
from ranks import Child, start_child
from served import Server, to_binary, to_tensors
from small_run import CONFIG, opened

from colonnade import Mesh, Predictor
from colonnade.checkpoint.header import list_checkpoints, read_header
from colonnade.config.run import build_config, override_settings
from colonnade.publish import delivery, deltas
from colonnade.run.run import open_run

SECONDS = float(os.environ.get("COLONNADE_KILL_SECONDS", "15"))
SEED = int(os.environ.get("COLONNADE_KILL_SEED", "7"))
CATCH_UP_SECONDS = 60.0
"""Time for a new process, on a machine that is busy with others."""
SETTINGS = {"train.checkpoint_steps": 3, "train.keep_checkpoints": 100_000, "train.epochs": 100_000}
PUBLISH_SECONDS = 0.15
"""Pause after each publication: to check the answers of each costs more than to train it."""


def train(folder: str, publication: str, seed: int) -> None:
    """Start or resume the run; now and then the process dies at a random moment of a publication, if seed is not 0."""
    rng = random.Random(seed)
    kind = delivery.UrlPublisher if "://" in publication else deltas.DeltaPublisher
    send = kind.send
    is_publishing = threading.Event()

    def die() -> None:
        os.write(1, b"died in a publication\n" if is_publishing.is_set() else b"died\n")
        os.kill(os.getpid(), signal.SIGKILL)

    def send_or_die(publisher, step, retained, print_line) -> None:
        is_publishing.set()
        if seed and rng.random() < 0.3:
            threading.Timer(rng.uniform(0.0, 0.03), die).start()
        send(publisher, step, retained, print_line)
        is_publishing.clear()
        time.sleep(PUBLISH_SECONDS)

    kind.send = send_or_die  # type: ignore[method-assign]
    deltas.MIN_BYTES_FOR_BASE = 1 << 16  # a new base after a few checkpoints
    config = override_settings(build_config(CONFIG), {**SETTINGS, "train.publish": publication})
    run = open_run(config, Mesh(), Path(folder), data=opened(config))
    run.train()


class Trainer:
    """A training run in a process of its own, which dies, is killed, and is resumed."""

    def __init__(self, folder: Path, publication: str, rng: random.Random) -> None:
        self.folder, self.publication, self.rng = folder, publication, rng
        self.child: Child | None = None
        self.num_starts = self.num_kills = 0

    def ensure_running(self) -> None:
        """Start the run, or go on with it. Fails if it ended by itself."""
        if self.child is not None:
            if self.child.code is None:
                return
            assert self.child.code == -signal.SIGKILL, self.child.read_output()[-3000:]
        self.num_starts += 1
        seed = self.rng.getrandbits(32) if self.rng.random() < 0.5 else 0
        words = (str(self.folder / "run"), self.publication, seed)
        self.child = start_child(self.folder / "trainer", os.environ, train, *words)

    def wait_for_checkpoint(self) -> None:
        """Wait until the run has a newer checkpoint, or is dead."""
        assert self.child is not None
        folder = self.folder / "run" / "checkpoints"
        before, deadline = count_names(folder), time.monotonic() + CATCH_UP_SECONDS
        while count_names(folder) == before and self.child.code is None:
            assert time.monotonic() < deadline, f"no checkpoint came: {self.child.read_output()}"
            time.sleep(0.02)

    def kill(self) -> None:
        if self.child is not None and self.child.code is None:
            self.child.kill()
            self.child.wait()
            self.num_kills += 1

    def count_deaths_in_publications(self) -> int:
        output = self.folder / "trainer"
        return output.read_text().count("died in a publication") if output.exists() else 0


def count_names(folder: Path) -> int:
    return len(os.listdir(folder)) if folder.exists() else 0


def find_own_port(answer: httpx.Response) -> int:
    """Return the client's port of the connection of an answer; -1: the server has ended the connection."""
    try:
        return answer.extensions["network_stream"].get_extra_info("client_addr")[1]
    except OSError:
        return -1


class Asker:
    """A thread that asks without a pause, and keeps each answer by the request and the step that it names."""

    def __init__(self, batches: list, num_workers: int) -> None:
        self.num_workers = num_workers
        self.requests = [to_binary(to_tensors(batch)) for batch in batches]
        self.url = ""
        self.scores: dict[tuple[int, int], set[bytes]] = defaultdict(set)
        self.runs: set[str] = set()
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self.newest: dict[str, int] = {}
        """Newest step that each server has named."""
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._ask)
        self.thread.start()

    def _ask(self) -> None:
        while not self.stop.is_set():
            url, last = self.url, (-1, -1)
            try:
                with httpx.Client(base_url=url, timeout=30) as client:
                    while not self.stop.is_set() and self.url == url:
                        last = self._ask_once(client, url, last)
            except (httpx.HTTPError, httpx.InvalidURL, httpx.UnsupportedProtocol):
                self.counts["cut off"] += 1
                time.sleep(0.1)

    def _ask_once(self, client: httpx.Client, url: str, last: tuple[int, int]) -> tuple[int, int]:
        """Send a request; return its connection's own port and the step of its answer.

        last: those of the last answer of this server. A server of one process never goes back to an older step; with
        workers this holds for a connection, because httpx opens another one, perhaps to another worker, if the last one
        has ended meanwhile.
        """
        number = self.counts.total() % len(self.requests)
        body, headers = self.requests[number]
        answer = client.post("/v2/models/model/infer", content=body, headers=headers)
        if answer.status_code != 200:
            self.counts[str(answer.status_code)] += 1
            is_empty = "no checkpoint" in answer.text or "no publication" in answer.text
            if answer.status_code != 503 or not is_empty:
                self.faults.append(f"{answer.status_code} {answer.text}")
            time.sleep(0.02)
            return last
        length = int(answer.headers["Inference-Header-Content-Length"])
        fields = json.loads(answer.content[:length])
        step = int(fields["model_version"])
        port = find_own_port(answer)
        if step < last[1]:
            is_same_process = self.num_workers == 1 or port == last[0] != -1
            self.counts["older on another connection"] += not is_same_process
            if is_same_process:
                self.faults.append(f"step {step} after {last[1]}, ports {last[0]} and {port}")
        self.scores[step, number].add(answer.content[length:])
        self.runs.add(fields["parameters"]["run"])
        self.newest[url] = max(step, self.newest.get(url, -1))
        self.counts["answers"] += 1
        time.sleep(0.002)
        return port, step

    def wait_for_step(self, step: int) -> float:
        """Wait until the current server has answered with this step or a later one; return the seconds it took."""
        began = time.monotonic()
        while self.newest.get(self.url, -1) < step:
            seconds = time.monotonic() - began
            assert seconds < CATCH_UP_SECONDS, (step, self.newest.get(self.url), self.faults[:3])
            time.sleep(0.01)
        return time.monotonic() - began

    def close(self) -> None:
        self.stop.set()
        self.thread.join()


class KilledServer:
    """A server that is started again after each kill, and must then catch up with the publication."""

    def __init__(self, words: list, publication: Path, asker: Asker) -> None:
        self.words, self.publication, self.asker = words, publication, asker
        self.server: Server | None = None
        self.num_kills = self.num_worker_kills = 0
        self.longest_catch_up = 0.0
        self.errors = ""
        """Output on standard error of the killed servers and their workers."""

    def ensure_running(self) -> None:
        if self.server is None:
            current = deltas.read_current(self.publication)
            self.server = Server(*self.words, "--poll", "0.05")
            self.asker.url = self.server.url
            seconds = self.asker.wait_for_step(-1 if current is None else current.step)
            self.longest_catch_up = max(self.longest_catch_up, seconds)

    def list_workers(self) -> list[int]:
        assert self.server is not None
        pid = self.server.process.pid
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def kill(self) -> None:
        """Kill the server; its workers, which have lost their parent, must end."""
        assert self.server is not None
        workers = self.list_workers()
        server, self.server, self.num_kills = self.server, None, self.num_kills + 1
        server.stop(signal.SIGKILL)
        deadline = time.monotonic() + CATCH_UP_SECONDS
        while any(is_alive(pid) for pid in workers):
            assert time.monotonic() < deadline, f"workers {workers} outlive their server"
            time.sleep(0.02)
        self.errors += server.errors

    def kill_worker(self, rng: random.Random) -> None:
        """Kill one worker process, which the server starts again."""
        if workers := self.list_workers():
            os.kill(rng.choice(workers), signal.SIGKILL)
            self.num_worker_kills += 1


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that only waits for its parent to note its end does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def list_traces(folder: Path) -> set[str]:
    """Return the temporary folders of servers in `folder`, and all shared memory."""
    return {path.name for path in folder.glob("colonnade-*")} | set(os.listdir("/dev/shm"))


def age_folders(folder: Path) -> None:
    """Date folders back by an hour: a server removes those that dead ones left a while ago."""
    then = time.time() - 3600
    for path in folder.glob("colonnade-*"):
        os.utime(path, (then, then))


def check_answers(folder: Path, batches: list, asker: Asker) -> int:
    """Compare all answers with the checkpoints that they name, by their bits; return the number of checkpoints."""
    steps = sorted({step for step, _ in asker.scores})
    assert set(steps) <= set(list_checkpoints(folder / "run"))
    assert asker.runs == {read_header(folder / "run", steps[0])["run"]}
    for step in steps:
        with Predictor.open(folder / "run", at=step) as predictor:
            for number, batch in enumerate(batches):
                wanted = np.ascontiguousarray(predictor(batch)[:, 0].numpy()).tobytes()
                assert asker.scores.get((step, number), {wanted}) == {wanted}, (step, number)
    return len(steps)


def kill_at_random(rng: random.Random, trainer: Trainer, server: KilledServer, seconds: float) -> None:  # fmt: skip
    """Kill and restart until so long has passed."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        trainer.ensure_running()
        if rng.random() < 0.8:
            trainer.wait_for_checkpoint()
        trainer.ensure_running()
        server.ensure_running()
        time.sleep(rng.uniform(0.0, 1.0))
        if rng.random() < 0.4:
            trainer.kill()
        if rng.random() < 0.25:
            server.kill()
        elif "--workers" in server.words and rng.random() < 0.3:
            server.kill_worker(rng)


@pytest.mark.slow  # the shortest takes a minute of processor time
@pytest.mark.parametrize("way", ["folder", "url", "workers"])
def test_each_answer_is_the_checkpoints_that_it_names(way, tmp_path, monkeypatch):
    """`way`: a server that follows a folder, a URL, or a folder with two workers."""
    state = tmp_path / "state"
    state.mkdir()
    monkeypatch.setenv("TMPDIR", str(state))
    traces = list_traces(state)
    live = tmp_path / "live"
    target = f"file://{live}" if way == "url" else str(live)
    words = [target, *(["--copy", tmp_path / "copy"] if way == "url" else ["--wait"])]
    num_workers = 2 if way == "workers" else 1
    words += ["--workers", num_workers] if way == "workers" else []
    rng = random.Random(f"{SEED} {way}")
    batches = [batch for size in (1, 16) for batch in served.samples(size)[:2]]
    trainer, asker = Trainer(tmp_path, target, rng), Asker(batches, num_workers)
    server = KilledServer(words, live, asker)
    try:
        kill_at_random(rng, trainer, server, SECONDS)
        trainer.kill()
        trainer.ensure_running()
        trainer.wait_for_checkpoint()
        trainer.kill()
        age_folders(state)
        if server.server is not None:
            server.kill()
        server.ensure_running()
        assert server.server is not None
        assert httpx.get(f"{server.server.url}/v2/health/ready").json()["problem"] is None
        assert server.server.stop() == 0, server.server.errors
        server.errors += server.server.errors
    finally:
        asker.close()
        trainer.kill()
        if server.server is not None:
            server.server.stop(signal.SIGKILL)
    assert "Traceback" not in server.errors and "Fatal" not in server.errors, server.errors
    assert asker.faults == []
    num_steps = check_answers(tmp_path, batches, asker)
    assert list_traces(state) <= traces
    print(
        f"{way}, seed {SEED}: {dict(asker.counts)}, of {num_steps} steps; kills: trainer {trainer.num_kills}, "
        f"publisher {trainer.count_deaths_in_publications()}, server {server.num_kills}, worker "
        f"{server.num_worker_kills}; starts of the trainer {trainer.num_starts}; slowest catch-up "
        f"{server.longest_catch_up:.2f} s"
    )
