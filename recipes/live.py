"""A model's whole life on a laptop: clicks are trained as they come, published every 5 seconds, served, and clicked on.

    python recipes/live.py [--seconds 120]

Simulated users ask the server to score all items, look at the best ones and click on what they like. Their clicks train
the model, and are sent back to the server, which computes the AUC of its scores. What users like drifts. One visit in
five shows random items instead, so the gain is measured beside them. Open the printed address to watch the server.
Ctrl-C ends everything, and nothing stays behind.
"""

import argparse
import http.client
import json
import math
import queue
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import colonnade
import torch
from colonnade import Batch, Ids
from colonnade.data import Column, Schema, open_batches
from colonnade.models import FactorizationMachine

USERS, ITEMS, SHOWN = 100, 100, 5
VISITS_PER_SECOND, RANDOM_SHARE, BATCH = 50, 0.2, 64
PUBLISH_SECONDS, REPORT_SECONDS = 5, 5
DRIFT_SECONDS = 600  # in which the fastest item turns once around
SCHEMA = Schema((), (Column("user", USERS), Column("item", ITEMS)), labels=("click",))
Click = tuple[int, int, float]  # user, item, 1 or 0


def build_network() -> FactorizationMachine:
    """Build the network. The trainer calls this, and the server (`--network`)."""
    adagrad = colonnade.Adagrad(lr=0.5)
    tables = [
        colonnade.Table(column.name, {"deep": 8, "wide": 1}, rows=column.cardinality, optimizer=adagrad)
        for column in SCHEMA.categorical
    ]  # fmt: skip
    features = [colonnade.Feature(table.name, table.name) for table in tables]
    return FactorizationMachine(tables, features, num_dense=0, bags=())


class Users(threading.Thread):
    """Users who visit one after another. `clicks` gets what they did with each item they saw, and None at the end.

    Users and items are angles, and a user likes items near its own. Items turn, each at its own speed.
    """

    def __init__(self, address: str, seconds: float) -> None:
        super().__init__(name="users")
        self.server, self.seconds = http.client.HTTPConnection(address, timeout=30), seconds
        self.clicks: queue.SimpleQueue[Click | None] = queue.SimpleQueue()
        self.stop = threading.Event()
        self.error: Exception | None = None
        self.draw = draw = random.Random(0)
        self.users = [draw.uniform(0, math.tau) for _ in range(USERS)]
        self.items = [draw.uniform(0, math.tau) for _ in range(ITEMS)]
        self.speeds = [draw.uniform(-1, 1) * math.tau / DRIFT_SECONDS for _ in range(ITEMS)]
        self.seen: dict[str, list[float]] = {"recommended": [], "random": []}

    def run(self) -> None:
        """Visit until the time is over, or `stop`."""
        began, visits, reports, seconds = time.monotonic(), 0, 1, 0.0
        try:
            while seconds < self.seconds:
                if self.stop.wait(visits / VISITS_PER_SECOND - seconds):
                    return
                self.visit(seconds)
                visits, seconds = visits + 1, time.monotonic() - began
                if seconds >= reports * REPORT_SECONDS:
                    self.report(seconds)
                    reports += 1
        except Exception as error:
            self.error = error
        finally:
            self.clicks.put(None)

    def visit(self, seconds: float) -> None:
        """Let a user see some items and click on some: the best ones by their scores, or random ones."""
        user, candidates = self.draw.randrange(USERS), list(range(ITEMS))
        is_random = self.draw.random() < RANDOM_SHARE
        if is_random:
            candidates = self.draw.sample(candidates, SHOWN)
        records = [{"item": item} for item in candidates]
        answer = self.send("POST", "/score", {"user": {"user": user}, "candidates": records})
        if answer is None:  # nothing is published yet
            is_random, shown = True, self.draw.sample(candidates, SHOWN)
        else:
            scores = dict(zip(candidates, answer["scores"], strict=True))
            shown = sorted(candidates, key=scores.__getitem__, reverse=True)[:SHOWN]
        rates = [self.compute_click_rate(user, item, seconds) for item in shown]
        labels = [float(self.draw.random() < rate) for rate in rates]
        for item, label in zip(shown, labels, strict=True):
            self.clicks.put((user, item, label))
        self.seen["random" if is_random else "recommended"] += labels
        if answer is not None:
            pairs = {"scores": [scores[item] for item in shown], "labels": labels}
            self.send("POST", "/feedback", pairs)

    def compute_click_rate(self, user: int, item: int, seconds: float) -> float:
        """Compute the probability of a click: up to 0.62, and 0.2 on average."""
        angle = self.users[user] - self.items[item] - self.speeds[item] * seconds
        return 1 / (1 + math.exp(2.5 - 3 * math.cos(angle)))

    def send(self, method: str, path: str, fields: Any = None) -> Any:
        """Send a request and return the answer; None: the server has no model yet. Raises RuntimeError, OSError."""
        self.server.request(method, path, None if fields is None else json.dumps(fields))
        response = self.server.getresponse()
        answer = json.loads(response.read())
        if response.status not in (200, 503):
            raise RuntimeError(f"{path}: {answer['error']}")
        return answer if response.status == 200 else None

    def report(self, seconds: float) -> None:
        """Print what is served, and how often users clicked since the last line."""
        status = self.send("GET", "/status")
        step, auc = status["step"], status["feedback"]["auc"]
        age = None if step is None else status["age_seconds"]
        rates = [sum(labels) / len(labels) if labels else None for labels in self.seen.values()]
        cells = [format_number(*cell) for cell in ((seconds, 0), (step, 0), (age, 1), (auc, 3))]
        cells += [format_number(rate, 3) for rate in rates]
        print("".join(f"{cell:>13}" for cell in cells), flush=True)
        self.seen = {name: [] for name in self.seen}


