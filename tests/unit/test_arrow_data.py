"""Arrow tables, pyarrow data sets and tables of other libraries, read as the Parquet file of the same table."""

from __future__ import annotations

import decimal
import pickle
import warnings
from datetime import datetime, timedelta

import pyarrow as pa
import pyarrow.csv
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from table_files import DECLARATION, TYPES, samples
from test_data_contract import joined, same

from colonnade.data import open_arrow, open_interactions, open_parquet, open_source
from colonnade.data.contract import Position
from colonnade.errors import ConfigError, DataError

DAY = datetime(2024, 3, 1)
TEXTS = ["a", "b|c", "", "Łódź", "a longer text than a view holds in place"]
KINDS = {
    "text": (pa.string(), st.sampled_from(TEXTS)),
    "large": (pa.large_string(), st.sampled_from(TEXTS)),
    "view": (pa.string_view(), st.sampled_from(TEXTS)),
    "bytes": (pa.binary(), st.sampled_from([b"x", b"yz"])),
    "words": (pa.dictionary(pa.int8(), pa.string()), st.sampled_from(TEXTS)),
    "user_id": (pa.int64(), st.integers(-(2**62), 2**62)),
    "small": (pa.uint8(), st.integers(0, 255)),
    "flag": (pa.bool_(), st.booleans()),
    "price": (pa.float32(), st.floats(-1e6, 1e6, width=32)),
    "cost": (pa.decimal128(9, 2), st.decimals(-100, 100, places=2)),
    "created_at": (pa.timestamp("ms"), st.integers(0, 10**6).map(lambda s: DAY + timedelta(0, s))),
    "date": (pa.date32(), st.integers(0, 90).map(lambda d: (DAY + timedelta(d)).date())),
    "tags": (pa.list_(pa.string()), st.lists(st.sampled_from(TEXTS), max_size=3)),
    "views": (pa.list_(pa.string_view()), st.lists(st.sampled_from(TEXTS), max_size=3)),
    "history": (pa.large_list(pa.int32()), st.lists(st.integers(0, 9), max_size=3)),
    "vector": (pa.list_(pa.float32()), st.lists(st.just(0.5), max_size=2)),
    "nothing": (pa.null(), st.none()),
}


@st.composite
def tables(draw):
    """Draw a table with a label and some columns of any kind, with nulls, in chunks that may be empty."""
    names = draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, unique=True))
    size = draw(st.integers(1, 30))
    columns = {"label": pa.array([draw(st.integers(0, 1)) for _ in range(size)], pa.int8())}
    for name in names:
        kind, values = KINDS[name]
        drawn = draw(st.lists(st.none() | values, min_size=size, max_size=size))
        columns[name] = pa.array(drawn, kind)
    table = pa.table(columns)
    cuts = sorted(draw(st.lists(st.integers(0, size), max_size=3)))
    parts = [table.slice(a, b - a) for a, b in zip([0, *cuts], [*cuts, size], strict=True)]
    return pa.concat_tables(parts)


