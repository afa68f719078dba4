"""One native call reads a batch's rows from mapped files: the bits of the step-by-step path, and no word for what is
unusual, which that path names. Features with one sample are looked up once for all samples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from colonnade import (
    Batch,
    Concat,
    EmbeddingCollection,
    Feature,
    Ids,
    Predictor,
    Table,
)
from colonnade.batch import SharedIds, share_samples
from colonnade.errors import ConfigError, DataError, IdRangeError, NonFiniteError
from colonnade.files.checksums import compute_checksums
from colonnade.interaction import TargetAttention
from colonnade.lookup.layout import declare
from colonnade.lookup.row_access import MappedLookup
from colonnade.store.mapped import MappedRows, open_mapped

DTYPES = ["float32", "float64", "bfloat16", "float16"]
EXTREMES = [0, -1, 2**63 - 1, -(2**63), 2**40]
SIZES = [0, 1, 2, 7, 31]


def write_rows(folder: Path, tables: list[Table], stored: list[list[int]]) -> MappedRows:
    """Write rows of these ids with random weights, and map them. No thread checks them."""
    files = []
    for t, (table, ids) in enumerate(zip(tables, stored, strict=True)):
        weights = torch.randn(len(ids), table.width).to(getattr(torch, table.dtype))
        path = folder / f"{t}.safetensors"
        save_file({"ids": torch.tensor(ids, dtype=torch.int64), "weights": weights}, path)
        files.append((path.name, compute_checksums(path)))
    return open_mapped(tables, folder, files, seed=3)


def read_both(lookup: MappedLookup, batch: Batch) -> list[Tensor]:
    """Read a batch by both paths and return the outputs. Their bits must be equal, and the native path may not give
    up."""
    expected = lookup.read_checked(batch)
    ids = batch.ids
    is_sharing = isinstance(ids, SharedIds)
    outputs = lookup.rows.read(
        lookup.reader, ids.compact if isinstance(ids, SharedIds) else ids, batch.size, is_sharing=is_sharing
    )  # fmt: skip
    assert outputs is not None
    for output, wanted in zip(outputs, expected, strict=True):
        assert output.dtype == wanted.dtype and output.shape == wanted.shape
        assert output.view(torch.uint8).tolist() == wanted.view(torch.uint8).tolist()
    return outputs


@st.composite
def collections(draw):
    """Tables, the ids of their rows, features and consumers of all kinds."""
    dtype = draw(st.sampled_from(DTYPES))
    tables, stored = [], []
    for t in range(draw(st.integers(1, 3))):
        rows = draw(st.sampled_from([None, 1, 7, 300, 200_000]))
        ids = st.sampled_from(EXTREMES) | st.integers(-50, 50)
        if rows is not None:
            ids = st.integers(0, rows - 1)
        dims = draw(st.sampled_from([1, 3, 8, 16, {"deep": 5, "wide": 1}]))
        tables.append(Table(f"t{t}", dims, rows=rows, dtype=dtype))
        stored.append(sorted(draw(st.sets(ids, max_size=40))))
        if rows == 7 and draw(st.booleans()):
            stored[-1] = list(range(7))  # all of them
    poolings = st.sampled_from(["sum", "mean", "sqrtn", "sequence"])
    features = [
        Feature(f"f{f}", f"t{draw(st.integers(0, len(tables) - 1))}", pooling=draw(poolings))
        for f in range(draw(st.integers(1, 5)))
    ]
    output = (
        None
        if dtype == "float64"
        else getattr(torch, draw(st.sampled_from([*DTYPES[:1], *DTYPES[2:]])))
    )
    fields = [f.name for f in declare(tables, features, {}, output).fields]
    sequences = [f.name for f in features if f.pooling == "sequence"]
    pooled = [name for name in fields if name.partition(".")[0] not in sequences]
    consumers = {}
    if pooled and draw(st.booleans()):
        consumers["side by side"] = (Concat(), draw(st.permutations(pooled)))
        consumers["reversed"] = (Concat(), pooled[::-1])
    return tables, stored, declare(tables, features, consumers, output)


def draw_ids(draw, table: Table, stored: list[int], size: int, is_bag: bool) -> Ids:
    """Draw a feature's ids: stored and absent ones, in bags of 0 to 3 with or without weights, or one per sample."""
    any_id = st.sampled_from(EXTREMES) | st.integers(-60, 60)
    if table.rows is not None:
        any_id = st.integers(0, table.rows - 1)
    known = st.sampled_from(stored) if stored else any_id
    lengths = (
        draw(st.lists(st.integers(0, 3), min_size=size, max_size=size)) if is_bag else [1] * size
    )
    total = sum(lengths)
    values = torch.tensor(
        draw(st.lists(known | any_id, min_size=total, max_size=total)), dtype=torch.int64
    )
    offsets = torch.tensor([0, *lengths]).cumsum(0) if is_bag else None
    weights = None
    if draw(st.booleans()):
        weights = torch.randn(total, dtype=getattr(torch, table.compute_dtype))
    return Ids(values, offsets, weights)


