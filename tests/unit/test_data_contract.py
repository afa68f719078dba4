"""The law of data/contract.py, over every source: blocks of ranks make the batch, and any position resumes."""

from __future__ import annotations

import itertools

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from criteo_files import write_criteo
from hypothesis import given
from hypothesis import strategies as st
from movielens_files import write_movielens
from table_files import DECLARATION, write_folder

from colonnade.batch import Batch, Ids
from colonnade.data import Position, num_steps, open_source, open_tensors
from colonnade.data.contract import iterate_rank_blocks, rank_block
from colonnade.data.tabular.fields import Number
from colonnade.errors import ConfigError, DataError


def open_columns():
    lengths = torch.arange(61) % 4
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    bag = Ids(torch.arange(int(offsets[-1])), offsets, torch.rand(int(offsets[-1])))
    return open_tensors(
        {"one": torch.arange(61) * 7, "bag": bag},
        dense=torch.arange(122.0).reshape(61, 2),
        label=(torch.arange(61) % 2).float(),
        sample_weight=torch.rand(61),
        group=torch.arange(61) // 5,
        shuffle_seed=3,
    )


def open_tables(folder, kind, **options):
    """Blocks of ten rows in several files, every kind of column."""
    return open_source(kind, write_folder(folder, kind, 87), schema=DECLARATION, **options)


def open_memory(folder):
    """A table in memory, shuffled, joined with a table of its keys."""
    table = pq.read_table(write_folder(folder, "parquet", 87))
    join = {"row": pa.table({"row": range(80), "size": [i / 2 for i in range(80)]})}
    schema = [*DECLARATION.fields, Number("size", missing=0.0)]
    return open_source("arrow", table, schema=schema, join=join, shuffle_window=25)


SOURCES = {
    "synthetic": lambda p: open_source("synthetic", num_train=61, max_cardinality=50).train,
    "synthetic, everything": lambda p: (
        open_source("synthetic", num_train=61, cardinalities=[5, 9], bags=[8, 3]).train
    ),
    "criteo, streamed": lambda p: open_source("criteo", write_criteo(p, 61), test_fraction=0).train,
    "criteo, test": lambda p: open_source("criteo", write_criteo(p, 300)).test,
    "criteo, shuffled": lambda p: (
        open_source("criteo", write_criteo(p, 76), shuffle_window=30).train
    ),
    "movielens, train": lambda p: open_source("movielens", write_movielens(p)).train,
    "movielens, test": lambda p: open_source("movielens", write_movielens(p)).test,
    "tensors": lambda p: open_columns(),
    "parquet": lambda p: open_tables(p, "parquet").train,
    "parquet, shuffled": lambda p: open_tables(p, "parquet", shuffle_window=25, threads=2).train,
    "parquet, shuffled, by key": lambda p: (
        open_tables(p, "parquet", shuffle_window=25, test_fraction=0.3, split_by="user").train
    ),
    "parquet, test": lambda p: open_tables(p, "parquet", test_fraction=0.7).test,
    "parquet, a day": lambda p: open_tables(p, "parquet", days=True).days[-1],
    "table in memory": lambda p: open_memory(p).train,
    "csv": lambda p: open_tables(p, "csv").train,
    "csv, shuffled": lambda p: open_tables(p, "csv", shuffle_window=30, test_fraction=0.1).train,
}


@pytest.fixture(params=SOURCES)
def source(request, tmp_path, monkeypatch):
    monkeypatch.setattr("colonnade.data.tabular.csv.BLOCK_BYTES", 500)
    return SOURCES[request.param](tmp_path)


def same(a: Batch, b: Batch) -> bool:
    def equal(x, y):
        if x is None or y is None:
            return x is y
        return x.dtype == y.dtype and torch.equal(x, y)

    plain = ("dense", "label", "sample_weight", "group", "key")
    parts = ("values", "offsets", "weights")
    return (
        a.size == b.size
        and a.ids.keys() == b.ids.keys()
        and all(equal(getattr(a, name), getattr(b, name)) for name in plain)
        and all(equal(getattr(a.ids[f], p), getattr(b.ids[f], p)) for f in a.ids for p in parts)
    )


