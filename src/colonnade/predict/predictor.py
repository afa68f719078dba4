"""`Predictor`: an exported model, ready to score.

    predictor = Predictor.open("runs/mine")          # or a folder that `colonnade export` wrote
    probabilities = predictor(batch)                 # (B, T)
    predictor = Predictor.open("published")          # a folder that a run publishes to (train.publish)
    predictor.follow()                               # takes each commit as it comes, between two batches

Legend: B samples, T tasks.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from colonnade.batch import Batch
from colonnade.config import RunConfig, build_config
from colonnade.data import load_declaration, open_source
from colonnade.data.contract import Column, Schema
from colonnade.embedding import EmbeddingCollection
from colonnade.errors import CheckpointError, ColonnadeError, ConfigError
from colonnade.models.build import build_model
from colonnade.models.knowledge import KnowledgeGraph
from colonnade.models.retriever import Retriever
from colonnade.ops.memory import keep_freed_memory
from colonnade.predict.following import Following, newest_base
from colonnade.predict.serving import exported
from colonnade.store.mapped import MappedRows, open_mapped
from colonnade.train.carriage import carry, is_url, place_of
from colonnade.train.fingerprint import dense_weights, load_dense
from colonnade.train.publication import WORD, Base
from colonnade.train.run import OWN

FORMAT = "colonnade export"
AHEAD = 2
"""Batches read ahead of scoring."""
T = TypeVar("T")


class Predictor:
    """Scores batches: no training state, no graph; rows are mapped from files, which processes share.

    Gives the bits that `colonnade evaluate` scores of the same commit, for the same batches. Any thread may call it;
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
    ) -> None:
        self.model, self.rows = model, rows
        self.schema, self.config = schema, config
        self.step, self.folder = step, folder
        self.problem: ColonnadeError | OSError | None = None
        """Why `follow` could not go on the last time it tried."""
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
    ) -> Predictor:
        """Open an exported folder, or a run folder: its commit (step `at`, "best", "last"; None: the best where a
        validation part chose one, else the last) is then exported first, once,
        to RUN/serving. Of a folder that a run publishes to, the newest commit there. Of a URL that a run publishes to,
        the same: `copy` is a folder of this host that it is brought to, which other predictors may follow as it is.

        `model`: the network, not yet used, where it is your own; default: built from the run's configuration.
        Raises CheckpointError where there is no such commit or it is another model's, StorageError for files
        that cannot be read.
        """
        source, following = None, None
        if is_url(path):
            if copy is None:
                raise ConfigError(
                    f"{path} is a URL, and rows are mapped from files; say which folder it is brought to: "
                    "Predictor.open(url, copy=folder)"
                )
            source, path = place_of(path), copy
            carry(source, place_of(path))
        path = Path(path)
        if (path / WORD).is_file():
            if at is not None:
                raise ConfigError(
                    f"{path} is a publication and holds the newest commit; leave --at out"
                )
            folder, word = newest_base(path)
            following = Following(path, word.run, word.bases[-1], source)
        else:
            folder = exported(path, at=at)
        said = _read_model(folder)
        config = build_config(said["config"]) if said.get("config") else None
        schema = _schema(said, config)
        if model is None:
            if config is None or config.data.name == OWN or schema is None:
                raise CheckpointError(
                    f"{folder} does not say how its network is built, since it was not trained by `colonnade train`; "
                    "give the network: Predictor.open(path, model=...)"
                )
            model = build_model(schema, config)
        collection = _collection(model)
        _check(collection, said, folder)
        keep_freed_memory()
        _load_dense(model, folder / "dense.safetensors")
        paths = [folder / table["file"] for table in said["tables"]]
        rows = open_mapped(collection.tables, paths, seed=collection.seed)
        collection.serve(rows)
        model.eval().requires_grad_(False)
        opened = cls(
            model, rows, schema=schema, config=config, step=int(said["step"]), folder=folder
        )
        if following is not None:
            opened._following = following
            opened.refresh()
        return opened

    @property
    def labels(self) -> tuple[str, ...]:
        """One per task."""
        return ("label",) if self.schema is None else self.schema.labels

    @torch.inference_mode()
    def __call__(self, batch: Batch) -> Tensor:
        """Probabilities (B, T) float64. Raises IdRangeError, DataError for a batch that does not fit, ConfigError
        of a model of retrieval or of links."""
        if isinstance(self.model, Retriever):
            raise ConfigError(
                f"{type(self.model).__name__} gives no logits but vectors to search with; use "
                "predictor.model.queries(batch) and predictor.model.items(batch)"
            )
        if isinstance(self.model, KnowledgeGraph):
            raise ConfigError(
                f"{type(self.model).__name__} gives no logits but vectors to rank entities by; use "
                "predictor.model(batch), predictor.model.entities(ids) and predictor.model.compare, or "
                "`colonnade evaluate`"
            )
        with self._lock:
            logits = self.model(batch)
        return torch.sigmoid(logits.double())

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
        """Take what was published since: returns how many commits further on the predictor is now, less than none where
        the publication began anew. Each is taken whole, rows and dense weights, between two batches, in order, once.

        Raises ConfigError where the predictor was not opened on a publication; StorageError, CorruptionError,
        CheckpointError naming what is torn, missing or another model's. The predictor then stays at the last commit
        that was whole.
        """
        following = self._following
        if following is None:
            raise ConfigError(
                f"{self.folder} is no publication, so nothing follows; open the folder of train.publish"
            )
        with self._turn:
            began = following.number
            base, word = following.behind()
            while following.tag != word.tag:
                if base is None:
                    self._take(following)
                else:
                    self._open_base(following, base)
                base, word = following.behind()
            return following.number - began

    def follow(self, seconds: float = 1.0) -> None:
        """Refresh every so many seconds from now on, in a thread, until `close`. What goes wrong is `problem`, and is
        tried again."""
        if self._following is None or self._thread is not None:
            self.refresh()  # says why, or goes on following as before
            return
        self._thread = threading.Thread(
            target=self._follow, args=(seconds,), name="follow", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Unmap the rows. The predictor is of no use afterwards."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self.rows.close()

    def _follow(self, seconds: float) -> None:
        while not self._stop.wait(seconds):
            try:
                self.refresh()
                self.problem = None
            except (ColonnadeError, OSError) as error:  # of a folder that is away for a while, too
                self.problem = error

    def _take(self, following: Following) -> None:
        change = following.next_change(_collection(self.model).tables, dense_weights(self.model))
        with self._lock, torch.inference_mode():
            for t, each in enumerate(change.tables):
                self.rows.change(t, each.ids, each.weights, each.gone)
            load_dense(self.model, change.dense)
            self.step = change.step
        following.applied(change)

    def _open_base(self, following: Following, base: Base) -> None:
        folder, collection = following.folder / base.folder, _collection(self.model)
        said = _read_model(folder)
        _check(collection, said, folder)
        paths = [folder / table["file"] for table in said["tables"]]
        rows = open_mapped(collection.tables, paths, seed=collection.seed)  # while others predict
        with self._lock:
            _load_dense(self.model, folder / "dense.safetensors")
            self.rows.become(rows)
            self.step, self.folder = int(said["step"]), folder
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


def _read_model(folder: Path) -> dict[str, Any]:
    path = folder / "model.json"
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}; export again") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: not a model: {error}; export again") from None
    if not isinstance(said, dict) or said.get("format") != FORMAT:
        raise CheckpointError(f"{path}: not an exported model; write one with `colonnade export`")
    if said.get("version") != 1:
        raise CheckpointError(
            f"{path}: got version {said.get('version')}, this Colonnade reads 1; it was written by "
            f"{said.get('colonnade')}"
        )
    return said


