"""Recommendations of retrieval models: raw features of users in, their best items out, exactly.

    recommender = Recommender.open("runs/mine")
    best = recommender.recommend([{"history": [3, 8, 14]}], k=10)
    print(best.items[0], best.scores[0], best.step)

A catalogue has the features of all items. It is that of the model's data set, or records of your own. The vectors of
items are computed once per checkpoint. A recommender of a publication has two predictors: one answers, while the other
loads the next checkpoint and computes its vectors; then they change places.

Legend: B users, I items of the catalogue, U users of the training data, D dim.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from colonnade.batch import Batch, Ids
from colonnade.config.run import RunConfig
from colonnade.data import open_source
from colonnade.data.contract import Schema
from colonnade.data.interactions import Interactions, concat_bags
from colonnade.data.tensors import TensorColumns, gather_ids
from colonnade.errors import ConfigError, DataError
from colonnade.models.retriever import Retriever, embed_items, rank_items
from colonnade.predict import Predictor
from colonnade.predict.refresh_thread import RefreshThread
from colonnade.publish.delivery import is_url
from colonnade.publish.deltas import CURRENT
from colonnade.serve.records import Record, RecordEncoder, build_encoder, describe_value

USER = "user"
"""Column of a record with the number of a user of the training data, whose training items are not recommended."""
MAX_K = 10_000


@dataclass(frozen=True, slots=True, eq=False)
class Catalogue:
    """Items that may be recommended, in ascending order of `keys`."""

    features: TensorColumns
    """Features that the model reads of an item (I,)."""
    keys: NDArray
    """Ids of the items in answers (I,): integers, or texts as objects."""
    taken: Ids | None = None
    """Bags (U,) of the positions of the items that each user of the training data took; None: unknown."""

    @property
    def num_items(self) -> int:
        return len(self.keys)

    def find_positions(self, keys: Sequence[Any], where: str) -> NDArray[np.int64]:
        """Return the positions of the items that the catalogue has; others are left out. Raises DataError."""
        is_text = self.keys.dtype == object
        for key in keys:
            if isinstance(key, bool) or not isinstance(key, str if is_text else int):
                kind = "a text" if is_text else "an integer"
                raise DataError(
                    f"{where}, exclude: got {describe_value(key)}, wanted {kind}, as the ids of items are. Send ids "
                    "of items"
                )
        if not is_text:
            keys = [key for key in keys if -(2**63) <= key < 2**63]
        wanted = np.array(keys, dtype=self.keys.dtype)
        if not len(wanted) or not self.num_items:
            return np.empty(0, np.int64)
        positions = np.searchsorted(self.keys, wanted).clip(max=self.num_items - 1)
        return positions[self.keys[positions] == wanted]


@dataclass(frozen=True, slots=True, eq=False)
class Recommendations:
    """Best items of each user, best first, with their scores: fewer than k where fewer may be recommended."""

    items: list[list[Any]]
    scores: list[list[float]]
    step: int
    """Step of the checkpoint that they are computed with."""


@dataclass(slots=True, eq=False)
class _Side:
    """Predictor with the vectors of all items at its step: one of the two of a recommender."""

    predictor: Predictor
    vectors: Tensor  # (I, D)
    step: int
    lock: threading.Lock = field(default_factory=threading.Lock)


class Recommender:
    """Recommender of items by a retrieval model. Any thread may call it; calls wait for one another.

    Scores are the dots of the vectors of user and item, by which evaluation ranks. Of equal scores the lower id comes
    first.
    """

    def __init__(
        self,
        active: _Side,
        catalogue: Catalogue,
        encoder: RecordEncoder,
        history: Sequence[str],
        item_index: tuple[Tensor, Tensor],
        spare: _Side | None = None,
    ) -> None:
        """Create a recommender; `open` and `from_predictor` do. `history`: the query's features of items; `item_index`:
        the ids of the items, ascending, and their positions in the catalogue."""
        self._active, self._spare = active, spare
        self.catalogue = catalogue
        self.encoder = encoder
        """Encoder of users' records: the columns of queries."""
        self._history = tuple(history)
        self._item_ids, self._item_order = item_index
        self._refresh_lock = threading.Lock()
        self._follower = RefreshThread(self.refresh, "recommend")

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        items: Sequence[Record] | Catalogue | None = None,
        **options: Any,
    ) -> Recommender:
        """Open an export, a run folder or a publication; `options` are those of `Predictor.open`.

        `items`: records of all items, with the raw columns of their features; default: the catalogue of the data that
        the model was trained on. Raises ConfigError for a model that is no retrieval model, or without a catalogue, and
        the errors of `Predictor.open`.
        """
        predictor = Predictor.open(path, **options)
        try:
            recommender = cls.from_predictor(predictor, items=items)
            is_publication = is_url(path) or (Path(path) / CURRENT).exists()
            if is_publication and options.get("at") is None:
                spare = Predictor.open(path, **options)
                recommender._spare = _Side(spare, torch.empty(0), -1)
            return recommender
        except BaseException:
            predictor.close()
            raise

    @classmethod
    def from_predictor(
        cls, predictor: Predictor, *, items: Sequence[Record] | Catalogue | None = None
    ) -> Recommender:
        """Build a recommender of a predictor's checkpoint. The predictor must stay at that step."""
        model = predictor.model
        if not isinstance(model, Retriever):
            raise ConfigError(
                f"got a {type(model).__name__}, wanted a retrieval model (two_tower, sasrec, graphsage). Score "
                "candidates with `Predictor` or `colonnade predict` instead"
            )
        if predictor.schema is None:
            raise ConfigError(
                f"{predictor.folder} has no schema, wanted one to read the records of users by. Export it again "
                "from its run folder"
            )
        encoder = build_encoder(predictor.config, predictor.schema)
        catalogue = _open_catalogue(model, encoder, predictor.config, predictor.schema, items)
        dense = [predictor.schema.dense[i] for i in model.dense_columns]
        queries = encoder.select([*model.query_features, *dense], ignored=(USER,))
        active = _Side(predictor, _embed_items(model, catalogue), predictor.step)
        ids, order = catalogue.features.ids[model.item_features[0]].values.sort(stable=True)
        return cls(active, catalogue, queries, _find_history(model), (ids, order))

    @property
    def step(self) -> int:
        """Step of the checkpoint that is recommended with."""
        return self._active.step

    @property
    def columns(self) -> frozenset[str]:
        """Columns that a record of a user may have, read or not."""
        return frozenset(self.encoder.columns) | self.encoder.ignored

    @property
    def problem(self) -> BaseException | None:
        """Error of the last refresh by `follow`, or damage detected in the background; None: neither."""
        return self._follower.problem or self._active.predictor.problem

    @property
    def num_failures(self) -> int:
        """Number of failed refreshes by `follow` since the recommender was opened."""
        return self._follower.num_failures

    def recommend(
        self,
        users: Sequence[Record],
        k: int = 10,
        *,
        exclude: Sequence[Sequence[Any]] | None = None,
        exclude_seen: bool = True,
    ) -> Recommendations:
        """Recommend the k best items of the catalogue to each user.

        users         records with the raw columns of queries, as `RecordEncoder.encode` takes them
        exclude       ids of items that each user does not get; ids that the catalogue does not have are ignored
        exclude_seen  whether a user does not get the items of its own columns, such as `history`, and those that it
                      took in training: the user whose number the record has as `user`

        Raises DataError naming user and column.
        """
        if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= MAX_K:
            raise DataError(
                f"got k={describe_value(k)}, wanted 1 to {MAX_K:,} items. Send another k"
            )
        batch = self.encoder.encode(users)
        return self.recommend_batch(batch, k, self._build_mask(batch, users, exclude, exclude_seen))

    @torch.inference_mode()
    def recommend_batch(self, batch: Batch, k: int, masked: Ids) -> Recommendations:
        """Recommend the k best items to each query of a batch. `masked`: bags of positions that are not recommended."""
        active = self._active
        with active.lock:
            model: Any = active.predictor.model
            top, scores = rank_items(model.queries(batch), active.vectors, masked, k)
            step = active.step
        items, values = [], []
        for row, row_scores in zip(top.numpy(), scores.tolist(), strict=True):
            row = row[row >= 0]
            items.append(self.catalogue.keys[row].tolist())
            values.append(row_scores[: len(row)])
        return Recommendations(items, values, step)

    def refresh(self) -> bool:
        """Move to the newest checkpoint of the publication, and return whether there was another.

        The checkpoint is loaded and its items' vectors are computed beside those in use, which answer meanwhile. Raises
        the errors of `Predictor.refresh`; the recommender then stays at its checkpoint.
        """
        with self._refresh_lock:
            spare = self._spare
            if spare is None:
                self._active.predictor.refresh()  # raises the reason
                return False
            with spare.lock:
                num_moved = spare.predictor.refresh()
                if num_moved >= 0 and spare.predictor.step == self._active.step:
                    return False
                spare.vectors = _embed_items(spare.predictor.model, self.catalogue)
                spare.step = spare.predictor.step
            self._active, self._spare = spare, self._active
            return True

    def follow(self, seconds: float = 1.0) -> None:
        """Start a thread that refreshes every `seconds` until `close`. An error becomes `problem`, is counted in
        `num_failures`, and the refresh is tried again."""
        if self._spare is None or self._follower.is_started:
            self.refresh()
            return
        self._follower.start(seconds)

    def close(self) -> None:
        """Unmap the rows after the current call has ended."""
        self._follower.stop()
        for side in (self._active, self._spare):
            if side is not None:
                with side.lock:
                    side.predictor.close()

    def __enter__(self) -> Recommender:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _build_mask(
        self,
        batch: Batch,
        users: Sequence[Record],
        exclude: Sequence[Sequence[Any]] | None,
        exclude_seen: bool,
    ) -> Ids:
        """Build the bags (B,) of the positions that are not recommended."""
        parts = []
        if exclude is not None:
            parts.append(self._find_excluded(exclude, batch.size))
        if exclude_seen:
            parts += [self._find_positions(batch.ids[name]) for name in self._history]
            parts.append(self._find_seen(users))
        masked = Ids(
            torch.empty(0, dtype=torch.int64), torch.zeros(batch.size + 1, dtype=torch.int64)
        )
        for part in parts:
            masked = concat_bags(masked, part)
        return masked

    def _find_excluded(self, exclude: Sequence[Sequence[Any]], num_users: int) -> Ids:
        is_list = isinstance(exclude, list | tuple) and len(exclude) == num_users
        if not is_list or not all(isinstance(keys, list | tuple) for keys in exclude):
            raise DataError(
                f"exclude: got {describe_value(exclude)}, wanted a list of ids for each of {num_users} users. Send an "
                "empty list for a user without any"
            )
        positions = [
            self.catalogue.find_positions(keys, f"user {row}") for row, keys in enumerate(exclude)
        ]
        offsets = np.cumsum([0, *map(len, positions)])
        return Ids(torch.from_numpy(np.concatenate(positions)), torch.from_numpy(offsets))

    def _find_positions(self, bags: Ids) -> Ids:
        """Return the bags of the positions of items, from bags of their ids; hashed ids may have several."""
        first = torch.searchsorted(self._item_ids, bags.values)
        counts = torch.searchsorted(self._item_ids, bags.values, right=True) - first
        ends = counts.cumsum(0)
        step = torch.arange(int(counts.sum())) - torch.repeat_interleave(ends - counts, counts)
        positions = self._item_order[torch.repeat_interleave(first, counts) + step]
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), ends])
        offsets = torch.arange(len(bags.values) + 1) if bags.offsets is None else bags.offsets
        return Ids(positions, ends[offsets])

    def _find_seen(self, users: Sequence[Record]) -> Ids:
        """Return the bags of items that the users of the training data took; empty for others."""
        taken = self.catalogue.taken
        num_known = 0 if taken is None else len(taken.counts)
        numbers = [_parse_user(user.get(USER), row, num_known) for row, user in enumerate(users)]
        if taken is None or num_known == 0:
            return Ids(
                torch.empty(0, dtype=torch.int64), torch.zeros(len(users) + 1, dtype=torch.int64)
            )
        bags = gather_ids(taken, torch.tensor([max(number, 0) for number in numbers]))
        is_known = torch.tensor([number >= 0 for number in numbers])
        counts = bags.counts * is_known
        values = bags.values[is_known[bags.samples]]
        return Ids(values, torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]))


