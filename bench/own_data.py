"""Quality by default settings on files of one's own, beside what others reach, and the speed of reading.

Minutes: 300 (quick 60).

Suite clicks: each model is trained as `colonnade train --model NAME` trains it, with no other setting, on files of a
format, and scored on a test file. Splits are random; logistic regression trains on the same samples: hashed one-hot
categories, standardised numbers (log1p where large), missing values as a category of their own, and of four strengths
the one that is best on a held-out tenth.

    auc_behind_lr        AUC of logistic regression less the model's: upper end of the 95 % interval over the splits
    log_loss_behind_lr   the model's log loss less that of logistic regression, likewise

Suite ranking: see workers/own_ranking.py.

    zoo_vs_best_peer_hr10, two_tower_vs_als_hr10    hit rate@10 of the last of each user's items among 99 drawn others,
                                                    MovieLens-1M in the order of its file: the best model over the best
                                                    peer; two towers over least squares
    gowalla_recall20                                recall@20 of two towers over the better of least squares and BPR
    below_popularity                                number of pairs of data and model below popularity

Suite sequences: see workers/own_sequences.py.

    sasrec_vs_torch_hr10, sasrec_time_of_torch    hit rate@10 of SASRec over that of the better of two plain torch ones,
                                                  all items ranked; processor seconds of ten epochs over its (suite
                                                  sequence_seconds)

Suite graphs: see workers/own_graphs.py.

    thin_graph_of_best    hits@10 of TransE by default settings over that of the best of six settings

Suite reading:

    rows_per_second      interactions of a Parquet file, from opening it to the last batch of an epoch, per processor
                         second of one thread
    peak_memory_gib      largest resident memory of the process that reads them

Data come from $COLONNADE_DATA, else from ../shared/data beside the checkout; a data set that is absent is left out.
`--suites`, `--models`, `--cases` and `--splits` take a part, which is added to the file of an earlier call: it is
written after each case.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import zlib
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
import torch
from harness import ROOT, ArmFile, BenchError, Measured, open_parser, run_script, say
from rich.console import Console
from rich.table import Table
from workers.own_graphs import compute_graph_ratios, measure_thin_graph
from workers.own_ranking import CASES as RANKING_CASES
from workers.own_ranking import compute_ranking_ratios, measure_case
from workers.own_sequences import (
    compute_sequence_ratios,
    measure_sequence_seconds,
    measure_sequences,
)

from colonnade import Mesh
from colonnade.config.run import override_settings
from colonnade.data.sets.criteo import NAMES
from colonnade.data.tabular.tfrecord import _build_example_class, masked_crc
from colonnade.models.build import MODEL_SPECS
from colonnade.models.split import Scorer
from colonnade.report.intervals import compute_confidence_interval
from colonnade.run.defaults import get_preset
from colonnade.run.run import open_run

DATA = Path(os.environ.get("COLONNADE_DATA", ROOT.parent / "shared" / "data"))
MODELS = tuple(name for name, spec in MODEL_SPECS.items() if issubclass(spec.model, Scorer))
NUM_TEST = 20_000
"""Maximal number of test samples."""
NUM_INTERACTIONS = 50_000_000
"""Number of interactions that are read, 50 of a user; a quick run reads a tenth."""
READ_INTERACTIONS = """
import resource, sys, time
import pyarrow as pa, torch
pa.set_cpu_count(1), torch.set_num_threads(1)
from colonnade.data import open_interactions
start = time.process_time()
for _ in open_interactions(sys.argv[1]).train.batches(4096):
    pass