@settings(max_examples=examples(30, 400))
@given(st.data(), collections())
def test_one_call_has_the_bits_of_the_step_by_step_path(tmp_path_factory, data, collection):
    tables, stored, declaration = collection
    rows = write_rows(tmp_path_factory.mktemp("rows"), tables, stored)
    lookup = MappedLookup(declaration, rows)
    for _ in range(2):
        for t, table in enumerate(tables):  # rows that change, in the file or not, and rows that go
            if not data.draw(st.booleans()):
                continue
            any_id = st.integers(0, (table.rows or 60) - 1) | st.sampled_from(stored[t] or [0])
            changed = torch.tensor(
                sorted(data.draw(st.sets(any_id, max_size=5))), dtype=torch.int64
            )
            gone = torch.tensor(sorted(data.draw(st.sets(any_id, max_size=3))), dtype=torch.int64)
            weights = torch.randn(len(changed), table.width).to(getattr(torch, table.dtype))
            rows.apply_delta(t, changed, weights, gone)
        size = data.draw(st.sampled_from(SIZES))
        ids = {}
        for feature in declaration.features:
            t = declaration.table_index_of(feature)
            is_shared, is_bag = data.draw(st.booleans()), data.draw(st.booleans())
            num_samples = 1 if is_shared else size
            ids[feature.name] = draw_ids(data.draw, tables[t], stored[t], num_samples, is_bag)
        batch = share_samples(Batch(size, torch.zeros(size, 0), ids))
        outputs = read_both(lookup, batch)
        if isinstance(batch.ids, SharedIds):  # as copies that the user makes
            copies = read_both(lookup, replace(batch, ids=dict(batch.ids)))
            assert all(map(torch.equal, copies, outputs))
    rows.close()
    with pytest.raises(ConfigError, match="closed"):
        read_both(lookup, batch)


@pytest.fixture
def lookup(tmp_path):
    """Lookups of a one-hot feature, a weighted bag and a feature of an open table."""
    tables = [Table("user", 4, rows=50), Table("item", 4)]
    features = [
        Feature("user", "user"),
        Feature("bag", "user", pooling="mean"),
        Feature("item", "item"),
    ]
    rows = write_rows(tmp_path, tables, [list(range(50)), [3, 5, 7]])
    yield MappedLookup(declare(tables, features, {}), rows)
    rows.close()


def plain_batch(**changed: Ids) -> Batch:
    ids = {
        "user": Ids(torch.tensor([4, 49, 0])),
        "bag": Ids(torch.tensor([1, 2]), torch.tensor([0, 2, 2, 2]), torch.tensor([0.5, 2.0])),
        "item": Ids(torch.tensor([5, 6, 2**63 - 1])),
    }
    return Batch(3, torch.zeros(3, 0), ids | changed)


BAG = (torch.tensor([1, 2]), torch.tensor([0, 2, 2, 2]))
INVALID = {
    "id of the size": ({"user": Ids(torch.tensor([4, 50, 0]))}, IdRangeError, "got id 50"),
    "id below 0": ({"bag": Ids(torch.tensor([1, -1]), BAG[1])}, IdRangeError, "got id -1"),
    "least id": ({"user": Ids(torch.tensor([0, 0, -(2**63)]))}, IdRangeError, "'user', lookup 2"),
    "int32": ({"user": Ids(torch.tensor([4, 4, 4], dtype=torch.int32))}, DataError, "int32"),
    "matrix": ({"user": Ids(torch.zeros(3, 1, dtype=torch.int64))}, DataError, "shape"),
    "array": ({"user": Ids(torch.tensor([4, 4, 4]).numpy())}, DataError, "ndarray"),
    "no ids": ({"user": torch.tensor([4, 4, 4])}, DataError, "wanted Ids"),
    "too few": ({"user": Ids(torch.tensor([4, 4]))}, DataError, "2 ids for 3 samples"),
    "one": ({"user": Ids(torch.tensor([4]))}, DataError, "1 ids for 3 samples"),
    "one bag": ({"bag": Ids(BAG[0], torch.tensor([0, 2]))}, DataError, r"offsets of .* \(2,\)"),
    "decreasing": ({"bag": Ids(BAG[0], torch.tensor([0, 2, 1, 2]))}, DataError, "never decrease"),
    "late start": ({"bag": Ids(BAG[0], torch.tensor([1, 2, 2, 2]))}, DataError, "offsets from 1"),
    "early end": ({"bag": Ids(BAG[0], torch.tensor([0, 1, 1, 1]))}, DataError, "offsets from 0 to 1"),
    "offsets beyond": ({"bag": Ids(BAG[0], torch.tensor([0, 2, 2, 9]))}, DataError, "to 9 for 2 ids"),
    "no offsets": ({"bag": Ids(BAG[0], torch.tensor([], dtype=torch.int64))}, DataError, r"\(0,\)"),
    "int32 offsets": ({"bag": Ids(BAG[0], BAG[1].int())}, DataError, "int32"),
    "weights": ({"bag": Ids(*BAG, torch.ones(3))}, DataError, "3 weights for 2 ids"),
    "infinite": ({"bag": Ids(*BAG, torch.tensor([1, torch.inf]))}, NonFiniteError, "'bag'"),
    "nan": ({"bag": Ids(*BAG, torch.tensor([torch.nan, 1]))}, NonFiniteError, "'bag'"),
    "gradient": ({"bag": Ids(*BAG, torch.ones(2, requires_grad=True))}, DataError, "gradient"),
}  # fmt: skip