def _parse_user(value: Any, row: int, num_known: int) -> int:
    """Return the number of a user of the training data; -1 for none."""
    if value is None or value == "" or num_known == 0:
        return -1
    try:
        is_valid = not isinstance(value, bool | float) and len(str(value)) < 20
        number = int(value) if is_valid else -1
    except (TypeError, ValueError):
        is_valid, number = False, -1
    if not is_valid:
        raise DataError(
            f"record {row}, column {USER}: got {describe_value(value)}, wanted the number of a user. Leave it out for "
            "a new user"
        )
    return number if 0 <= number < num_known else -1


@torch.inference_mode()
def _embed_items(model: Any, catalogue: Catalogue) -> Tensor:
    return embed_items(model, catalogue.features)


def _find_history(model: Retriever) -> tuple[str, ...]:
    """Return the query's features of the item's table, such as a history: their ids are items the user took."""
    features = {f.name: f.table for f in model.embeddings.declaration.features}
    table = features[model.item_features[0]]
    return tuple(
        name for name in model.query_features if features[name] == table and "_hop" not in name
    )


def _open_catalogue(
    model: Retriever,
    encoder: RecordEncoder,
    config: RunConfig | None,
    schema: Schema,
    items: Sequence[Record] | Catalogue | None,
) -> Catalogue:
    """Return the catalogue from what the caller has: itself, records of items, or nothing: that of the model's data."""
    if isinstance(items, Catalogue):
        return items
    if items is not None:
        return build_catalogue(model, encoder, schema, items)
    if config is None:
        raise ConfigError(
            "got a model without a configuration, wanted its catalogue. Give the records of all items: items=[...]"
        )
    return open_data_catalogue(config)


