"""`Predictor`: scores batches with an exported model.

    predictor = Predictor.open("runs/mine")          # or a folder that `colonnade export` wrote
    probabilities = predictor(batch)                 # (B, T)
    predictor = Predictor.open("published")          # a folder that a run publishes to (train.publish)
    predictor.follow()                               # loads each new checkpoint, between two batches

Legend: B samples, T tasks.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from colonnade.batch import Batch, share_samples
from colonnade.checkpoint.fingerprint import dense_weights, load_dense
from colonnade.config.run import OWN, RunConfig, build_config, override_settings
from colonnade.data.contract import Schema
from colonnade.data.sources import CSV_PRESETS
from colonnade.embedding import EmbeddingCollection, find_collection
from colonnade.errors import CheckpointError, ConfigError, CorruptionError, StorageError
from colonnade.files.untrusted import folder_inside
from colonnade.models.build import build_model
from colonnade.ops.memory import keep_freed_memory
from colonnade.predict.refresh_thread import RefreshThread
from colonnade.publish.delivery import (
    RemoteFolder,
    Subscriber,
    copy_publication,
    find_newest_base,
    find_published_step,
    invalidate_copy,
    is_url,
    open_location,
)
from colonnade.publish.deltas import CURRENT, BaseExport, CurrentPointer
from colonnade.publish.model_files import Export, check_file_lengths, read_dense, read_export
from colonnade.publish.model_writer import export_if_missing
from colonnade.sizes import parse_positive_bytes
from colonnade.store.mapped import MappedRows, open_mapped
from colonnade.train.objective import get_objective

READ_AHEAD = 2
"""Number of batches read ahead of scoring."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RowReading:
    """Settings by which the rows of exports are mapped."""

    verifies_all: bool = False
    """True: every byte is read and verified before anything is scored."""
    memory_bytes: int | None = None
    """Memory of this process for rows; None: the system decides which of the mapped files it holds."""