def joined(blocks: list[Batch]) -> Batch:
    """Ranks' blocks end to end, one sample after another: the slow definition of a global batch."""

    def cat(tensors):
        return None if tensors[0] is None else torch.cat(tensors)

    ids = {}
    for name in blocks[0].ids:
        columns = [block.ids[name] for block in blocks]
        offsets = None
        if columns[0].offsets is not None:
            lengths = torch.cat([column.offsets.diff() for column in columns])
            offsets = torch.tensor([0, *itertools.accumulate(lengths.tolist())])
        ids[name] = Ids(
            cat([c.values for c in columns]), offsets, cat([c.weights for c in columns])
        )
    return Batch(
        size=sum(block.size for block in blocks),
        dense=cat([block.dense for block in blocks]),
        ids=ids,
        label=cat([block.label for block in blocks]),
        sample_weight=cat([block.sample_weight for block in blocks]),
        group=cat([block.group for block in blocks]),
        key=cat([block.key for block in blocks]),
    )


def test_a_batch_is_what_batch_py_and_the_schema_say(source):
    assert source.num_samples == sum(batch.size for batch in source.batches(16))
    for batch in source.batches(16):
        assert batch.dense.shape == (batch.size, len(source.schema.dense))
        assert batch.dense.dtype == torch.float32 and batch.dense.isfinite().all()
        assert (
            batch.label.shape == (batch.size, len(source.schema.labels))
            and batch.label.dtype == torch.float32
        )
        assert ((batch.label == 0) | (batch.label == 1)).all()
        assert list(batch.ids) == [column.name for column in source.schema.categorical]
        for column in source.schema.categorical:
            ids = batch.ids[column.name]
            assert ids.values.dtype == torch.int64 and ids.values.is_contiguous()
            assert (ids.offsets is not None) == (column.kind != "one")
            if column.kind != "one":
                assert ids.offsets.dtype == torch.int64 and ids.offsets[0] == 0
                assert ids.offsets[-1] == len(ids.values) and len(ids.offsets) == batch.size + 1
            else:
                assert ids.values.shape == (batch.size,)
            if column.cardinality is not None:
                assert ((ids.values >= 0) & (ids.values < column.cardinality)).all()


EVERY_SIZE = [(num_ranks, size) for num_ranks in (2, 3, 7) for size in (5, 16, 1000)]
TYPICAL_SIZES = {(2, 16), (3, 5), (7, 1000)}
"""Every number of ranks and every size of a batch once, small batches to few ranks; the other pairs are slow."""


@pytest.mark.parametrize(
    ("num_ranks", "batch_size"),
    [
        pytest.param(*pair, marks=() if pair in TYPICAL_SIZES else pytest.mark.slow)
        for pair in EVERY_SIZE
    ],
)
def test_ranks_blocks_make_the_batch_of_one_rank(source, num_ranks, batch_size):
    """Also where the last batch has fewer samples than there are ranks."""
    whole = list(source.batches(batch_size, start=Position(1, 0)))
    assert len(whole) == num_steps(source.num_samples, batch_size)
    by_rank = [
        list(source.batches(batch_size, rank=r, num_ranks=num_ranks, start=Position(1, 0)))
        for r in range(num_ranks)
    ]
    for batch, *blocks in zip(whole, *by_rank, strict=True):
        assert same(joined(blocks), batch)
        sizes = [block.size for block in blocks]
        assert max(sizes) - min(sizes) <= 1


def test_any_position_resumes_exactly(source):
    whole = list(source.batches(16, rank=1, num_ranks=2, start=Position(2, 0)))
    for step in (1, 3, 4, 9):
        rest = list(source.batches(16, rank=1, num_ranks=2, start=Position(2, step)))
        assert len(rest) == len(whole[step:]), step
        assert all(same(a, b) for a, b in zip(rest, whole[step:], strict=True)), step


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_small_last_batch_is_dropped_or_merged(source, num_ranks):
    size = next(size for size in (16, 17) if source.num_samples % size)
    whole = list(source.batches(size))

    def read(last_batch, step):
        by_rank = [
            source.batches(
                size, rank=r, num_ranks=num_ranks, start=Position(0, step), last_batch=last_batch
            )
            for r in range(num_ranks)
        ]
        return [joined(blocks) for blocks in zip(*by_rank, strict=True)]

    assert num_steps(source.num_samples, size, "drop") == len(whole) - 1
    assert num_steps(source.num_samples, size, "merge") == len(whole) - 1
    for step in (0, len(whole) - 2, len(whole) - 1):
        wanted = {"drop": whole[step:-1], "merge": [*whole[step:-2], joined(whole[-2:])]}
        for last_batch, batches in wanted.items():
            batches = batches if step < len(whole) - 1 else []
            result = read(last_batch, step)
            assert len(result) == len(batches)
            assert all(same(a, b) for a, b in zip(result, batches, strict=True))