def open_data_catalogue(config: RunConfig) -> Catalogue:
    """Open the catalogue of the data set that a model was trained on, and what its users took."""
    splits = open_source(config.data.name, config.data.path, **config.data.options)
    parts = (splits.test, splits.validation, splits.train)
    features = next(
        (c for c in (getattr(p, "catalogue", None) for p in parts) if c is not None), None
    )
    if features is None:
        raise ConfigError(
            f"the {config.data.name} reader has no catalogue of items, wanted all items that may be recommended. Give "
            "their records: items=[...], or --items FILE"
        )
    interactions = getattr(splits.train, "interactions", None)
    taken = None
    if isinstance(interactions, Interactions):
        taken = concat_bags(interactions.train, interactions.validation)
    return Catalogue(features, np.arange(features.num_samples), taken)


def build_catalogue(
    model: Retriever, encoder: RecordEncoder, schema: Schema, records: Sequence[Record]
) -> Catalogue:
    """Build a catalogue from records of items, which have the raw columns of the item's features.

    The item's id is the column of the first of `model.item_features`. Raises DataError for a missing or repeated id.
    """
    dense = [] if model.log_q is None else [schema.dense[model.log_q]]
    items = encoder.select([*model.item_features, *dense])
    id_column = items.find_columns(model.item_features[0])[0]
    batch = items.encode(records)
    keys = [record.get(id_column) for record in records]
    order = _sort_keys(keys, id_column)
    features = TensorColumns(dense=batch.dense, ids=batch.ids)
    ordered = features.gather_rows(torch.from_numpy(order))
    dtype: Any = object if isinstance(keys[0], str) else np.int64
    return Catalogue(
        replace(features, dense=ordered.dense, ids=ordered.ids),
        np.array([keys[i] for i in order], dtype=dtype),
    )


def _sort_keys(keys: Sequence[Any], column: str) -> NDArray[np.int64]:
    """Return the order of ids, ascending. Raises DataError for missing, mixed or repeated ones."""
    kind = str if isinstance(keys[0], str) else int
    rows: dict[Any, int] = {}
    for row, key in enumerate(keys):
        if isinstance(key, bool) or not isinstance(key, kind):
            raise DataError(
                f"record {row}, column {column}: got {describe_value(key)}, wanted the id of an item: all texts, or "
                "all integers. Send one with each item"
            )
        if (first := rows.setdefault(key, row)) != row:
            raise DataError(
                f"record {row}, column {column}: got {describe_value(key)}, which record {first} has, wanted each item "
                "once. Leave one of them out"
            )
    return np.array(sorted(range(len(keys)), key=keys.__getitem__), np.int64)