class Predictor:
    """Model that scores batches without training state, with rows mapped from files that processes share.

    Its scores equal those of `colonnade evaluate` for the same checkpoint and batches, bit for bit. Any thread may call
    it; calls wait for one another. `model` is the network itself, for the queries and items of a retrieval model.
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
        row_reading: RowReading = RowReading(),
    ) -> None:
        self.model = model
        self.rows = rows
        self.schema = schema
        self.config = config
        self.step = step
        self.folder = folder
        self.run = ""
        """Identity of the run that wrote the checkpoint."""
        self._row_reading = row_reading
        # Error that left rows and weights of different checkpoints.
        self._torn: BaseException | None = None
        self._subscriber: Subscriber | None = None
        self._lock = threading.Lock()  # protects rows and weights
        self._refresh_lock = threading.Lock()  # one `refresh` at a time
        self._follower = RefreshThread(self.refresh, "follow")

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        model: nn.Module | None = None,
        at: int | str | None = None,
        copy: str | Path | None = None,
        verify: Literal["lazy", "full"] = "lazy",
        row_memory: int | str | None = None,
    ) -> Predictor:
        """Open an exported folder, a run folder, or a folder or URL that a run publishes to.

        A run folder's checkpoint is exported to RUN/serving the first time. `at`: its step, "best" or "last"; None: the
        best if there is a validation part, else the last. A publication is opened at its newest checkpoint, or `at` an
        older step that it still has files of, and then stays there. `copy`: for a URL, the folder on this host that it
        is copied to; other predictors may open and follow that folder.

        `model`: your own network, not yet used; default: built from the run's configuration.
        `verify`: "full" reads every byte before anything is scored; "lazy" checks lengths, ids and dense weights now,
        rows at their first use, and the other rows in a thread.
        `row_memory`: memory of this process for rows, such as "4GiB", if the machine has none for all: the others are
        read from the files. None: the system holds what it has memory for, once for all processes; beyond that, a
        call waits for one read after another. It changes no score.

        Raises CheckpointError if there is no such checkpoint or it is another model's, CorruptionError for damaged
        files, StorageError for unreadable files, ConfigError for a `row_memory` that is too small.
        """
        if verify not in ("lazy", "full"):
            raise ConfigError(f"got verify={verify!r}, choose from 'lazy', 'full'")
        row_reading = RowReading(verify == "full", _parse_row_memory(row_memory))
        if not is_url(path):
            return cls._open_folder(Path(path), None, model, at, row_reading)
        if copy is None:
            raise ConfigError(
                f"{path} is a URL, and rows are mapped from files; give a folder to copy it to: "
                "Predictor.open(url, copy=folder)"
            )
        source = open_location(path)
        copy = Path(copy)
        copy_publication(source, open_location(copy))
        try:
            return cls._open_folder(copy, source, model, at, row_reading)
        except CorruptionError:
            invalidate_copy(copy)
            raise

    @classmethod
    def _open_folder(
        cls,
        path: Path,
        source: RemoteFolder | None,
        model: nn.Module | None,
        at: int | str | None,
        row_reading: RowReading,
    ) -> Predictor:
        subscriber = None
        last_number = 0
        if (path / CURRENT).exists() and at is not None:
            current, base, last_number = find_published_step(path, _parse_published_step(path, at))
            folder = folder_inside(path, base.folder)
            subscriber = Subscriber(path, current.run, base)
        elif (path / CURRENT).exists():
            folder, current = find_newest_base(path)
            subscriber = Subscriber(path, current.run, current.bases[-1], source)
        else:
            folder = export_if_missing(path, at=at)
        export = read_export(folder)
        check_file_lengths(folder, export)
        config = build_config(export.config) if export.config else None
        if config is not None:
            config = _locate_join_files(config, folder)
        if model is None:
            model = _build_network(export, config, folder)
        keep_freed_memory()
        dense, rows = _read_export(folder, export, model, row_reading)
        load_dense(model, dense)
        find_collection(model).open_exported(rows)
        model.eval().requires_grad_(False)
        predictor = cls(
            model,
            rows,
            schema=export.schema,
            config=config,
            step=export.step,
            folder=folder,
            row_reading=row_reading,
        )
        predictor.run = export.run
        try:
            if subscriber is not None and at is None:
                predictor._subscriber = subscriber
                predictor.refresh()
            while subscriber is not None and subscriber.number < last_number:
                predictor._apply_next_delta(subscriber, current)
        except BaseException:
            predictor.close()
            raise
        return predictor

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the labels, one per task."""
        return ("label",) if self.schema is None else self.schema.labels

    @property
    def problem(self) -> BaseException | None:
        """Error of the last refresh by `follow`, or damage detected in the background; None: neither."""
        return self._follower.problem or self.rows.problem

    @property
    def num_failures(self) -> int:
        """Number of failed refreshes by `follow` since the predictor was opened."""
        return self._follower.num_failures

    def __call__(self, batch: Batch) -> Tensor:
        """Predict a batch: probabilities (B, T) float64, or what the model's own `objective.predict` returns.

        A feature may have the ids of one sample, and dense be (1, n): all samples share them, and rows are looked up
        once. Scores have the bits of the batch with copies.

        Raises IdRangeError or DataError for an invalid batch, CorruptionError or StorageError for a damaged file of
        rows, ConfigError for a model without predictions, such as a retrieval model."""
        return self.predict_with_step(batch)[0]

    def predict_with_step(self, batch: Batch) -> tuple[Tensor, int]:
        """Predict a batch as a call does, and return the step of the checkpoint that predicted it, too."""
        objective = get_objective(self.model)
        predict = getattr(objective, "predict", None)
        if predict is None:
            raise ConfigError(
                f"{type(self.model).__name__}'s objective {type(objective).__name__} has no `predict`; give it "
                "predict(model, batch), or use predictor.model"
            )
        with self.hold_checkpoint() as model:
            return predict(model, share_samples(batch)), self.step

    @contextmanager
    def hold_checkpoint(self) -> Iterator[nn.Module]:
        """Yield the network, whose checkpoint stays inside the block: other calls and refreshes wait.

        Raises StorageError if the checkpoint was loaded only in part."""
        with self._lock, torch.inference_mode():
            if self._torn is not None:
                raise StorageError(
                    f"{self.folder}: got a checkpoint that was loaded only in part ({self._torn}), so nothing "
                    "is scored; refresh loads it again, or open a new predictor"
                )
            yield self.model

    def scores(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, Tensor]]:
        """Yield each batch and its probabilities, in order. A thread reads the next batches meanwhile; close the
        iterator to stop early."""
        ahead = _read_ahead(batches)
        try:
            for batch in ahead:
                yield batch, self(batch)
        finally:
            ahead.close()

    def refresh(self) -> int:
        """Load the checkpoints published since the last refresh. Return the number of checkpoints moved forward;
        negative if the publication was restarted.

        Each checkpoint is loaded once, in order, between two batches, rows and dense weights together. Raises
        ConfigError if the predictor was not opened on a publication; StorageError, CorruptionError or CheckpointError,
        which name the file, if it is damaged, missing or another model's. The predictor then stays at the last complete
        checkpoint.
        """
        with self._refresh_lock:
            subscriber = self._get_subscriber()
            first_number = subscriber.number
            try:
                base, current = self._find_updates(subscriber)
                while subscriber.tag != current.tag:
                    if base is None:
                        self._apply_next_delta(subscriber, current)
                    else:
                        self._open_base(subscriber, base)
                    base, current = subscriber.find_updates()
            except CorruptionError:
                if subscriber.source is not None:
                    invalidate_copy(subscriber.folder)
                raise
            return subscriber.number - first_number

    def has_update(self) -> bool:
        """Return whether a checkpoint was published that `refresh` has not loaded. Raises the errors of `refresh`."""
        with self._refresh_lock:
            subscriber = self._get_subscriber()
            return self._find_updates(subscriber)[1].tag != subscriber.tag

    def fork(self) -> Predictor:
        """Return another predictor at the same checkpoint, which is refreshed and closed by itself.

        Both share the mapped files and their indices; rows that are newer than the files, and dense weights, are
        copied. Raises ConfigError for a model without a configuration to build it from.
        """
        if self.config is None or self.schema is None or self.config.data.name == OWN:
            raise ConfigError(
                f"{self.folder} has no configuration to build its network from, so it cannot be opened a second time; "
                "open another predictor with a network of its own"
            )
        model = build_model(self.schema, self.config)
        with self._refresh_lock, self._lock:
            load_dense(model, {name: w.clone() for name, w in dense_weights(self.model).items()})
            collection = find_collection(model)
            rows = self.rows.fork(collection.seed)
            collection.open_exported(rows)
            other = Predictor(
                model.eval().requires_grad_(False),
                rows,
                schema=self.schema,
                config=self.config,
                step=self.step,
                folder=self.folder,
                row_reading=self._row_reading,
            )
            other.run = self.run
            other._torn = self._torn
            other._subscriber = None if self._subscriber is None else self._subscriber.fork()
        return other

    def follow(self, seconds: float = 1.0) -> None:
        """Start a thread that refreshes every `seconds` until `close`. An error becomes `problem`, is counted in
        `num_failures`, and the refresh is tried again."""
        if self._subscriber is None or self._follower.is_started:
            self.refresh()  # raises the reason, or leaves the running thread as it is
            return
        self._follower.start(seconds)

    def close(self) -> None:
        """Unmap the rows after the current call has ended. Later uses raise ConfigError."""
        self._follower.stop()
        with self._lock:
            self.rows.close()

    def _get_subscriber(self) -> Subscriber:
        """Return the subscriber of the publication. Raises ConfigError if there is none."""
        if self._subscriber is None:
            raise ConfigError(
                f"{self.folder} is no publication, so it gets no updates; open the folder of train.publish"
            )
        return self._subscriber

    def _find_updates(self, subscriber: Subscriber) -> tuple[BaseExport | None, CurrentPointer]:
        """Return what `Subscriber.find_updates` does; a damaged base that was replaced is opened again."""
        self.rows.check_files()
        if self.rows.problem is not None and (subscriber.source or self.rows.is_replaced):
            subscriber.mark_base_damaged()
        return subscriber.find_updates()

    def _apply_next_delta(self, subscriber: Subscriber, current: CurrentPointer) -> None:
        """Apply the next published change to rows and weights, between two batches."""
        delta = subscriber.read_next_delta(
            find_collection(self.model).tables, dense_weights(self.model), current
        )
        with self._lock, torch.inference_mode():
            try:
                for t, table in enumerate(delta.tables):
                    self.rows.apply_delta(t, table.ids, table.weights, table.gone)
                load_dense(self.model, delta.dense)
            except BaseException as error:
                self._torn = error
                raise
            self.step = delta.header.step
            self._torn = None
        subscriber.record_delta(delta)

    def _open_base(self, subscriber: Subscriber, base_export: BaseExport) -> None:
        """Replace rows and weights by those of a full export of the publication."""
        folder = folder_inside(subscriber.folder, base_export.folder)
        export = read_export(folder)
        check_file_lengths(folder, export)
        _check_schema(self.schema, export, folder)
        # Outside the lock: other threads may predict meanwhile.
        dense, rows = _read_export(folder, export, self.model, self._row_reading, self.rows)
        with self._lock:
            load_dense(self.model, dense)
            self.rows.replace_files(rows)
            self.step = export.step
            self.folder = folder
            self._torn = None
        subscriber.record_base(base_export)

    def __enter__(self) -> Predictor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read_ahead(items: Iterable[T]) -> Any:
    """Yield the items, read ahead in a thread. An error of the iteration is raised at its position."""
    ready_items: queue.Queue[tuple[str, Any]] = queue.Queue(READ_AHEAD)
    stop = threading.Event()

    def put_item(kind: str, item: Any) -> None:
        while not stop.is_set():
            try:
                ready_items.put((kind, item), timeout=0.1)
                return
            except queue.Full:
                continue

    def read_items() -> None:
        try:
            for item in items:
                put_item("item", item)
                if stop.is_set():
                    return
            put_item("end", None)
        except BaseException as error:
            put_item("error", error)

    thread = threading.Thread(target=read_items, name="read ahead", daemon=True)
    thread.start()
    try:
        while True:
            kind, item = ready_items.get()
            if kind == "end":
                return
            if kind == "error":
                raise item
            yield item
    finally:
        stop.set()
        thread.join()


