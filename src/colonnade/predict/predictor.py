"""`Predictor`: an exported model, ready to score.

    predictor = Predictor.open("runs/mine")          # or a folder that `colonnade export` wrote
    probabilities = predictor(batch)                 # (B, T)
    predictor = Predictor.open("published")          # a folder that a run publishes to (train.publish)
    predictor.follow()                               # takes each checkpoint as it comes, between two batches

Legend: B samples, T tasks.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from colonnade.batch import Batch
from colonnade.checkpoint.fingerprint import dense_weights, load_dense
from colonnade.config.run import RunConfig, build_config
from colonnade.data.contract import Schema
from colonnade.embedding import EmbeddingCollection
from colonnade.errors import CheckpointError, ConfigError, CorruptionError, StorageError
from colonnade.models.build import build_model
from colonnade.ops.memory import keep_freed_memory
from colonnade.publish.delivery import (
    Following,
    Place,
    carry,
    distrust_copy,
    is_url,
    newest_base,
    place_of,
)
from colonnade.publish.deltas import WORD, Base
from colonnade.publish.export import exported
from colonnade.publish.exported import Export, check_lengths, read_dense, read_export
from colonnade.run.run import OWN
from colonnade.run.validation import find_collection
from colonnade.store.mapped import MappedRows, open_mapped
from colonnade.store.untrusted import folder_inside
from colonnade.train.objective import objective_of

AHEAD = 2
"""Batches read ahead of scoring."""
T = TypeVar("T")


class Predictor:
    """Scores batches: no training state, no graph; rows are mapped from files, which processes share.

    Gives the bits that `colonnade evaluate` scores of the same checkpoint, for the same batches. Any thread may call
    it;
    calls wait for one another. `model` is the network itself, for a retrieval model's queries and items.
    """

    def __init__(
        self,
        model: nn.Module,
        rows: MappedRows,
        *,
        schema: Schema | None,
        config: RunConfig | None,
        step: int,
        folder: Path,
        is_full: bool = False,
    ) -> None:
        self.model, self.rows = model, rows
        self.schema, self.config = schema, config
        self.step, self.folder = step, folder
        self.num_failures = 0
        """Of `follow`: how many looks at the publication failed, since the predictor was opened."""
        self._is_full = is_full
        self._failure: BaseException | None = None  # of the newest look
        self._torn: BaseException | None = None  # why rows and weights are of no one checkpoint
        self._following: Following | None = None
        self._lock = threading.Lock()  # of rows and weights
        self._turn = threading.Lock()  # of `refresh`
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        model: nn.Module | None = None,
        at: int | str | None = None,
        copy: str | Path | None = None,
        verify: Literal["lazy", "full"] = "lazy",
    ) -> Predictor:
        """Open an exported folder, or a run folder: its checkpoint (step `at`, "best", "last"; None: the best where a
        validation part chose one, else the last) is then exported first, once,
        to RUN/serving. Of a folder that a run publishes to, the newest checkpoint there. Of a URL that a run
        publishes to,
        the same: `copy` is a folder of this host that it is brought to, which other predictors may follow as it is.

        `model`: the network, not yet used, where it is your own; default: built from the run's configuration.
        `verify`: "full" reads every byte before anything is scored; "lazy" checks lengths, ids and dense weights now,
        rows at their first use and, in a thread, the others. Raises CheckpointError where there is no such checkpoint
        or it
        is another model's, CorruptionError for files that are not as they were written, StorageError for files that
        cannot be read.
        """
        if verify not in ("lazy", "full"):
            raise ConfigError(f"got verify={verify!r}, choose from 'lazy', 'full'")
        if not is_url(path):
            return cls._open(Path(path), None, model, at, verify == "full")
        if copy is None:
            raise ConfigError(
                f"{path} is a URL, and rows are mapped from files; say which folder it is brought to: "
                "Predictor.open(url, copy=folder)"
            )
        source, copy = place_of(path), Path(copy)
        carry(source, place_of(copy))
        try:
            return cls._open(copy, source, model, at, verify == "full")
        except CorruptionError:
            distrust_copy(copy)
            raise

    @classmethod
    def _open(
        cls,
        path: Path,
        source: Place | None,
        model: nn.Module | None,
        at: int | str | None,
        is_full: bool,
    ) -> Predictor:
        following = None
        if (path / WORD).exists():
            if at is not None:
                raise ConfigError(
                    f"{path} is a publication and holds the newest checkpoint; leave --at out"
                )
            folder, word = newest_base(path)
            following = Following(path, word.run, word.bases[-1], source)
        else:
            folder = exported(path, at=at)
        export = read_export(folder)
        check_lengths(folder, export)
        config = build_config(export.config) if export.config else None
        if model is None:
            model = _build(export, config, folder)
        keep_freed_memory()
        dense, rows = _load(folder, export, model, is_full)
        load_dense(model, dense)
        find_collection(model).serve(rows)
        model.eval().requires_grad_(False)
        opened = cls(
            model, rows, schema=export.schema, config=config, step=export.step, folder=folder,
            is_full=is_full,
        )  # fmt: skip
        if following is not None:
            opened._following = following
            opened.refresh()
        return opened

    @property
    def labels(self) -> tuple[str, ...]:
        """One per task."""
        return ("label",) if self.schema is None else self.schema.labels

    @property
    def problem(self) -> BaseException | None:
        """Why `follow` could not go on the last time it tried, or damage that was met in the background."""
        return self._failure or self.rows.problem

    @torch.inference_mode()
    def __call__(self, batch: Batch) -> Tensor:
        """Predict a batch: probabilities (B, T) float64, or what the model's own `objective.predict` returns.

        Raises IdRangeError, DataError for a batch that does not fit, CorruptionError, StorageError where a file of rows
        is damaged, ConfigError for a model that predicts nothing, such as one of retrieval."""
        objective = objective_of(self.model)
        predict = getattr(objective, "predict", None)
        if predict is None:
            raise ConfigError(
                f"{type(self.model).__name__}'s objective {type(objective).__name__} has no `predict`; give it "
                "predict(model, batch), or use predictor.model"
            )
        with self._lock:
            if self._torn is not None:
                raise StorageError(
                    f"{self.folder}: got a checkpoint that was taken in part only ({self._torn}), so nothing "
                    f"is scored; "
                    "it is taken again, or open the predictor anew"
                )
            return predict(self.model, batch)

    def scores(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, Tensor]]:
        """Each batch and its probabilities, in order. Coming batches are read meanwhile, in a thread; close the
        iterator to stop early."""
        ahead = _ahead(batches)
        try:
            for batch in ahead:
                yield batch, self(batch)
        finally:
            ahead.close()

    def refresh(self) -> int:
        """Take what was published since: returns how many checkpoints further on the predictor is now, less than none
        where
        the publication began anew. Each is taken whole, rows and dense weights, between two batches, in order, once.

        Raises ConfigError where the predictor was not opened on a publication; StorageError, CorruptionError,
        CheckpointError naming what is torn, missing or another model's. The predictor then stays at the last checkpoint
        that was whole.
        """
        following = self._following
        if following is None:
            raise ConfigError(
                f"{self.folder} is no publication, so nothing follows; open the folder of train.publish"
            )
        with self._turn:
            began = following.number
            if self.rows.problem is not None and (following.source or self.rows.is_replaced):
                following.distrust()
            try:
                base, word = following.behind()
                while following.tag != word.tag:
                    if base is None:
                        self._take(following)
                    else:
                        self._open_base(following, base)
                    base, word = following.behind()
            except CorruptionError:
                if following.source is not None:
                    distrust_copy(following.folder)
                raise
            return following.number - began

    def follow(self, seconds: float = 1.0) -> None:
        """Refresh every so many seconds from now on, in a thread, until `close`. Whatever goes wrong is `problem`, is
        counted in `num_failures`, and is tried again."""
        if self._following is None or self._thread is not None:
            self.refresh()  # says why, or goes on following as before
            return
        self._thread = threading.Thread(
            target=self._follow, args=(seconds,), name="follow", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Unmap the rows, once the call under way has ended. Any use afterwards is a ConfigError."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            self.rows.close()

    def _follow(self, seconds: float) -> None:
        while not self._stop.wait(seconds):
            try:
                self.refresh()
                self._failure = None
            except (
                BaseException
            ) as error:  # whatever it is: nobody else would start this thread again
                self._failure = error
                self.num_failures += 1

    def _take(self, following: Following) -> None:
        change = following.next_change(
            find_collection(self.model).tables, dense_weights(self.model)
        )
        with self._lock, torch.inference_mode():
            try:
                for t, each in enumerate(change.tables):
                    self.rows.change(t, each.ids, each.weights, each.gone)
                load_dense(self.model, change.dense)
            except BaseException as error:
                self._torn = error
                raise
            self.step, self._torn = change.header.step, None
        following.applied(change)

    def _open_base(self, following: Following, base: Base) -> None:
        folder = folder_inside(following.folder, base.folder)
        export = read_export(folder)
        check_lengths(folder, export)
        # While others predict.
        dense, rows = _load(folder, export, self.model, self._is_full, self.rows)
        with self._lock:
            load_dense(self.model, dense)
            self.rows.become(rows)
            self.step, self.folder, self._torn = export.step, folder, None
        following.opened(base)

    def __enter__(self) -> Predictor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _ahead(items: Iterable[T]) -> Any:
    """The same items, some of them made ready in a thread. What it raises is raised here, in its place."""
    waiting: queue.Queue[tuple[str, Any]] = queue.Queue(AHEAD)
    stop = threading.Event()

    def put(kind: str, item: Any) -> None:
        while not stop.is_set():
            try:
                waiting.put((kind, item), timeout=0.1)
                return
            except queue.Full:
                continue

    def work() -> None:
        try:
            for item in items:
                put("item", item)
                if stop.is_set():
                    return
            put("end", None)
        except BaseException as error:
            put("error", error)

    thread = threading.Thread(target=work, name="read ahead", daemon=True)
    thread.start()
    try:
        while True:
            kind, item = waiting.get()
            if kind == "end":
                return
            if kind == "error":
                raise item
            yield item
    finally:
        stop.set()
        thread.join()


def _build(export: Export, config: RunConfig | None, folder: Path) -> nn.Module:
    """Build the network, once its shapes on no device fit the files. Raises CheckpointError where they do not, or the
    export does not say how."""
    if config is None or config.data.name == OWN:
        raise CheckpointError(
            f"{folder} does not say how its network is built, since it was not trained by `colonnade train`; "
            "give the network: Predictor.open(path, model=...)"
        )
    with torch.device("meta"):
        shapes = build_model(export.schema, config)
    _check(find_collection(shapes), export, folder)
    _check_dense(shapes, read_dense(folder, export), folder)
    return build_model(export.schema, config)


def _load(
    folder: Path, export: Export, model: nn.Module, is_full: bool, known: MappedRows | None = None
) -> tuple[dict[str, Tensor], MappedRows]:
    """Read the dense weights and map the rows of an export of this network. Raises CheckpointError for another
    network's, CorruptionError, StorageError."""
    collection = find_collection(model)
    _check(collection, export, folder)
    dense = read_dense(folder, export)
    _check_dense(model, dense, folder)
    files, seed = export.row_files, collection.seed
    rows = open_mapped(collection.tables, folder, files, seed=seed, full=is_full, known=known)
    rows.scrub()
    return dense, rows


def _check(collection: EmbeddingCollection, export: Export, folder: Path) -> None:
    wanted = [(t.name, t.width, t.rows, t.dtype) for t in collection.tables]
    got = [(t.name, t.dim, t.rows, t.dtype) for t in export.tables]
    if got != wanted:
        first = next((pair for pair in zip(got, wanted, strict=False) if pair[0] != pair[1]), None)
        detail = f"{len(got)} tables, {len(wanted)} in this network"
        if first:
            detail = f"table (name, width, rows, dtype) {first[0]}, {first[1]} in this network"
        raise CheckpointError(
            f"{folder} was exported from another model: {detail}. Give the network it was trained as"
        )


def _check_dense(model: nn.Module, weights: dict[str, Tensor], folder: Path) -> None:
    mine = dense_weights(model)
    for name in [*mine, *weights]:
        got = tuple(weights[name].shape) if name in weights else None
        wanted = tuple(mine[name].shape) if name in mine else None
        if got != wanted:
            raise CheckpointError(
                f"{folder}: got dense weights {name} of shape {got}, this network has {wanted}; give the network it "
                "was trained as"
            )