seconds = time.process_time() - start
print(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
"""
"""Program that reads an epoch, and prints its processor seconds and its largest memory in GiB."""
LARGE = 20.0
"""Maximum of numbers from which on logistic regression reads their log1p."""


@dataclass(frozen=True)
class Case:
    """Share of a data set as files of a format. is_declared: with a schema, else it is inferred."""

    data: str
    share: float
    format: str
    is_declared: bool = False

    @property
    def name(self) -> str:
        return f"{self.data} {self.share:.0%} {self.format}{' declared' * self.is_declared}"


CASES = (
    *(Case("criteo10k", 1.0, kind) for kind in ("csv", "parquet", "libsvm", "tfrecord")),
    Case("criteo10k", 1.0, "csv", is_declared=True),
    Case("ml-1m", 0.01, "csv"),
    Case("ml-1m", 0.1, "parquet"),
    Case("ml-1m", 0.1, "libsvm"),
    Case("ml-1m", 1.0, "parquet"),
    Case("food", 1.0, "csv"),
)


def read_samples(data: str) -> pa.Table:
    """Read a data set with its label; raise BenchError if it is absent."""
    folder = DATA / data
    if not folder.exists():
        raise BenchError(f"{folder} is absent; set COLONNADE_DATA to the folder that holds {data}")
    if data == "criteo10k":
        return read_text(folder / "train.txt", "\t", NAMES)
    if data == "food":
        names = ("user", "dish", "kind", "hunger", "rating")
        table = pa.concat_tables(
            read_text(folder / f"demo_{part}.csv", ",", names) for part in ("train", "test")
        )
        texts = [table[name].cast(pa.string()) for name in names[:4]]
        return pa.table(
            [*texts, pc.greater_equal(table["rating"], 4).cast(pa.int8())], [*names[:4], "label"]
        )
    ratings = pq.read_table(folder / "ratings.parquet")
    others = {}
    for name, columns in (
        ("users", "user_id sex age work zip"),
        ("movies", "movie_id title genres"),
    ):
        rows = [
            line.split("::") for line in (folder / f"{name}.dat").read_text("latin-1").splitlines()
        ]
        others[name] = pa.table(
            [list(column) for column in zip(*rows, strict=True)], columns.split()
        )
    table = ratings.set_column(0, "user_id", ratings["user_id"].cast(pa.string()))
    table = table.set_column(1, "movie_id", table["movie_id"].cast(pa.string()))
    table = table.join(others["users"], "user_id").join(
        others["movies"].drop(["title"]), "movie_id"
    )
    label = pc.greater_equal(table["rating"], 4).cast(pa.int8())
    return table.drop(["rating"]).append_column("label", label)


def read_text(path: Path, delimiter: str, names: Sequence[str]) -> pa.Table:
    return pyarrow.csv.read_csv(
        path,
        pyarrow.csv.ReadOptions(column_names=names),
        pyarrow.csv.ParseOptions(delimiter=delimiter),
        pyarrow.csv.ConvertOptions(
            column_types={f"C{i}": pa.string() for i in range(1, 27)}, strings_can_be_null=True
        ),
    )


def list_tokens(samples: pa.Table) -> list[list[str]]:
    """Return the one-hot features of each sample by name; numbers with many values only say where they are missing."""
    columns = []
    for name in samples.column_names:
        if name == "label":
            continue
        values = samples[name].to_pylist()
        if is_number(samples, name):
            columns.append([[f"{name}="] if value is None else [] for value in values])
        else:
            columns.append(
                [[f"{name}={part}" for part in str(value or "").split("|")] for value in values]
            )
    return [[token for tokens in row for token in tokens] for row in zip(*columns, strict=True)]


def is_number(samples: pa.Table, name: str) -> bool:
    return name != "label" and not pa.types.is_string(samples[name].type)


def convert_to_categories(samples: pa.Table) -> pa.Table:
    """Return samples with categories only: of a number, twice the logarithm to base 2."""
    for index, name in enumerate(samples.column_names):
        if is_number(samples, name):
            powers = [
                None if x is None else str(int(math.log2(max(x, 0) + 1) * 2))
                for x in samples[name].to_pylist()
            ]
            samples = samples.set_column(index, name, pa.array(powers, pa.string()))
    return samples


def write_file(samples: pa.Table, path: Path) -> None:
    """Write samples in the format that the path ends in; libsvm takes categories only."""
    if path.suffix == ".csv":
        pyarrow.csv.write_csv(samples, path)
    elif path.suffix == ".parquet":
        pq.write_table(samples, path)
    elif path.suffix == ".libsvm":
        lines = (
            " ".join(
                [
                    str(label),
                    *(
                        f"{zlib.crc32(token.encode()) % (1 << 24)}:1"
                        for token in dict.fromkeys(tokens)
                    ),
                ]
            )
            for label, tokens in zip(
                samples["label"].to_pylist(), list_tokens(samples), strict=True
            )
        )
        path.write_text("\n".join(lines) + "\n")
    else:
        with path.open("wb") as file:
            for row in samples.to_pylist():
                example = _build_example_class()()
                for name, value in row.items():
                    feature = example.features.feature[name]
                    if isinstance(value, str):
                        feature.bytes.value.append(value.encode())
                    elif value is not None:
                        feature.integers.value.append(value)
                text = example.SerializeToString()
                size = len(text).to_bytes(8, "little")
                file.write(size + masked_crc(size).to_bytes(4, "little"))
                file.write(text + masked_crc(text).to_bytes(4, "little"))


def declare_schema(samples: pa.Table) -> dict[str, Any]:
    """Return the schema that a user writes who knows the columns."""
    number = {"type": "number", "missing": 0.0, "transform": "log1p"}
    fields: dict[str, Any] = {
        n: number if is_number(samples, n) else "category" for n in samples.column_names
    }
    return {"fields": {**fields, "label": "label"}}


def train_model(
    model: str, case: Case, folder: Path, schema: Any, seed: int
) -> tuple[float, float]:
    """Train on the files of a folder by default settings; return AUC and log loss of the test file."""
    options = {"test": str(folder / f"test.{case.format}")} | ({"schema": schema} if schema else {})
    settings = {f"data.options.{name}": value for name, value in options.items()}
    settings |= {
        "data.path": str(folder / f"train.{case.format}"),
        "train.threads": 1,
        "train.seed": seed,
    }
    config = override_settings(get_preset(case.format, model), settings)
    run = open_run(config, Mesh(), None, console=Console(quiet=True))
    try:
        metrics = run.train().metrics
    finally:
        run.close()
    return metrics["test_auc"], metrics["test_log_loss"]


def train_logistic_regression(train: pa.Table, test: pa.Table) -> tuple[float, float]:
    """Return AUC and log loss of scikit-learn's logistic regression."""
    try:
        from scipy import sparse
        from sklearn.feature_extraction import FeatureHasher
        from sklearn.linear_model import LogisticRegression
        from sklearn.metrics import log_loss, roc_auc_score
        from sklearn.preprocessing import StandardScaler
    except ModuleNotFoundError as error:
        raise BenchError(f"this bench needs {error.name}: pip install scikit-learn") from None
    samples = pa.concat_tables([train, test]).combine_chunks()
    matrix = FeatureHasher(1 << 20, input_type="string", alternate_sign=False).transform(
        list_tokens(samples)
    )
    numbers = [name for name in samples.column_names if is_number(samples, name)]
    if numbers:
        x = np.stack([samples[name].cast(pa.float64()).to_numpy() for name in numbers], axis=1)
        x = np.where(
            (np.nanmin(x, 0) >= 0) & (np.nanmax(x, 0) > LARGE), np.log1p(np.maximum(x, 0)), x
        )
        x = np.nan_to_num(StandardScaler().fit(x[: len(train)]).transform(x))
        matrix = sparse.hstack([x, matrix]).tocsr()
    matrix = matrix[:, np.unique(matrix[: len(train)].indices)]  # the others cost time and no score
    y = samples["label"].to_numpy()

    def fit(rows: slice, test_rows: slice, strength: float) -> np.ndarray:
        model = LogisticRegression(C=strength, max_iter=300).fit(matrix[rows], y[rows])
        return model.predict_proba(matrix[test_rows])[:, 1]

    fitted = len(train) * 9 // 10
    held_out = slice(fitted, len(train))
    strengths = (0.03, 0.1, 0.3, 1.0)
    best = min(strengths, key=lambda c: log_loss(y[held_out], fit(slice(0, fitted), held_out, c)))
    scores = fit(slice(0, len(train)), slice(len(train), None), best)
    return roc_auc_score(y[len(train) :], scores), log_loss(y[len(train) :], scores)


def compare(
    case: Case, models: Sequence[str], split: int, measured: dict[tuple[str, str, str], list[float]]
) -> None:
    """Add the results of one split of a case to `measured`."""
    samples = read_samples(case.data)
    if case.format == "libsvm":
        samples = convert_to_categories(samples)
    order = np.random.RandomState(split).permutation(len(samples))
    num_train = int(0.8 * len(order))
    test = samples.take(order[num_train:][:NUM_TEST])
    train = samples.take(order[: int(num_train * case.share)])
    expected = train_logistic_regression(train, test)
    with tempfile.TemporaryDirectory() as folder:
        for part, table in (("train", train), ("test", test)):
            write_file(table.combine_chunks(), Path(folder) / f"{part}.{case.format}")
        schema = declare_schema(samples) if case.is_declared else None
        for model in models:
            auc, loss = train_model(model, case, Path(folder), schema, split)
            for unit, behind in (
                ("auc_behind_lr", expected[0] - auc),
                ("log_loss_behind_lr", loss - expected[1]),
            ):
                measured.setdefault((case.name, model, unit), []).append(behind)
            beside = f"(LR {expected[0]:.4f}, {expected[1]:.4f})"
            say(f"{case.name}, split {split}, {model}: AUC {auc:.4f}, log loss {loss:.4f} {beside}")


def measure_interactions(num_rows: int) -> list[Measured]:
    """Read a file of drawn interactions in a process of its own: users and times uniform, popular items first."""
    generator = np.random.default_rng(0)
    num_users, num_items = num_rows // 50, min(num_rows // 50, 1_000_000)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "interactions.parquet"
        names = ("user", "item", "timestamp")
        with pq.ParquetWriter(path, pa.schema([(name, pa.int64()) for name in names])) as writer:
            for _ in range(0, num_rows, 1_000_000):
                size = min(num_rows, 1_000_000)
                columns = (
                    generator.integers(0, num_users, size),
                    (num_items * generator.random(size) ** 2).astype(np.int64),
                    1_600_000_000 + generator.integers(0, 10**8, size),
                )
                writer.write_table(pa.table(dict(zip(names, columns, strict=True))))
        command = [sys.executable, "-c", READ_INTERACTIONS, str(path)]
        answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    seconds, memory = map(float, answer)
    say(f"{num_rows:,} interactions: {num_rows / seconds:,.0f} rows/s, {memory:.2f} GiB at most")
    case = f"{num_rows:,} interactions"
    return [
        Measured(case, "interactions", "rows_per_second", [num_rows / seconds]),
        Measured(case, "interactions", "peak_memory_gib", [memory]),
    ]


def upper_end(values: Sequence[float]) -> float:
    return sum(x for x in compute_confidence_interval(list(values)) if not math.isnan(x))


def show(console: Console, measured: Sequence[Measured]) -> None:
    """Print the mean and the upper end of each case and model."""
    table = Table("files", "model", "AUC behind", "95 % at most", "log loss behind", "95 % at most")
    by_key = {(m.case, m.system, m.unit): m.values for m in measured}
    for case, model in dict.fromkeys((m.case, m.system) for m in measured):
        cells = []
        for unit in ("auc_behind_lr", "log_loss_behind_lr"):
            values = by_key[case, model, unit]
            cells += [f"{np.mean(values):+.4f}", f"{upper_end(values):+.4f}"]
        table.add_row(case, model, *cells)
    console.print(table)


def measure_clicks(options: Namespace) -> Iterator[list[Measured]]:
    """Measure the chosen click models on the chosen cases."""
    chosen: Callable[[Case], bool] = lambda case: (  # noqa: E731
        any(text in case.name for text in options.cases)
        if options.cases
        else not (options.quick and case.name.startswith("ml-1m 100%"))
    )
    for case in filter(chosen, CASES):
        results: dict[tuple[str, str, str], list[float]] = {}
        with leave_out_absent(case.name):
            for split in range(options.splits or (2 if options.quick else 5)):
                compare(case, options.models, split, results)
        measured = [Measured(*key, values) for key, values in results.items()]
        show(Console(highlight=False, width=110), measured)
        yield measured


def compute_click_ratios(measured: Sequence[Measured]) -> dict[str, float]:
    """Compute the largest upper end of the cases and models that were measured."""
    ends = {
        f"{unit}_max": [upper_end(m.values) for m in measured if m.unit == unit]
        for unit in ("auc_behind_lr", "log_loss_behind_lr")
    }
    return {name: max(values) for name, values in ends.items() if values}


def measure_rankings(options: Namespace) -> Iterator[list[Measured]]:
    """Measure the chosen cases of retrieval."""
    for case in RANKING_CASES:
        if not options.cases or any(text in case.name for text in options.cases):
            with leave_out_absent(case.name):
                yield measure_case(case, DATA, options.splits or (1 if options.quick else 3))


def measure_one(
    name: str, measure: Callable[[Path, int], list[Measured]]
) -> Callable[[Namespace], Iterator[list[Measured]]]:
    """Return the suite of a single case."""

    def measure_suite(options: Namespace) -> Iterator[list[Measured]]:
        with leave_out_absent(name):
            yield measure(DATA, options.splits or (1 if options.quick else 3))

    return measure_suite


@contextmanager
def leave_out_absent(case: str) -> Iterator[None]:
    """Report a case whose data are absent instead of raising an error."""
    try:
        yield
    except BenchError as error:
        if "is absent" not in str(error):
            raise
        say(f"{case} is left out: {error}")


def measure_reading(options: Namespace) -> Iterator[list[Measured]]:
    """Measure the reading of one file."""
    yield measure_interactions(NUM_INTERACTIONS // (10 if options.quick else 1))


def compute_reading_ratios(measured: Sequence[Measured]) -> dict[str, float]:
    return {m.unit: m.values[0] for m in measured if m.system == "interactions"}


SUITES = {
    "clicks": measure_clicks,
    "ranking": measure_rankings,
    "sequences": measure_one("sequences", measure_sequences),
    "sequence_seconds": measure_one("sequences", measure_sequence_seconds),
    "graphs": measure_one("thin graph", measure_thin_graph),
    "reading": measure_reading,
}


def compute_ratios(measured: Sequence[Measured]) -> dict[str, float]:
    """Compute the ratios of all that was measured."""
    ratios: dict[str, float] = {}
    for compute in (
        compute_click_ratios,
        compute_ranking_ratios,
        compute_sequence_ratios,
        compute_graph_ratios,
        compute_reading_ratios,
    ):
        ratios |= compute(list(measured))
    return ratios


def main(arguments: Sequence[str] | None = None) -> None:
    parser = open_parser(__doc__.splitlines()[0], "two splits, without the whole of MovieLens-1M")
    parser.add_argument("--suites", nargs="+", choices=SUITES, default=list(SUITES))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="click models")
    parser.add_argument(
        "--cases", nargs="+", default=[], metavar="TEXT", help="cases whose names contain a text"
    )
    parser.add_argument("--splits", type=int, help="number of splits, or of seeds")
    options = parser.parse_args(arguments)
    file = ArmFile(options.json, "own_data", compute_ratios, {"torch": torch.__version__})
    for suite in options.suites:
        for measured in SUITES[suite](options):
            file.add(measured)


if __name__ == "__main__":
    run_script(main)