def _parse_published_step(publication_path: Path, at: int | str) -> int:
    """Return the step that `at` names. Raises ConfigError for names of a run's checkpoints."""
    if isinstance(at, int) or at.isdecimal():
        return int(at)
    raise ConfigError(
        f"{publication_path} is a publication: got at={at!r}, wanted a published step, or nothing for the newest"
    )


def _parse_row_memory(value: int | str | None) -> int | None:
    """Return the bytes of a size. Raises ConfigError."""
    try:
        return None if value is None else int(parse_positive_bytes(value))
    except ValueError as error:
        raise ConfigError(f"row_memory: {error}") from None


def _build_network(export: Export, config: RunConfig | None, folder: Path) -> nn.Module:
    """Build the network, after checking its shapes on the meta device against the files.

    Raises CheckpointError if they differ, and for an export without configuration or of data that are read otherwise
    now.
    """
    if config is None or config.data.name == OWN:
        raise CheckpointError(
            f"{folder} has no configuration to build its network from, since it was not trained by `colonnade train`; "
            "give the network: Predictor.open(path, model=...), or colonnade serve --network FILE.py:FUNCTION"
        )
    if config.data.name in CSV_PRESETS:
        raise CheckpointError(
            f"{folder} records data.name={config.data.name}, which runs record as csv: the version that trained it "
            "read the data otherwise. Train again in another folder (--run)"
        )
    with torch.device("meta"):
        shapes = build_model(export.schema, config)
    _check_tables(find_collection(shapes), export, folder)
    _check_dense_weights(shapes, read_dense(folder, export), folder)
    return build_model(export.schema, config)