@pytest.mark.parametrize("kind", INVALID)
def test_invalid_input_is_left_to_the_path_that_names_it(kind, lookup):
    changed, error, match = INVALID[kind]
    batch = plain_batch()
    read_both(lookup, batch)
    invalid = plain_batch(**changed)
    assert lookup.rows.read(lookup.reader, invalid.ids, 3, is_sharing=False) is None
    with pytest.raises(error, match=match):
        lookup.read(invalid, torch.device("cpu"))
    read_both(lookup, batch)  # and nothing is left behind


def test_an_absent_feature_is_named(lookup):
    batch = plain_batch()
    del batch.ids["item"]
    assert lookup.rows.read(lookup.reader, batch.ids, 3, is_sharing=False) is None
    with pytest.raises(DataError, match="no feature 'item'"):
        lookup.read(batch, torch.device("cpu"))


def test_unusual_tensors_have_the_same_values(lookup):
    wanted = read_both(lookup, plain_batch())
    strided = torch.tensor([4, 0, 49, 0, 0, 0])[::2]
    half = Ids(*BAG, torch.tensor([0.5, 2.0], dtype=torch.float16))
    for changed in ({"user": Ids(strided)}, {"bag": half}, {"user": Ids(strided), "bag": half}):
        outputs = lookup.read(plain_batch(**changed), torch.device("cpu"))
        assert all(map(torch.equal, outputs.values(), wanted))


def test_ids_without_memory_are_refused(lookup):
    for freed in (torch.tensor([4, 49, 0]), torch.tensor([4])):
        freed.untyped_storage().resize_(0)
        with pytest.raises(DataError, match=r"feature .user.: got ids .* whose storage was freed"):
            lookup.read(plain_batch(user=Ids(freed)), torch.device("cpu"))


def test_blocks_are_checked_before_the_native_call_reads_them(lookup):
    batch = plain_batch()
    for table in lookup.rows.tables:
        table.file.file.checked[:] = 0  # reading the ids at the start checked these small files
    assert lookup.rows.read(lookup.reader, batch.ids, 3, is_sharing=False) is None
    lookup.read(batch, torch.device("cpu"))
    assert all(table.file.file.checked.all() for table in lookup.rows.tables)
    assert lookup.rows.read(lookup.reader, batch.ids, 3, is_sharing=False) is not None