def format_number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def read_batches(clicks: queue.SimpleQueue[Click | None]) -> Iterator[Batch]:
    """Yield batches of clicks as they come, until None."""
    rows: list[Click] = []
    for click in iter(clicks.get, None):
        rows.append(click)
        if len(rows) == BATCH:
            user, item, label = (torch.tensor(column) for column in zip(*rows, strict=True))
            ids = {"user": Ids(user), "item": Ids(item)}
            yield Batch(BATCH, torch.empty(BATCH, 0), ids, label=label[:, None])
            rows = []


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Start a server of the folder's publication, and yield its address. It ends with the context."""
    options = "--name clicks --wait --state state --port 0 --threads 1"
    network = f"{Path(__file__).resolve()}:build_network"
    with subprocess.Popen(
        [sys.executable, "-m", "colonnade", "serve", "published", *options.split(), "--network", network],
        cwd=folder, stdout=subprocess.PIPE, text=True,
        start_new_session=True,  # Ctrl-C ends the users first
    ) as server:  # fmt: skip
        try:
            address = re.search(r"http://(\S+)", server.stdout.readline() if server.stdout else "")
            if address is None:
                raise RuntimeError("got no address of the server, wanted one; its message is above")
            yield address[1]
        finally:
            server.terminate()
            server.wait()


def live(folder: Path, seconds: float) -> None:
    """Serve, train and let users click for some seconds, or until Ctrl-C."""
    with serve(folder) as address:
        print(f"watch http://{address}/")
        print(f"clicks per item shown, in the last {REPORT_SECONDS} seconds:")
        names = ("seconds", "step served", "age", "AUC", "recommended", "random")
        print("".join(f"{name:>13}" for name in names), flush=True)
        users = Users(address, seconds)
        data = open_batches(lambda epoch: read_batches(users.clicks), SCHEMA, name="clicks")
        users.start()
        try:
            colonnade.fit(
                build_network(), data, run=folder / "run", batch_size=BATCH, epochs=1, quiet=True,
                publish=str(folder / "published"), checkpoint_seconds=PUBLISH_SECONDS,
            )  # fmt: skip
        finally:
            users.stop.set()
            users.join()
        if users.error is not None:
            raise users.error


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train, publish, serve and click at once.")
    parser.add_argument("--seconds", type=float, default=120.0, help="default 120")
    seconds = parser.parse_args().seconds
    with suppress(KeyboardInterrupt), tempfile.TemporaryDirectory(prefix="colonnade-") as folder:
        live(Path(folder), seconds)