def _locate_join_files(config: RunConfig, folder: Path) -> RunConfig:
    """Return a configuration with the paths of the joined tables, which an export has in its folder."""
    join = config.data.options.get("join") or {}
    paths = {key: str(folder / name) for key, name in join.items()}
    return override_settings(config, {"data.options.join": paths} if paths else {})


def _read_export(
    folder: Path,
    export: Export,
    model: nn.Module,
    row_reading: RowReading,
    previous_rows: MappedRows | None = None,
) -> tuple[dict[str, Tensor], MappedRows]:
    """Read the dense weights and map the rows of an export of this network. `previous_rows`: those of an older export,
    whose mapped files may be used again. Raises CheckpointError for another network's, CorruptionError, StorageError.
    """
    collection = find_collection(model)
    _check_tables(collection, export, folder)
    dense = read_dense(folder, export)
    _check_dense_weights(model, dense, folder)
    files = export.row_files
    seed = collection.seed
    rows = open_mapped(
        collection.tables,
        folder,
        files,
        seed=seed,
        full=row_reading.verifies_all,
        previous_rows=previous_rows,
        row_memory=row_reading.memory_bytes,
    )
    rows.start_scrub()
    return dense, rows


def _check_tables(collection: EmbeddingCollection, export: Export, folder: Path) -> None:
    wanted = [(t.name, t.width, t.rows, t.dtype) for t in collection.tables]
    got = [(t.name, t.dim, t.rows, t.dtype) for t in export.tables]
    if got != wanted:
        first = next((pair for pair in zip(got, wanted, strict=False) if pair[0] != pair[1]), None)
        detail = f"{len(got)} tables, {len(wanted)} in this network"
        if first:
            detail = f"table (name, width, rows, dtype) {first[0]}, {first[1]} in this network"
        raise CheckpointError(
            f"{folder} was exported from another model: {detail}. Give the network that was trained"
        )