def test_an_epoch_reads_every_sample_once_and_batch_size_does_not_reorder(source):
    small = joined(list(source.batches(3)))
    assert same(small, joined(list(source.batches(1000))))


def test_bad_arguments_are_refused_at_the_call(source):
    with pytest.raises(ConfigError, match="batch_size=0"):
        source.batches(0)
    with pytest.raises(ConfigError, match="rank=2 of num_ranks=2"):
        source.batches(4, rank=2, num_ranks=2)
    with pytest.raises(ConfigError, match="step=-1"):
        source.batches(4, start=Position(0, -1))


@given(st.integers(0, 10**12), st.integers(1, 2000))
def test_shares_tile_and_differ_by_at_most_one(size, num_ranks):
    blocks = [rank_block(size, r, num_ranks) for r in range(num_ranks)]
    assert blocks[0][0] == 0 and blocks[-1][1] == size
    assert all(a[1] == b[0] for a, b in itertools.pairwise(blocks))
    sizes = [end - begin for begin, end in blocks]
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(0, 200), st.integers(1, 50), st.integers(1, 5), st.integers(0, 12))
def test_spans_of_all_ranks_tile_the_rest_of_the_epoch(num_samples, batch_size, num_ranks, step):
    by_rank = [
        list(
            iterate_rank_blocks(
                num_samples, batch_size, rank=r, num_ranks=num_ranks, start=Position(0, step)
            )
        )
        for r in range(num_ranks)
    ]
    read = [i for blocks in zip(*by_rank, strict=True) for b, e in blocks for i in range(b, e)]
    assert read == list(range(min(step * batch_size, num_samples), num_samples))
    assert len(by_rank[0]) == max(num_steps(num_samples, batch_size) - step, 0)


def test_an_unknown_source_lists_the_known_ones():
    with pytest.raises(
        ConfigError, match="'creteo'; choose from arrow, criteo, csv, edges, fb15k237, gowalla"
    ):
        open_source("creteo")


def test_an_unknown_option_names_the_nearest():
    with pytest.raises(ConfigError, match="no option 'num_trian'; did you mean 'num_train'"):
        open_source("synthetic", num_trian=10)
    with pytest.raises(ConfigError, match="no option 'path'"):
        open_source("synthetic", "/data")


@pytest.mark.parametrize("name", ["criteo", "movielens"])
def test_absent_data_says_where_it_looked(name, tmp_path, monkeypatch):
    monkeypatch.delenv("COLONNADE_DATA", raising=False)
    with pytest.raises(DataError, match=r"COLONNADE_DATA not set.*--path"):
        open_source(name)
    monkeypatch.setenv("COLONNADE_DATA", str(tmp_path))
    with pytest.raises(DataError, match=f"looked at {tmp_path}/"):
        open_source(name)
    with pytest.raises(DataError, match=r"looked at .*/nowhere"):
        open_source(name, tmp_path / "nowhere")


def test_data_is_found_by_variable_file_or_folder(tmp_path, monkeypatch):
    folder = write_criteo(tmp_path / "criteo10k", 20)
    monkeypatch.setenv("COLONNADE_DATA", str(tmp_path))
    sizes = {
        open_source("criteo", path).train.num_samples
        for path in (None, tmp_path, folder, folder / "train.txt")
    }
    assert sizes == {16}


def test_a_batch_is_not_touched_by_the_next(source):
    """The consumer may hold several batches at a time (lookahead)."""
    batches = source.batches(8)
    first = next(batches)
    retained = {name: ids.values.clone() for name, ids in first.ids.items()}
    list(batches)
    assert all(torch.equal(retained[name], ids.values) for name, ids in first.ids.items())
