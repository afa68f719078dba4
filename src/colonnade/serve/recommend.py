"""Recommendations of retrieval models: raw features of users in, their best items out.

    recommender = Recommender.open("runs/mine")
    best = recommender.recommend([{"history": [3, 8, 14]}], k=10)
    print(best.items[0], best.scores[0], best.step)

A catalogue has the features of all items. It is that of the model's data set, or records of your own. The vectors of
items are computed once per checkpoint. To load the next one, a fork of the predictor, which shares its mapped files,
is refreshed and computes its vectors while the predictor answers; then it takes the predictor's place.

Legend: B users, I items of the catalogue, U users of the training data, D dim.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from colonnade.batch import Batch, Ids
from colonnade.config.run import RunConfig
from colonnade.data import open_source
from colonnade.data.contract import Schema
from colonnade.data.graph import has_neighbours
from colonnade.data.interactions.columns import USER, to_positions
from colonnade.data.interactions.samples import (
    QuerySource,
    concat_bags,
    truncate_to_newest_items,
)
from colonnade.data.tensors import TensorColumns, gather_ids, locate_bag_items
from colonnade.errors import ConfigError, DataError
from colonnade.models.retriever import Retriever, embed_items, rank_items, to_column_major
from colonnade.predict import Predictor
from colonnade.predict.refresh_thread import RefreshThread
from colonnade.serve.records import Record, RecordEncoder, build_encoder, describe_value

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
    user_keys: NDArray = field(default_factory=lambda: np.empty(0, np.int64))
    """Ids of these users in records (U,), ascending."""
    users: Mapping[str, Ids] = field(default_factory=dict)
    """Features that the data has of each user (U,), with its history: for records that leave them out."""
    has_all_items: bool = False
    """True if the model was trained on no other item."""
    popularity: Tensor | None = None
    """Log of each item's share of the training interactions (I,); None: unknown."""

    @property
    def num_items(self) -> int:
        return len(self.keys)

    def find_item_positions(self, item_ids: Sequence[Any], record_label: str) -> NDArray[np.int64]:
        """Return the positions of the items that the catalogue has; others are left out. Raises DataError."""
        is_text = self.keys.dtype == object
        for key in item_ids:
            if isinstance(key, bool) or not isinstance(key, str if is_text else int):
                kind = "a text" if is_text else "an integer"
                raise DataError(
                    f"{record_label}, exclude: got {describe_value(key)}, wanted {kind}, as the ids of items "
                    "are. Send ids "
                    "of items"
                )
        if not is_text:
            item_ids = [key for key in item_ids if -(2**63) <= key < 2**63]
        positions = to_positions(self.keys, np.array(item_ids, dtype=self.keys.dtype)).numpy()
        return positions[positions >= 0]


@dataclass(frozen=True, slots=True, eq=False)
class Recommendations:
    """Best items of each user, best first, with their scores: fewer than k where fewer may be recommended."""

    items: list[list[Any]]
    scores: list[list[float]]
    by_popularity: list[bool]
    """True for users of whom nothing is known: their items are the most popular ones, not those of the model."""
    step: int
    """Step of the checkpoint that they are computed with."""
    num_left_out: int = 0
    """Number of items of histories that the data of the model does not have."""


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddedCatalogue:
    """Predictor that stays at its checkpoint, and the vectors of all items by it."""

    predictor: Predictor
    vectors: Tensor  # (I, D)