def read(opener, source, **options):
    """Return schema and batches of an epoch, or the type of the error and what it wants."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            splits = opener(source, **options)
        train = splits.train
        return train.file_schema, [*train.batches(7), *train.batches(7, start=Position(1))]
    except (ConfigError, DataError) as error:
        return type(error), str(error).partition("got")[2].partition(". ")[0]


def assert_alike(one, other):
    assert one[0] == other[0]
    if isinstance(one[1], str):
        assert one[1] == other[1]
        return
    assert len(one[1]) == len(other[1])
    assert all(same(a, b) for a, b in zip(one[1], other[1], strict=True))


@settings(max_examples=examples(20, 120), deadline=None)
@given(table=tables(), options=st.sampled_from([{}, {"shuffle_window": 5}, {"test_fraction": 0.3}]))
def test_a_table_gives_the_batches_of_its_parquet_file(
    tmp_path_factory, monkeypatch_block, table, options
):
    path = tmp_path_factory.mktemp("table") / "a.parquet"
    pq.write_table(without_views(table), path, row_group_size=monkeypatch_block)
    wanted = read(open_parquet, path, **options)
    feather = path.with_suffix(".arrow")
    with pa.ipc.new_file(str(feather), table.schema) as writer:
        writer.write_table(table)
    sources = [table, table.combine_chunks(), table.to_reader(), feather, ds.dataset(path)]
    for source in sources:
        assert_alike(read(open_arrow, source, **options), wanted)


def without_views(table):
    """Return the table with plain texts: pyarrow reads no lists of views from Parquet files."""
    plain = {pa.string_view(): pa.string(), pa.list_(pa.string_view()): pa.list_(pa.string())}
    kinds = [plain.get(kind, kind) for kind in table.schema.types]
    columns = [pa.array(c.to_pylist(), k) for c, k in zip(table.columns, kinds, strict=True)]
    return pa.table(columns, table.column_names)


@pytest.fixture(scope="module")
def monkeypatch_block():
    patch = pytest.MonkeyPatch()
    patch.setattr("colonnade.data.tabular.arrow_files.BLOCK_ROWS", 8)
    yield 8
    patch.undo()


def make_table(count=87):
    rows = samples(count)
    return pa.table({n: pa.array([row[n] for row in rows], kind) for n, kind in TYPES.items()})


def test_a_repeated_name_is_refused():
    table = pa.Table.from_arrays([pa.array([0, 1]), pa.array([1, 2])], ["label", "label"])
    with pytest.raises(DataError, match="two columns named 'label'"):
        open_arrow(table)


def test_a_reader_is_read_once():
    reader = make_table().to_reader()
    assert open_arrow(reader, schema=DECLARATION).train.num_samples == 87
    with pytest.raises(
        DataError, match=r"got no row, wanted at least one\. A reader has none left"
    ):
        open_arrow(reader, schema=DECLARATION)
    with pytest.raises(DataError, match="got no row, wanted at least one"):
        open_arrow(make_table(0))


def test_a_data_set_without_files_is_refused():
    empty = ds.FileSystemDataset([], pa.schema([("label", pa.int8())]), ds.ParquetFileFormat())
    with pytest.raises(DataError, match="got a data set without a file"):
        open_arrow(empty)


def test_other_objects_are_refused_in_words():
    with pytest.raises(ConfigError, match=r"got path=7, wanted a file.*__arrow_c_stream__"):
        open_arrow(7)
    with pytest.raises(ConfigError, match=r"got path=\{\}, wanted a file.*__arrow_c_stream__"):
        open_interactions({})


def test_parts_may_be_tables_and_a_source_goes_to_another_process():
    table = make_table()
    splits = open_arrow(table, schema=DECLARATION, validation=table.slice(0, 9), test=table[:5])
    assert (splits.validation.num_samples, splits.test.num_samples) == (9, 5)
    copy = pickle.loads(pickle.dumps(splits.train))
    assert same(joined(list(copy.batches(9))), joined(list(splits.train.batches(9))))


def test_a_data_set_is_read_fragment_by_fragment(tmp_path):
    """Folder names are columns, and a block is a row group."""
    table = make_table().append_column("day", pa.array([f"d{i // 30}" for i in range(87)]))
    pq.write_to_dataset(table, tmp_path / "parts", partition_cols=["day"], row_group_size=10)
    data = ds.dataset(tmp_path / "parts", partitioning="hive")
    splits = open_arrow(data, label="click")
    assert "day" in [field.name for field in splits.train.file_schema.fields]
    assert splits.train.files.lengths.tolist() == [10, 10, 10, 10, 10, 10, 10, 10, 7]
    whole = pa.concat_tables([data.to_table()])
    schema = splits.train.file_schema
    wanted = list(open_arrow(whole, schema=schema).train.batches(16))
    got = list(splits.train.batches(16))
    assert all(same(a, b) for a, b in zip(got, wanted, strict=True))
    copy = pickle.loads(pickle.dumps(splits.train))
    assert same(next(copy.batches(16)), wanted[0])


def test_compressed_text_by_a_data_set(tmp_path):
    table = pa.table({"label": [0, 1] * 20, "user": [f"u{i % 7}" for i in range(40)]})
    with pa.CompressedOutputStream(str(tmp_path / "a.csv.gz"), "gzip") as file:
        pyarrow.csv.write_csv(table, file)
    data = ds.dataset(tmp_path / "a.csv.gz", format="csv")
    assert_alike(read(open_arrow, data), read(open_arrow, table))
    (tmp_path / "a.csv.gz").write_bytes((tmp_path / "a.csv.gz").read_bytes()[:40])
    with pytest.raises(DataError, match=r"a\.csv\.gz.*cannot be read"):
        open_arrow(data)


def test_a_remote_data_set(tmp_path):
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    with memory.open("/bucket/a.parquet", "wb") as file:
        pq.write_table(make_table(), file, row_group_size=20)
    data = ds.dataset("bucket/a.parquet", filesystem=memory)
    assert_alike(
        read(open_arrow, data, schema=DECLARATION),
        read(open_arrow, make_table(), schema=DECLARATION),
    )


def make_frame(package):
    table = make_table()
    if package == "polars":
        return pytest.importorskip("polars").from_arrow(table)
    if package == "pandas":
        return pytest.importorskip("pandas", "2.2").DataFrame(table.to_pydict())
    duckdb = pytest.importorskip("duckdb")
    table_of_samples = table  # noqa: F841 (the query names it)
    return duckdb.sql("select * from table_of_samples")


@pytest.mark.parametrize("package", ["polars", "duckdb"])
def test_frames_of_other_libraries(package):
    frame = make_frame(package)
    wanted = read(open_arrow, make_table(), schema=DECLARATION)
    assert_alike(read(open_arrow, frame, schema=DECLARATION), wanted)
    inferred = read(open_arrow, make_frame(package), label="click")
    assert inferred[0] == read(open_arrow, make_table(), label="click")[0]


def test_categoricals_of_polars():
    """Their dictionaries, also in lists, are views of texts."""
    polars = pytest.importorskip("polars")
    columns = {"label": [0, 1, 1], "city": ["a", "b", None], "tags": [["a"], ["b", "a"], []]}
    frame = polars.DataFrame(columns).with_columns(
        polars.col("city").cast(polars.Categorical),
        polars.col("tags").cast(polars.List(polars.Enum(["a", "b"]))),
    )
    assert_alike(read(open_arrow, frame), read(open_arrow, pa.table(columns)))
    users = polars.DataFrame({"city": ["a", "b"], "size": [1.5, 2.5]}).cast(
        {"city": polars.Categorical}
    )
    joined = open_arrow(frame, join={"city": users}).train
    assert next(joined.batches(3)).dense[:, 1].tolist() == [0.0, 0.0, 1.0]


def test_a_pandas_frame():
    pandas = pytest.importorskip("pandas", "2.2")
    frame = pandas.DataFrame(
        {"label": [0, 1, 1], "user": ["a", "b", None], "age": [3.0, None, 5.0]}
    )
    (batch,) = open_arrow(frame).train.batches(3)
    table = pa.table({"label": [0, 1, 1], "user": ["a", "b", None], "age": [3.0, None, 5.0]})
    (wanted,) = open_arrow(table).train.batches(3)
    assert same(batch, wanted)


def test_a_hugging_face_data_set():
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"label": [0, 1, 1], "user": ["a", "b", "c"]})
    (batch,) = open_arrow(data.with_format("arrow")[:]).train.batches(3)
    assert batch.ids["user"].values.shape == (3,)


def test_a_delta_table(tmp_path):
    deltalake = pytest.importorskip("deltalake")
    deltalake.write_deltalake(str(tmp_path / "t"), make_table())
    table = deltalake.DeltaTable(str(tmp_path / "t"))
    wanted = read(open_arrow, make_table(), schema=DECLARATION)
    assert_alike(read(open_arrow, table.to_pyarrow_dataset(), schema=DECLARATION), wanted)


def test_arrow_files_by_the_command_line_reader(tmp_path):
    table = make_table()
    with pa.ipc.new_file(str(tmp_path / "a.feather"), table.schema) as writer:
        writer.write_table(table)
    splits = open_source("arrow", tmp_path, label="click")
    assert splits.train.num_samples == 87
    (tmp_path / "a.feather").write_bytes(b"ARROW1 no more")
    with pytest.raises(DataError, match=r"a\.feather: cannot be read as an Arrow file"):
        open_source("arrow", tmp_path)


def test_decimals_are_numbers():
    table = pa.table({"label": [0, 1], "cost": [decimal.Decimal("1.5"), decimal.Decimal("2.5")]})
    (batch,) = open_arrow(table).train.batches(2)
    assert batch.dense.flatten().tolist() == [-1.0, 1.0]