class Shop(torch.nn.Module):
    """Network with what a request shares: a user, the user's past and its number of visits; it reads `batch.ids`."""

    def __init__(self, hashes: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embeddings = EmbeddingCollection(
            [Table("user", 4, rows=50), Table("item", 4, rows=30 if hashes else None, hashes=hashes)],
            [
                Feature("user", "user"), Feature("item", "item"), Feature("likes", "item", pooling="mean"),
                Feature("past", "item", pooling="sequence"),
            ],
            consumers={
                "fields": (Concat(), ["user", "item", "likes"]),
                "attended": (TargetAttention(), ["item", "past"]),
            },
            seed=5,
        )  # fmt: skip
        self.top = torch.nn.Linear(12 + 4 + 2, 1)

    def forward(self, batch: Batch) -> Tensor:
        outputs = self.embeddings(batch)
        counts = batch.ids["past"].counts[:, None].float()
        x = [outputs["fields"], outputs["attended"], counts, batch.dense]
        return self.top(torch.cat(x, 1))


def user_and_candidates(size: int) -> tuple[Batch, Batch]:
    """Return the same request twice: with one user, and with a copy of the user for each candidate."""
    random = torch.Generator().manual_seed(size)
    items = Ids(torch.randint(0, 100, (size,), generator=random))
    user = {
        "user": Ids(torch.tensor([7])),
        "likes": Ids(torch.tensor([9, 2, 2]), torch.tensor([0, 3]), torch.tensor([0.5, -1.0, 2.0])),
        "past": Ids(torch.tensor([4, 2**62, 5, 5]), torch.tensor([0, 4])),
    }
    copies = {
        "user": Ids(user["user"].values.repeat(size)),
        "likes": Ids(user["likes"].values.repeat(size), torch.arange(size + 1) * 3, user["likes"].weights.repeat(size)),
        "past": Ids(user["past"].values.repeat(size), torch.arange(size + 1) * 4),
    }  # fmt: skip
    dense = torch.tensor([[3.5]])
    return (
        Batch(size, dense, {**user, "item": items}),
        Batch(size, dense.repeat(size, 1), {**copies, "item": items}),
    )


def serve(model: Shop, folder: Path) -> Predictor:
    stored = [list(range(50)), list(range(0, 30, 2))]
    rows = write_rows(folder, list(model.embeddings.tables), stored)
    model.embeddings.open_exported(rows)
    model.eval().requires_grad_(False)
    return Predictor(model, rows, schema=None, config=None, step=1, folder=folder)


@pytest.mark.parametrize("hashes", [None, 3])
def test_one_user_for_all_candidates_scores_as_copies_do(hashes, tmp_path, monkeypatch):
    predictor = serve(Shop(hashes), tmp_path)
    num_lookups = []
    read = MappedRows.read

    def count_lookups(rows, reader, ids, size, *, is_sharing):
        num_lookups.append({name: len(feature.values) for name, feature in ids.items()})
        return read(rows, reader, ids, size, is_sharing=is_sharing)

    monkeypatch.setattr(MappedRows, "read", count_lookups)
    for size in (1, 2, 7, 100):
        one_user, copies = user_and_candidates(size)
        scores = predictor(one_user)
        assert scores.shape == (size, 1) and torch.equal(scores, predictor(copies))
        assert torch.equal(scores, predictor(one_user))  # once more, with all blocks checked
        times = hashes or 1
        shared = {"user": 1, "likes": 3 * times, "past": 4 * times, "item": size * times}
        assert num_lookups[-1] == shared
        assert num_lookups[-2] == shared | {
            "user": size,
            "likes": 3 * times * size,
            "past": 4 * times * size,
        }
    empty = replace(
        one_user, size=0, ids={**one_user.ids, "item": Ids(torch.empty(0, dtype=torch.int64))}
    )
    assert predictor(empty).shape == (0, 1)
    predictor.close()


def test_sharing_is_refused_elsewhere(tmp_path):
    one_user, copies = user_and_candidates(5)
    predictor = serve(Shop(), tmp_path)
    predictor(copies)
    with pytest.raises(DataError, match="got 1 ids for 5 samples"):
        predictor.model(one_user)
    training = Shop()
    for model in (training, training.eval()):
        with pytest.raises(DataError, match="1 ids for 5 samples"):
            model(one_user)
    predictor.close()


def test_an_invalid_shared_feature_is_named(tmp_path):
    predictor = serve(Shop(), tmp_path)
    one_user, _ = user_and_candidates(5)
    cases = [
        (Ids(torch.tensor([50])), IdRangeError, "'user'.*got id 50"),
        (Ids(torch.tensor([1, 2])), DataError, "2 ids for 5 samples"),
        (Ids(torch.tensor([1]), torch.tensor([0, 2])), DataError, "'user'.*offsets"),
        (Ids(torch.tensor([1]), weights=torch.tensor([torch.nan])), NonFiniteError, "'user'"),
    ]
    for ids, error, match in cases:
        with pytest.raises(error, match=match):
            predictor(replace(one_user, ids={**one_user.ids, "user": ids}))
    predictor.close()


def test_a_model_that_replaces_ids_is_looked_up_by_them(tmp_path):
    model = Shop()
    predictor = serve(model, tmp_path)
    one_user, copies = user_and_candidates(3)
    other = Ids(torch.tensor([1, 2, 3]))
    forward = model.forward
    model.forward = lambda batch: forward(replace(batch, ids={**batch.ids, "user": other}))
    assert torch.equal(predictor(one_user), predictor(copies))
    predictor.close()