def _check_schema(schema: Schema | None, export: Export, folder: Path) -> None:
    """Raise CheckpointError if an export reads other columns, by which requests would be read in the wrong way."""
    if schema is None or export.schema == schema:
        return
    wanted = _list_columns(schema)
    got = _list_columns(export.schema)
    pairs = zip([*got, *[None] * len(wanted)], [*wanted, *[None] * len(got)], strict=False)
    first = next(pair for pair in pairs if pair[0] != pair[1])
    raise CheckpointError(
        f"{folder} was exported with another schema: got {first[0]}, wanted {first[1]}. Open the predictor again to "
        "take the other model"
    )


def _list_columns(schema: Schema) -> list[str]:
    """Return the columns of a schema in words, in order."""
    return [
        *(f"the number {name}" for name in schema.dense),
        *(f"the feature {column}" for column in schema.categorical),
        *(f"the label {name}" for name in schema.labels),
    ]


def _check_dense_weights(
    model: nn.Module, loaded_weights: dict[str, Tensor], export_folder: Path
) -> None:
    """Raise CheckpointError for dense weights of other names or shapes than the network's, or with NaN or inf."""
    parameters = dense_weights(model)
    for name in [*parameters, *loaded_weights]:
        got = tuple(loaded_weights[name].shape) if name in loaded_weights else None
        wanted = tuple(parameters[name].shape) if name in parameters else None
        if got != wanted:
            raise CheckpointError(
                f"{export_folder}: got dense weights {name} of shape {got}, this network has {wanted}; give "
                "the network "
                "that was trained"
            )
        if not bool(loaded_weights[name].isfinite().all()):
            raise CheckpointError(
                f"{export_folder}: got NaN or inf in the dense weights {name}, which score nothing; export "
                "an older step"
            )