class Recommender:
    """Recommender of items by a retrieval model. Any thread may call it; calls wait for one another.

    Scores are the dots of the vectors of user and item, by which evaluation ranks. Of equal scores the lower id comes
    first. A user of whom neither the record nor the data has anything but an id gets the most popular items of the
    training data.
    """

    def __init__(
        self,
        active: EmbeddedCatalogue,
        catalogue: Catalogue,
        encoder: RecordEncoder,
        history: Sequence[str],
        item_index: tuple[Tensor, Tensor],
    ) -> None:
        """Create a recommender; `open` and `from_predictor` do. `history`: the query's features of items; `item_index`:
        the ids of the items, ascending, and their positions in the catalogue."""
        self._active = active
        self.catalogue = catalogue
        self.encoder = encoder
        """Encoder of users' records: the columns of queries."""
        self._history = tuple(history)
        self._user_column = encoder.find_columns(USER)[0]
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
            return cls.from_predictor(predictor, items=items)
        except BaseException:
            predictor.close()
            raise

    @classmethod
    def from_predictor(
        cls, predictor: Predictor, *, items: Sequence[Record] | Catalogue | None = None
    ) -> Recommender:
        """Build a recommender that takes a predictor over: only it may refresh and close the predictor from now on."""
        model = predictor.model
        if not isinstance(model, Retriever):
            raise ConfigError(
                f"got a {type(model).__name__}, wanted a retrieval model (two_tower, sasrec, graphsage, mrmn). Score "
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
        queries = encoder.select(
            [*model.query_features, *dense], ignored=encoder.find_columns(USER)
        )
        users = {n: ids for n, ids in catalogue.users.items() if n in model.query_features}
        catalogue = replace(catalogue, users=users)
        active = _embed_catalogue(predictor, catalogue)
        ids, order = catalogue.features.ids[model.item_features[0]].values.sort(stable=True)
        history = () if has_neighbours(predictor.schema) else _find_history(model)
        return cls(active, catalogue, queries, history, (ids, order))

    @property
    def step(self) -> int:
        """Step of the checkpoint that is recommended with."""
        return self.predictor.step

    @property
    def predictor(self) -> Predictor:
        """Predictor of that checkpoint. It is closed soon after a refresh."""
        return self._active.predictor

    @property
    def columns(self) -> frozenset[str]:
        """Columns that a record of a user may have, read or not."""
        return frozenset(self.encoder.columns) | self.encoder.ignored

    @property
    def problem(self) -> BaseException | None:
        """Error of the last refresh by `follow`, or damage detected in the background; None: neither."""
        return self._follower.problem or self.predictor.problem

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

        users         records with the raw columns of queries, as `RecordEncoder.encode` takes them; of a user of the
                      training data, columns that a record leaves out are those of the data, and of a user that the data
                      does not have they are missing values
        exclude       ids of items that each user does not get; ids that the catalogue does not have are ignored
        exclude_seen  whether a user does not get the items of its own columns, such as `history`, and those that it
                      took in training: the user whose id the record has, in the column of the training data

        Raises DataError naming user and column.
        """
        if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= MAX_K:
            raise DataError(
                f"got k={describe_value(k)}, wanted 1 to {MAX_K:,} items. Send another k"
            )
        user_ids = [r.get(self._user_column) if isinstance(r, Mapping) else None for r in users]
        positions = self._find_users(user_ids)
        encoded = self._encode_users(users, user_ids, positions)
        unnamed = sum(map(_is_empty, user_ids))
        if unnamed and not self.encoder.columns:
            raise DataError(
                f"got {unnamed:,} records without a value in {self._user_column!r}, wanted one in each, because it is "
                "all that a graph knows of a node. Send it"
            )
        batch = self._leave_out_unknown_items(encoded)
        mask = self._build_mask(batch, positions, exclude, exclude_seen)
        best = self.recommend_batch(batch, k, mask, self._mark_unknown_users(users, positions))
        sizes = [
            (encoded.ids[name].values.numel(), batch.ids[name].values.numel())
            for name in self._history
        ]
        return replace(best, num_left_out=sum(before - after for before, after in sizes))

    def recommend_batch(
        self, batch: Batch, k: int, masked: Ids, is_unknown: Tensor | bool = False
    ) -> Recommendations:
        """Recommend the k best items to each query of a batch.

        masked: bags of positions that are not recommended; is_unknown: users (B,) who get the most popular items, as
        those without any id do.
        """
        top, scores, is_empty, step = self._rank_items(batch, k, masked)
        popularity = self.catalogue.popularity
        is_popular = (is_empty | is_unknown) & (popularity is not None)
        if popularity is not None and is_popular.any():
            ranked = rank_items(torch.ones(batch.size, 1), popularity[:, None], masked, k)
            top, scores = (
                torch.where(is_popular[:, None], by_popularity, by_model)
                for by_popularity, by_model in zip(ranked, (top, scores), strict=True)
            )
        items = []
        values = []
        for row, row_scores in zip(top.numpy(), scores.tolist(), strict=True):
            row = row[row >= 0]
            items.append(self.catalogue.keys[row].tolist())
            values.append(row_scores[: len(row)])
        return Recommendations(items, values, is_popular.tolist(), step)

    def refresh(self) -> bool:
        """Move to the newest checkpoint of the publication, and return whether there was another.

        The checkpoint is loaded and its items' vectors are computed beside those in use, which answer meanwhile. Raises
        the errors of `Predictor.refresh`; the recommender then stays at its checkpoint.
        """
        with self._refresh_lock:
            previous = self._active
            if not previous.predictor.has_update():
                return False
            predictor = previous.predictor.fork()
            try:
                predictor.refresh()
                self._active = _embed_catalogue(predictor, self.catalogue)
            except BaseException:
                predictor.close()
                raise
            previous.predictor.close()  # waits for the current call; later ones take the new predictor
            return True

    def follow(self, seconds: float = 1.0) -> None:
        """Start a thread that refreshes every `seconds` until `close`. An error becomes `problem`, is counted in
        `num_failures`, and the refresh is tried again."""
        if self._follower.is_started:
            return
        self.predictor.has_update()  # raises the reason why there is nothing to follow
        self._follower.start(seconds)

    def close(self) -> None:
        """Unmap the rows after the current call has ended."""
        self._follower.stop()
        with self._refresh_lock:
            self.predictor.close()

    def __enter__(self) -> Recommender:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _rank_items(self, batch: Batch, k: int, masked: Ids) -> tuple[Tensor, Tensor, Tensor, int]:
        """Return positions and scores (B, min(k, I)) of the best items by the model, a mask (B,) of the queries without
        any id, and the step that ranked them."""
        while True:
            active = self._active
            with active.predictor.hold_checkpoint() as model:
                if active is not self._active:
                    continue  # a refresh has closed it meanwhile
                retriever = cast("Retriever", model)
                queries = retriever.queries(batch)
                best = rank_items(queries, active.vectors, masked, k, score=retriever.score)
                return *best, retriever.mark_empty_queries(batch), active.predictor.step

    def _build_mask(
        self,
        batch: Batch,
        user_positions: Tensor,
        excluded_ids: Sequence[Sequence[Any]] | None,
        exclude_seen: bool,
    ) -> Ids:
        """Build the bags (B,) of the positions that are not recommended."""
        parts = []
        if excluded_ids is not None:
            parts.append(self._find_excluded(excluded_ids, batch.size))
        if exclude_seen:
            parts += [self._find_positions(batch.ids[name]) for name in self._history]
            parts.append(self._find_seen_items(user_positions))
        return reduce(concat_bags, parts, _build_empty_bags(batch.size))

    def _find_excluded(self, excluded_ids: Sequence[Sequence[Any]], num_users: int) -> Ids:
        is_list = isinstance(excluded_ids, list | tuple) and len(excluded_ids) == num_users
        if not is_list or not all(isinstance(keys, list | tuple) for keys in excluded_ids):
            raise DataError(
                f"exclude: got {describe_value(excluded_ids)}, wanted a list of ids for each of {num_users} "
                "users. Send an "
                "empty list for a user without any"
            )
        positions = [
            self.catalogue.find_item_positions(keys, f"user {row}")
            for row, keys in enumerate(excluded_ids)
        ]
        offsets = np.cumsum([0, *map(len, positions)])
        return Ids(torch.from_numpy(np.concatenate(positions)), torch.from_numpy(offsets))

    def _find_positions(self, item_id_bags: Ids) -> Ids:
        """Return the bags of the positions of items, from bags of their ids; hashed ids may have several."""
        first = torch.searchsorted(self._item_ids, item_id_bags.values)
        counts = torch.searchsorted(self._item_ids, item_id_bags.values, right=True) - first
        ends, order = locate_bag_items(first, counts)
        offsets = item_id_bags.offsets
        return Ids(self._item_order[order], ends if offsets is None else ends[offsets])

    def _find_users(self, user_ids: Sequence[Any]) -> Tensor:
        """Return the position of each user in the training data, (B,) int64; -1 for none. Raises DataError."""
        for row, user in enumerate(user_ids):
            if isinstance(user, bool | float | list | tuple | Mapping):
                raise DataError(
                    f"record {row}, column {self._user_column}: got {describe_value(user)}, wanted an id: a text or an "
                    "integer. Send what a row of the training file has there"
                )
        keys = self.catalogue.user_keys
        if keys.dtype != object:
            return to_positions(keys, np.array([_parse_integer_key(user) for user in user_ids]))
        return to_positions(
            keys, np.array(["" if user is None else str(user) for user in user_ids], object)
        )

    def _mark_unknown_users(self, records: Sequence[Record], positions: Tensor) -> Tensor:
        """Mark the users (B,) whom the data does not have, and whose records have nothing but an id."""
        columns = [column for column in self.encoder.columns if column != self._user_column]
        is_blank = [
            all(_is_empty(record.get(c)) or not np.size(record[c]) for c in columns)
            for record in records
        ]
        return (positions < 0) & torch.tensor(is_blank)

    def _encode_users(
        self, records: Sequence[Record], user_ids: Sequence[Any], positions: Tensor
    ) -> Batch:
        """Encode records; what one with a user leaves out is taken from the data, which has nothing of new users."""
        stored = self.catalogue.users
        absent = dict.fromkeys(self.encoder.columns if stored else ())
        filled = [
            record if _is_empty(user) else {**absent, **record}
            for record, user in zip(records, user_ids, strict=True)
        ]
        batch = self.encoder.encode(filled)
        ids = dict(batch.ids)
        for name in stored:
            columns = self.encoder.find_columns(name)
            is_absent = torch.tensor([all(_is_empty(r.get(c)) for c in columns) for r in records])
            of_users = gather_ids(stored[name], positions.clamp(min=0))
            own = ids.get(name, of_users)  # the neighbours of a node are in no record
            ids[name] = select_samples(own, of_users, is_absent & (positions >= 0))
        return replace(batch, ids=ids)

    def _leave_out_unknown_items(self, batch: Batch) -> Batch:
        """Leave items out of histories that the model was not trained on: their rows say nothing."""
        if not self.catalogue.has_all_items or not len(self._item_ids):
            return batch
        ids = dict(batch.ids)
        for name in self._history:
            bags = ids[name]
            nearest = torch.searchsorted(self._item_ids, bags.values)
            is_known = self._item_ids[nearest.clamp(max=len(self._item_ids) - 1)] == bags.values
            if bags.offsets is not None:
                counts = torch.cat([is_known.new_zeros(1, dtype=torch.int64), is_known.cumsum(0)])
                ids[name] = Ids(bags.values[is_known], counts[bags.offsets])
        return replace(batch, ids=ids)

    def _find_seen_items(self, user_positions: Tensor) -> Ids:
        """Return the bags of items that the users of the training data took; empty for others."""
        taken, none = self.catalogue.taken, _build_empty_bags(len(user_positions))
        if taken is None or not len(taken.counts):
            return none
        bags = gather_ids(taken, user_positions.clamp(min=0))
        return select_samples(none, bags, user_positions >= 0)


def _build_empty_bags(size: int) -> Ids:
    return Ids(torch.empty(0, dtype=torch.int64), torch.zeros(size + 1, dtype=torch.int64))


def _is_empty(value: Any) -> bool:
    """Return whether a record has nothing in a column, as an empty cell of a CSV file; an empty list is a value."""
    return value is None or (isinstance(value, str) and not value)


def select_samples(one: Ids, other: Ids, is_other: Tensor) -> Ids:
    """Return each sample (B,) of `other` that a mask selects, and the others of `one`."""
    size = len(is_other)
    values = torch.cat([one.values, other.values])
    offsets = None
    if one.offsets is not None and other.offsets is not None:
        offsets = torch.cat([one.offsets, other.offsets[1:] + one.offsets[-1]])
    return gather_ids(Ids(values, offsets), torch.arange(size) + size * is_other)


def _parse_integer_key(value: Any) -> int:
    """Return a user's integer id; the smallest integer, which no user has, for a value that is none."""
    is_key = re.fullmatch(r"[+-]?[0-9]{1,19}", str(value)) and -(2**63) <= int(value) < 2**63
    return int(value) if is_key else -(2**63)


def _embed_catalogue(predictor: Predictor, catalogue: Catalogue) -> EmbeddedCatalogue:
    """Compute the vectors of all items."""
    with predictor.hold_checkpoint() as model:
        vectors = embed_items(cast("Retriever", model), catalogue.features)
        return EmbeddedCatalogue(predictor, to_column_major(vectors))


def _find_history(model: Retriever) -> tuple[str, ...]:
    """Return the query's features of the item's table, such as a history: their ids are items the user took."""
    features = {f.name: f.table for f in model.embeddings.declaration.features}
    table = features[model.item_features[0]]
    return tuple(name for name in model.query_features if features[name] == table)


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
    if items is not None and has_neighbours(schema):
        raise ConfigError(
            "got records of items for a graph, wanted none: its items are those of its data, which have their "
            "neighbours. Leave out items=, or --items"
        )
    if items is not None:
        return build_catalogue(model, encoder, schema, items, _find_data_catalogue(config))
    if config is None:
        raise ConfigError(
            "got a model without a configuration, wanted its catalogue. Give the records of all items: items=[...]"
        )
    return open_data_catalogue(config)


def _find_data_catalogue(config: RunConfig | None) -> Catalogue | None:
    """Open the catalogue of the model's data; None where the data are not, as beside an export on another host."""
    try:
        return None if config is None else open_data_catalogue(config)
    except ConfigError:
        return None


def open_data_catalogue(config: RunConfig) -> Catalogue:
    """Open the catalogue of the data set that a model was trained on, and what its users took."""
    try:
        splits = open_source(config.data.name, config.data.path, **config.data.options)
    except (DataError, OSError) as error:
        raise ConfigError(
            f"the items of the data that the model was trained on cannot be read: {error}. Repair that, or "
            "give the records of all items: items=[...], or --items FILE"
        ) from None
    parts = (splits.test, splits.validation, splits.train)
    source: Any = next((p for p in parts if getattr(p, "catalogue", None) is not None), None)
    if source is None:
        raise ConfigError(
            f"the {config.data.name} reader has no catalogue of items, wanted all items that may be recommended. Give "
            "their records: items=[...], or --items FILE"
        )
    item_keys = np.arange(source.catalogue.num_samples)
    if not isinstance(source, QuerySource):
        return Catalogue(source.catalogue, item_keys)
    split = source.interactions
    taken = reduce(concat_bags, (*source.excluded, source.truth))
    users = dict(source.users)
    if source.history:
        users["history"] = truncate_to_newest_items(split.get_item_ids(taken), source.max_history)
    user_keys = np.arange(len(taken.counts)) if split.user_keys is None else split.user_keys
    item_keys = item_keys if split.item_keys is None else split.item_keys
    return Catalogue(source.catalogue, item_keys, taken, user_keys, users, True, split.log_shares())


def build_catalogue(
    model: Retriever,
    encoder: RecordEncoder,
    schema: Schema,
    records: Sequence[Record],
    known: Catalogue | None = None,
) -> Catalogue:
    """Build a catalogue from records of items, which have the raw columns of the item's features.

    known: catalogue of the model's data, whose users and popularity the new one takes over. The item's id is the column
    of the first of `model.item_features`. Raises DataError for a missing or repeated id.
    """
    dense = [] if model.log_q is None else [schema.dense[model.log_q]]
    items = encoder.select([*model.item_features, *dense])
    id_column = items.find_columns(model.item_features[0])[0]
    keys = [record.get(id_column) for record in records]
    if known is not None and known.keys.dtype != object:
        keys = [_read_integer(key) for key in keys]  # as in the data: a CSV file has texts
    shares = _find_shares(keys, known)
    batch = items.encode(
        [{**dict.fromkeys(dense, x), **record} for x, record in zip(shares, records, strict=True)]
    )
    order = _sort_keys(keys, id_column)
    features = TensorColumns(dense=batch.dense, ids=batch.ids)
    ordered = features.gather_rows(torch.from_numpy(order))
    dtype: Any = object if isinstance(keys[0], str) else np.int64
    catalogue = Catalogue(
        replace(features, dense=ordered.dense, ids=ordered.ids),
        np.array([keys[i] for i in order], dtype=dtype),
    )
    if known is None or known.popularity is None or known.keys.dtype != catalogue.keys.dtype:
        return catalogue
    return _add_users(catalogue, known, torch.tensor([shares[i] for i in order]))


def _find_shares(item_ids: Sequence[Any], known: Catalogue | None) -> list[float]:
    """Return the log of each item's share of the training interactions, the least for items that had none; zeros where
    shares are unknown, so that items are ranked by their vectors alone."""
    if known is None or known.popularity is None:
        return [0.0] * len(item_ids)
    shares = dict(zip(known.keys.tolist(), known.popularity.tolist(), strict=True))
    least = min(shares.values())
    return [shares.get(key, least) if isinstance(key, str | int) else least for key in item_ids]


def _add_users(catalogue: Catalogue, known: Catalogue, popularity: Tensor) -> Catalogue:
    """Return the catalogue with the users of another one, what they took of its items, and a popularity (I,)."""
    if known.taken is None:
        return replace(catalogue, popularity=popularity)
    positions = to_positions(catalogue.keys, known.keys)[known.taken.values.long()]
    is_there = positions >= 0
    sizes = torch.bincount(known.taken.samples[is_there], minlength=len(known.taken.counts))
    taken = Ids(positions[is_there], torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]))
    users = known.user_keys, known.users
    return Catalogue(catalogue.features, catalogue.keys, taken, *users, popularity=popularity)


def _read_integer(key: Any) -> Any:
    """Return the integer that a text has the digits of; other values as they are."""
    try:
        return int(key) if isinstance(key, str) else key
    except ValueError:
        return key


def _sort_keys(item_ids: Sequence[Any], key_column: str) -> NDArray[np.int64]:
    """Return the order of ids, ascending. Raises DataError for missing, mixed or repeated ones."""
    kind = str if isinstance(item_ids[0], str) else int
    rows: dict[Any, int] = {}
    for row, key in enumerate(item_ids):
        if isinstance(key, bool) or not isinstance(key, kind):
            raise DataError(
                f"record {row}, column {key_column}: got {describe_value(key)}, wanted the id of an item: "
                "all texts, or "
                "all integers. Send one with each item"
            )
        if (first := rows.setdefault(key, row)) != row:
            raise DataError(
                f"record {row}, column {key_column}: got {describe_value(key)}, which record {first} has, "
                "wanted each item "
                "once. Leave one of them out"
            )
    return np.array(sorted(range(len(item_ids)), key=item_ids.__getitem__), np.int64)