def _schema(said: Mapping[str, Any], config: RunConfig | None) -> Schema | None:
    """What the model says of its data; else its configuration; else the data itself."""
    values = said.get("schema")
    if values:
        return Schema(
            dense=tuple(values["dense"]),
            categorical=tuple(Column(**column) for column in values["categorical"]),
            labels=tuple(values["labels"]),
        )
    if config is None or config.data.name == OWN:
        return None
    if "schema" in config.data.options:
        return load_declaration(config.data.options["schema"]).schema
    return open_source(config.data.name, config.data.path, **config.data.options).train.schema


def _collection(model: nn.Module) -> EmbeddingCollection:
    found = [part for part in model.modules() if isinstance(part, EmbeddingCollection)]
    if len(found) != 1:
        raise ConfigError(
            f"got a model with {len(found)} embedding collections, wanted one; predict with each by itself"
        )
    return found[0]


def _check(collection: EmbeddingCollection, said: Mapping[str, Any], folder: Path) -> None:
    wanted = [(t.name, t.width, t.rows, t.dtype) for t in collection.tables]
    got = [(t["name"], t["dim"], t["rows"], t["dtype"]) for t in said["tables"]]
    if got != wanted:
        first = next((pair for pair in zip(got, wanted, strict=False) if pair[0] != pair[1]), None)
        detail = f"{len(got)} tables, {len(wanted)} in this network"
        if first:
            detail = f"table (name, width, rows, dtype) {first[0]}, {first[1]} in this network"
        raise CheckpointError(
            f"{folder} was exported from another model: {detail}. Give the network it was trained as"
        )


def _load_dense(model: nn.Module, path: Path) -> None:
    try:
        weights = load_file(path)
    except Exception as error:  # safetensors raises its own kind for bytes, OSError for files
        raise CheckpointError(
            f"{path}: cannot be read: {' '.join(str(error).split())}; export again"
        ) from None
    mine = dense_weights(model)
    for name in [*mine, *weights]:
        got = tuple(weights[name].shape) if name in weights else None
        wanted = tuple(mine[name].shape) if name in mine else None
        if got != wanted:
            raise CheckpointError(
                f"{path}: got {name} of shape {got}, this network has {wanted}; give the network it was trained as"
            )
    load_dense(model, weights)
