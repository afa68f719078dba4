"""Versions of a served model: the newest checkpoint, which follows a publication, and older steps on request.

Each answer names the step that scored it: a `Predictor` returns both under one lock. Rows of open versions stay mapped
when the publication deletes their files.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from colonnade.batch import Batch
from colonnade.errors import (
    CheckpointError,
    ColonnadeError,
    ConfigError,
    NonFiniteError,
    StorageError,
)
from colonnade.models.link_prediction import KnowledgeGraph
from colonnade.models.retriever import Retriever
from colonnade.predict import Predictor
from colonnade.publish.delivery import is_url, list_published_steps
from colonnade.publish.deltas import CURRENT, read_current
from colonnade.publish.model_files import MODEL
from colonnade.serve.control import ControlFolder, ServeOrder
from colonnade.serve.recommend import Recommendations, Recommender
from colonnade.train.objective import check_scores_samples

if TYPE_CHECKING:
    from colonnade.serve.options import ServeOptions
    from colonnade.serve.records import Record

NETWORK_MODULE = "colonnade_network"
"""Name of the module of a file with a network, so that its `if __name__ == "__main__"` does not run."""
NO_ITEMS = "got /recommend for a model that scores candidates, or one of --network; use /score"


class NotReady(Exception):
    """Model that cannot score now: no checkpoint is loaded yet, or its rows are damaged."""


@dataclass(frozen=True, slots=True)
class Scored:
    """Scores (N, T) of a batch, with the step and the run of the checkpoint that computed them."""

    scores: Tensor
    step: int
    run: str


def check_finite_scores(scores: Tensor, step: int, model: str) -> None:
    """Raise NonFiniteError that names the model and the step if a score is NaN or inf."""
    if not bool(scores.isfinite().all()):
        raise NonFiniteError(
            f"model {model!r}, step {step}: got a score that is NaN or inf, wanted finite ones; send numbers as the "
            "training data has them, or roll back to an older step"
        )


@dataclass(slots=True)
class OpenVersion:
    """Open older step. It is closed when nobody uses it any more."""

    predictor: Predictor
    recommender: Recommender | None = None
    """Recommender of a retrieval model."""
    last_use: int = 0
    num_users: int = 0
    is_evicted: bool = False

    @property
    def num_bytes(self) -> int:
        """Memory of this process that its rows take."""
        return self.predictor.rows.newer_bytes


def choose_evictions(
    uses_and_bytes: dict[int, tuple[int, int]],
    retained_steps: Sequence[int],
    max_versions: int,
    max_bytes: int,
) -> list[int]:
    """Return the steps to close, least recently used first, until the others are within both limits.

    uses_and_bytes: (time of the last use, bytes) by step. retained_steps: steps that are never closed; their bytes
    count.
    """
    candidates = sorted(
        (use, step) for step, (use, _) in uses_and_bytes.items() if step not in retained_steps
    )
    total = sum(num_bytes for _, num_bytes in uses_and_bytes.values())
    evicted: list[int] = []
    for _, step in candidates:
        if len(candidates) - len(evicted) <= max_versions and total <= max_bytes:
            break
        evicted.append(step)
        total -= uses_and_bytes[step][1]
    return evicted


def estimate_age(
    file_age_seconds: float, now_seconds: float, is_current_since: float | None
) -> float:
    """Return the seconds since a checkpoint was published, when it has just been loaded.

    file_age_seconds: the time of day less the file's, which is wrong after a jump of a clock. is_current_since: an
    earlier time, of the same clock as `now_seconds`, at which the checkpoint was not published yet; None: unknown.
    """
    longest = float("inf") if is_current_since is None else now_seconds - is_current_since
    return min(max(file_age_seconds, 0.0), longest)


class ServedModel:
    """Model of a server in one process. Any thread may call it."""

    def __init__(
        self,
        options: ServeOptions,
        *,
        report: Callable[[str, dict[str, Any]], None] = lambda event, fields: None,
        on_poll: Callable[[ServedModel], None] = lambda model: None,
    ) -> None:
        """report: gets events (a new step, a problem) with their fields. on_poll: called after each look for news."""
        self.options = options
        self.control = ControlFolder(Path(options.state_folder))
        self.num_failures = 0
        self._report = report
        self._on_poll = on_poll
        self._newest: Predictor | None = None
        self._recommender: Recommender | None = None
        """Recommender of the newest checkpoint. It owns that checkpoint's predictor."""
        self._problem: str | None = "no checkpoint is loaded yet"
        self._loaded_at = time.monotonic()
        self._age_when_loaded = 0.0
        self._is_current_since: float | None = None
        """Last look that found nothing newer, by `time.monotonic`."""
        self._versions: dict[int, OpenVersion] = {}
        self._num_uses = 0
        self._build_network: Callable[[], nn.Module | None] = lambda: None
        self._lock = threading.Lock()  # protects the open versions
        self._open_lock = threading.Lock()  # one version is opened at a time
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def publication(self) -> Path:
        """Folder that publishes on this host."""
        return Path(self.options.copy or self.options.path)

    @property
    def is_publication(self) -> bool:
        """True if newer checkpoints may come."""
        if is_url(self.options.path) or (self.publication / CURRENT).exists():
            return True
        # An empty folder, or none yet: a run will publish there.
        return not (
            (self.publication / MODEL).exists() or (self.publication / "checkpoints").exists()
        )

    def start(self) -> None:
        """Open the model, and follow it in a thread if it is a publication.

        A publication that is empty or damaged is tried again at each poll; anything else raises ColonnadeError.
        """
        if self.options.network is not None:
            self._build_network = load_network_builder(self.options.network)
        if not self.is_publication:
            self._open_newest()
        else:
            try:
                self._look_for_news()
            except (StorageError, CheckpointError) as error:
                self._note_problem(error)
        self._on_poll(self)
        self._thread = threading.Thread(target=self._follow, name="follow", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop following and unmap all rows after the current calls have ended."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            versions = list(self._versions.values())
            self._versions = {}
        for version in versions:
            version.predictor.close()
        if self._recommender is not None:
            self._recommender.close()
        if self._newest is not None:
            self._newest.close()

    def recommend(self, users: Sequence[Record], k: int, **options: Any) -> Recommendations:
        """Recommend items with the newest step, or with that of a rollback, as `Recommender.recommend`.

        Raises NotReady, ConfigError for a model that scores, and as `Recommender.recommend`.
        """
        wanted = self.control.read().serve_step
        recommender = self.get_recommender() if wanted is None else self._recommender
        if recommender is not None and wanted in (None, recommender.step):
            best = recommender.recommend(users, k, **options)
            if wanted is None or wanted == best.step:
                return best
        assert wanted is not None
        with self._borrow_version(wanted) as version:
            if version.recommender is None:
                raise ConfigError(NO_ITEMS)
            return version.recommender.recommend(users, k, **options)

    def get_recommender(self) -> Recommender:
        """Return the recommender of the newest checkpoint. Raises NotReady, ConfigError for a model that scores."""
        self.get_newest()
        if self._recommender is None:
            raise ConfigError(NO_ITEMS)
        return self._recommender

    def score(self, batch: Batch, step: int | None = None) -> Scored:
        """Score a batch with a step; None: with the newest one, or with that of a rollback.

        Raises NotReady, CheckpointError for a step that is not published any more, and as `Predictor`.
        """
        wanted = self.control.read().serve_step if step is None else step
        newest = self.get_newest() if wanted is None else self._newest
        if newest is not None and (wanted is None or wanted == newest.step):
            scores, scored_step = newest.predict_with_step(batch)
            if wanted is None or wanted == scored_step:
                return Scored(scores, scored_step, newest.run)
        assert wanted is not None
        with self.borrow(wanted) as predictor:
            scores, scored_step = predictor.predict_with_step(batch)
            return Scored(scores, scored_step, predictor.run)

    def get_newest(self) -> Predictor:
        """Return the predictor of the newest checkpoint. Raises NotReady."""
        newest = self._newest
        if newest is None:
            raise NotReady(f"the model is not ready: {self._problem}; try again later")
        return newest

    def get_any(self) -> Predictor:
        """Return a predictor, for what all steps have in common: schema, configuration, run. Raises NotReady."""
        with self._lock:
            others = [version.predictor for version in self._versions.values()]
        return self._newest or next(iter(others), None) or self.get_newest()

    def has_open(self, step: int | None) -> bool:
        """Return whether a request for this step needs to open nothing."""
        newest = self._newest
        wanted = self.control.read().serve_step if step is None else step
        is_newest = newest is not None and wanted == newest.step
        return wanted is None or is_newest or wanted in self._versions

    def open_version(self, step: int | None) -> None:
        """Open a step, so that the next request for it does not wait. Raises as `score`."""
        wanted = self.control.read().serve_step if step is None else step
        if wanted is not None and not self.has_open(wanted):
            with self.borrow(wanted):
                pass

    @contextmanager
    def borrow(self, step: int) -> Iterator[Predictor]:
        """Yield the predictor of an older step, opened if it is not open, and close it later if it was evicted."""
        with self._borrow_version(step) as version:
            yield version.predictor

    @contextmanager
    def _borrow_version(self, step: int) -> Iterator[OpenVersion]:
        with self._lock:
            version = self._count_version_use(step)
        if version is None:
            version = self._open(step)
        try:
            yield version
        finally:
            with self._lock:
                version.num_users -= 1
                is_last = version.is_evicted and version.num_users == 0
            if is_last:
                version.predictor.close()

    def list_steps(self) -> list[int]:
        """Return the steps that can be asked for, ascending."""
        newest = self._newest
        steps = set(self._versions) | set(self.control.read().pins)
        if newest is not None:
            steps.add(newest.step)
        if self.is_publication:
            with suppress(ColonnadeError, OSError):
                current = read_current(self.publication)
                steps |= (
                    set()
                    if current is None
                    else set(list_published_steps(self.publication, current))
                )
        return sorted(steps)

    def roll_back(self, step: int | None) -> int:
        """Serve an older step in all workers until `follow`, and pin it; None: the step before. Return the step."""
        if step is None:
            served = self.step
            earlier = [s for s in self.list_steps() if served is not None and s < served]
            if not earlier:
                raise CheckpointError(
                    f"got no step before {served}, wanted one of {self.list_steps()}"
                )
            step = earlier[-1]
        self.pin(step)
        self.control.serve(step)
        return step

    def follow(self) -> None:
        """Serve the newest checkpoint in all workers again."""
        self.control.serve(None)

    def pin(self, step: int) -> None:
        """Keep a step open and its files on disk. Raises ConfigError, CheckpointError, as `ControlFolder.pin`."""
        if not self.is_publication:
            raise ConfigError(
                f"{self.options.path} is no publication and has one step only; there is nothing to pin"
            )
        self.control.pin(self.publication, step, self.options.max_pins)
        self.open_version(step)

    def unpin(self, step: int) -> None:
        """Forget a pinned step. Raises as `ControlFolder.unpin`."""
        self.control.unpin(step)
        self._evict()

    @property
    def step(self) -> int | None:
        """Step that is served to requests that name none; None: nothing is loaded."""
        newest = self._newest
        order = self.control.read()
        if order.serve_step is not None:
            return order.serve_step
        return None if newest is None else newest.step

    @property
    def run(self) -> str:
        """Run that trained the model; "" before anything is loaded."""
        with suppress(NotReady):
            return self.get_any().run
        return ""

    @property
    def row_counts(self) -> tuple[int, int]:
        """Rows of the newest step that were read from memory, and from files; 0 without `row_memory`."""
        newest = self._newest
        cache = None if newest is None else newest.rows.cache
        return (0, 0) if cache is None else cache.counts[:2]

    @property
    def num_open_versions(self) -> int:
        """Number of open older steps."""
        return len(self._versions)

    @property
    def problem(self) -> str | None:
        """Description of what is wrong with the publication or with the served rows; None: nothing."""
        served = self._find_default_predictor()
        if served is not None and served.rows.problem is not None:
            return str(served.rows.problem)
        if served is not None and not self.is_publication and served.rows.is_replaced:
            return (
                f"{served.folder}: its files were replaced or written to while they were served; the model that was "
                "opened is served on. Start the server again to serve the new one"
            )
        return self._problem

    @property
    def is_ready(self) -> bool:
        """True if the served checkpoint is loaded and whole: a damaged publication leaves the last good one."""
        served = self._find_default_predictor()
        return served is not None and served.rows.problem is None

    @property
    def age_seconds(self) -> float:
        """Seconds since the newest loaded checkpoint was published.

        They are counted by a clock that never jumps. Only the age of the checkpoint at start is the file's, by the time
        of day."""
        return self._age_when_loaded + time.monotonic() - self._loaded_at

    def _find_default_predictor(self) -> Predictor | None:
        """Return the predictor that requests get which name no step; None: it is not open."""
        newest = self._newest
        wanted = self.control.read().serve_step
        if wanted is None or (newest is not None and wanted == newest.step):
            return newest
        version = self._versions.get(wanted)
        return None if version is None else version.predictor

    def _count_version_use(self, step: int) -> OpenVersion | None:
        """Count a use of an open step. Call it with the lock held."""
        version = self._versions.get(step)
        if version is not None:
            self._num_uses += 1
            version.last_use = self._num_uses
            version.num_users = version.num_users + 1
        return version

    def _open(self, step: int) -> OpenVersion:
        with self._open_lock:
            with self._lock:
                version = self._count_version_use(step)
            if version is not None:
                return version
            if not self.is_publication:
                raise CheckpointError(
                    f"got version {step}, wanted {self.step}, the one of the export {self.options.path}; to serve "
                    "other versions, serve a publication folder"
                )
            predictor = self._open_predictor(step)
            newer_bytes = predictor.rows.newer_bytes
            if newer_bytes > self.options.max_version_bytes:
                predictor.close()
                raise ConfigError(
                    f"version {step}: got {newer_bytes:,} bytes of rows newer than its base, wanted at most "
                    f"{self.options.max_version_bytes:,}; raise --version-memory"
                )
            recommender = self._build_recommender(predictor)
            with self._lock:
                self._versions[step] = OpenVersion(predictor, recommender)
                version = self._count_version_use(step)
            assert version is not None
            self._report("version", {"step": step, "bytes": newer_bytes})
            self._evict()
            return version

    def _open_predictor(self, step: int) -> Predictor:
        """Open an older step by its pinned files, or by those of the publication."""
        folder = self.control.pin_folder(step)
        if (folder / CURRENT).exists():
            try:
                return Predictor.open(folder, at=step, model=self._build_network())
            except (StorageError, CheckpointError):
                if (folder / CURRENT).exists():  # else it was unpinned meanwhile
                    raise
        return Predictor.open(self.publication, at=step, model=self._build_network())

    def _evict(self) -> None:
        """Close older steps beyond the limits, those in use when their last user is done."""
        order = self.control.read()
        retained = [*order.pins, *([] if order.serve_step is None else [order.serve_step])]
        idle: list[OpenVersion] = []
        with self._lock:
            sizes = {s: (v.last_use, v.num_bytes) for s, v in self._versions.items()}
            limits = (self.options.max_versions, self.options.max_version_bytes)
            for step in choose_evictions(sizes, retained, *limits):
                version = self._versions.pop(step)
                version.is_evicted = True
                if not version.num_users:
                    idle.append(version)
        for version in idle:
            version.predictor.close()

    def _follow(self) -> None:
        """Look for newer checkpoints until `close`. No failure ends the thread."""
        order = ServeOrder()
        while not self._stop.wait(self.options.poll_seconds):
            try:
                if (newer_order := self.control.read()) != order:
                    order = newer_order
                    self._take_order(order)
                predictors = [version.predictor for version in [*self._versions.values()]]
                for predictor in filter(None, [*predictors, self._newest]):
                    predictor.rows.check_files()
                if self.is_publication:
                    self._look_for_news()
                self._on_poll(self)
            except BaseException as error:  # any error: nothing else would restart this thread
                self._note_problem(error)
                with suppress(Exception):
                    self._on_poll(self)

    def _take_order(self, order: ServeOrder) -> None:
        """Open pinned steps and close those that are not pinned any more."""
        self._report("order", {"serve_step": order.serve_step, "pins": list(order.pins)})
        for step in order.pins:
            self.open_version(step)
        self._evict()

    def _look_for_news(self) -> None:
        """Open the publication, or load what it has published since. Raises what `Predictor` raises."""
        began = time.monotonic()
        if self._newest is None:
            self._open_newest()
        elif self._load_newer():
            self._note_step()
        self._is_current_since = began
        self._problem = None

    def _load_newer(self) -> bool:
        """Load the checkpoints published since, and return whether there were any."""
        if self._recommender is None:
            return bool(self.get_newest().refresh())
        is_newer = self._recommender.refresh()
        self._newest = self._recommender.predictor
        return is_newer

    def _open_newest(self) -> None:
        options = self.options
        if (
            not is_url(options.path)
            and self.is_publication
            and not (self.publication / CURRENT).exists()
        ):
            self._is_current_since = time.monotonic()
            raise CheckpointError(f"{options.path} has no checkpoint yet; waiting for one")
        copy = options.copy if is_url(options.path) else None
        predictor = Predictor.open(
            options.path,
            at=options.at,
            copy=copy,
            model=self._build_network(),
            row_memory=options.row_memory_bytes,
        )
        self._recommender = self._build_recommender(predictor)
        self._newest = predictor
        self._problem = None
        self._note_step()

    def _build_recommender(self, predictor: Predictor) -> Recommender | None:
        """Build the recommender of a checkpoint; None for one that scores, or of `--network`. All have one catalogue.

        Raises ConfigError, and then closes the predictor."""
        if isinstance(predictor.model, KnowledgeGraph) and self.options.network is None:
            predictor.close()
            raise ConfigError(
                f"{self.options.path}: got a {type(predictor.model).__name__}, wanted a model that scores records or "
                "recommends items; ask a knowledge graph model by name with colonnade.rank_answers in Python"
            )
        items: Any = None
        try:
            if not isinstance(predictor.model, Retriever) or self.options.network is not None:
                check_scores_samples(predictor.model)
                return None
            if self._recommender is not None:
                items = self._recommender.catalogue
            elif self.options.items_file is not None:
                items = json.loads(Path(self.options.items_file).read_text(encoding="utf-8"))
            return Recommender.from_predictor(predictor, items=items)
        except BaseException:
            predictor.close()
            raise

    def _note_step(self) -> None:
        newest = self.get_newest()
        now = time.monotonic()
        path = self.publication / CURRENT if self.is_publication else newest.folder / MODEL
        file_age = 0.0
        with suppress(OSError):
            file_age = time.time() - os.stat(path).st_mtime
        self._age_when_loaded = estimate_age(file_age, now, self._is_current_since)
        self._loaded_at = now
        self._report("step", {"step": newest.step, "age_seconds": round(self._age_when_loaded, 3)})

    def _note_problem(self, error: BaseException) -> None:
        text = str(error) or type(error).__name__
        self.num_failures += 1
        if text != self._problem:
            self._report("problem", {"problem": text})
        self._problem = text


def load_network_builder(text: str) -> Callable[[], nn.Module]:
    """Load the function that FILE.py:FUNCTION names. Runs the file. Raises ConfigError.

    The function takes no arguments and returns a new network at each call.
    """
    file, colon, name = text.rpartition(":")
    path = Path(file)
    if not colon or not name.isidentifier() or not path.is_file():
        raise ConfigError(
            f"--network: got {text!r}, wanted FILE.py:FUNCTION, a file and the function in it that builds the network"
        )
    spec = importlib.util.spec_from_file_location(NETWORK_MODULE, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"--network: got {file!r}, wanted a file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[NETWORK_MODULE] = module
    sys.path.insert(0, str(path.resolve().parent))  # as for a script, which imports files beside it
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"--network: {file} ended with {type(error).__name__}: {error}; give a file that can be imported"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(
            f"--network: {file} has no function {name!r}; give the one that builds the network"
        )

    def build_network() -> nn.Module:
        try:
            network = function()
        except Exception as error:
            raise ConfigError(
                f"--network: {name}() of {file} ended with {type(error).__name__}: {error}; give a function without "
                "arguments that builds the network"
            ) from error
        if not isinstance(network, nn.Module):
            raise ConfigError(
                f"--network: {name} returned a {type(network).__name__}, wanted the nn.Module that was trained"
            )
        return network

    return build_network
