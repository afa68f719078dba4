"""`bench kernels` must time the work it names: the same ids, the same sums, bare loops that do what they bound."""

import itertools
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))  # benches are scripts, not part of the package

import harness  # noqa: E402
import kernels  # noqa: E402
from tables.kernels import RATIOS, Figures, Point, print_figures, print_ratios, ratios_of  # noqa: E402
from workers import kernels_colonnade as ours  # noqa: E402
from workers import kernels_torch as theirs  # noqa: E402
from workers import roofline  # noqa: E402
from workers.kernels_loop import Run, gradient_of  # noqa: E402
from workers.loop import Laps  # noqa: E402
from workers.workload import NUM_FEATURES, SKEWS, Tables, Workload, draw, write_ids  # noqa: E402

ONE_HOT = Workload("one-hot", batch_size=64, lookups=1, pooled=True, steps=2)
MULTI_HOT = Workload("20-hot", batch_size=16, lookups=20, pooled=True, steps=2)
SEQUENCE = Workload("sequence", batch_size=4, lookups=5, pooled=False, steps=2)
ROWS = 40


def batches(workload: Workload, num_rows: int = ROWS) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = 3, NUM_FEATURES, workload.batch_size * workload.lookups
    return itertools.cycle(draw(1.05, num_rows, shape, generator))


@pytest.mark.parametrize("skew", [0.0, 1.05, 1.2])
def test_ids_are_as_skewed_as_said(skew: float) -> None:
    num_rows, num = 1000, 20000
    ids = draw(skew, num_rows, (2, 3, num // 2), torch.Generator().manual_seed(1))
    counts = torch.stack(
        [torch.bincount(ids[:, f].flatten(), minlength=num_rows) for f in range(3)]
    )
    assert counts.shape == (3, num_rows), "ids are rows"
    weight = torch.arange(1, num_rows + 1, dtype=torch.float64) ** -skew
    expected = num * weight / weight.sum()
    result = counts.sort(descending=True).values.double()
    if skew:
        torch.testing.assert_close(result[:, :5], expected[:5].expand(3, 5), rtol=0.08, atol=0)
        hottest = counts.argsort(descending=True)[:, :4]
        assert len(set(hottest[:, 0].tolist())) == 3, "each table has frequent rows of its own"
        assert (hottest.sort().values.diff() > 1).all(), "frequent rows are no neighbours"
    else:
        assert result.max() < 3 * num / num_rows


def test_a_file_of_ids_is_the_same_for_every_system(tmp_path: Path) -> None:
    for name in "ab":
        write_ids(tmp_path / f"{name}.npy", MULTI_HOT, 1.2, 50, num_batches=2, seed=3)
    a, b = (np.load(tmp_path / f"{name}.npy") for name in "ab")
    assert (a == b).all() and a.shape == (2, NUM_FEATURES, 16 * 20) and a.dtype == np.int64


@pytest.mark.parametrize("workload", [ONE_HOT, MULTI_HOT, SEQUENCE], ids=lambda w: w.name)
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_our_steps_are_torchs(workload: Workload, optimizer: str) -> None:
    tables = Tables(ROWS, 16, optimizer, lr=0.5)
    for is_open in (False, True):
        native, torchs = ours.Colonnade(tables, is_open=is_open), theirs.Torch(tables)
        for t, bag in enumerate(torchs.bags):
            assert not len(native.dram.read(t, torch.arange(ROWS), bag.weight.data)), "all are born"
        first = torchs.bags[3].weight.detach().clone()
        for system in (native, torchs):
            step = system.step(workload, batches(workload))
            for _ in range(4):
                laps = Laps(system.phases)
                step(laps)
                assert min(laps.seconds.values()) > 0, f"{system}: a phase that is never booked"
        for t, bag in enumerate(torchs.bags):
            result = torch.empty_like(bag.weight.data)
            native.dram.read(t, torch.arange(ROWS), result)
            torch.testing.assert_close(result, bag.weight.data, rtol=1e-4, atol=1e-6)
        assert not torch.equal(first, torchs.bags[3].weight), "the steps changed nothing"


def test_the_python_apis_steps_are_torchs() -> None:
    tables = Tables(ROWS, 16, "sgd", lr=0.5)
    api, torchs = ours.Api(tables), theirs.Torch(tables)
    every = torch.arange(ROWS)
    for name, bag in zip(api.names, torchs.bags, strict=True):
        bag.weight.data.copy_(api.collection.rows(name, every))
    for system in (api, torchs):
        step = system.step(ONE_HOT, itertools.islice(batches(ONE_HOT), 4))
        for _ in range(4):
            laps = Laps(system.phases)
            step(laps)
            assert min(laps.seconds.values()) > 0
    for name, bag in zip(api.names, torchs.bags, strict=True):
        torch.testing.assert_close(api.collection.rows(name, every), bag.weight.data)


@pytest.fixture(scope="module")
def loops() -> roofline.Roofline:
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    return roofline.Roofline(num_threads=2)


@pytest.mark.parametrize("workload", [ONE_HOT, MULTI_HOT, SEQUENCE], ids=lambda w: w.name)
@pytest.mark.parametrize("dim", [16, 128])
def test_the_bare_loops_read_and_write_what_they_bound(
    loops: roofline.Roofline, workload: Workload, dim: int
) -> None:
    weights = torch.randn(NUM_FEATURES, ROWS, dim)
    states = torch.rand(NUM_FEATURES, ROWS, 2)
    rows = roofline.Rows(
        dim,
        weights.data_ptr() + torch.arange(NUM_FEATURES) * ROWS * dim * 4,
        dim * 4,
        states.data_ptr() + torch.arange(NUM_FEATURES) * ROWS * 8,
        8,
    )
    ids = next(batches(workload))
    unique = [torch.unique(own) for own in ids]
    sizes = torch.tensor([0, *map(len, unique)])
    batch = roofline.Lookup(
        ids.flatten().to(torch.int32), torch.cat(unique).to(torch.int32), sizes.cumsum(0)
    )
    # 64-byte aligned, as torch allocates
    out = ours.Outputs(torch.full_like(gradient_of(workload, dim), torch.nan), workload)
    task = roofline.Task(
        workload.num_outputs, workload.lookups if workload.pooled else 1, out.values,
        out.feature_floats, out.row_floats, torch.ones_like(out.values),
    )  # fmt: skip
    expected = torch.stack([weights[f, own] for f, own in enumerate(ids)])
    if workload.pooled:
        expected = (
            expected.unflatten(1, (workload.batch_size, -1)).sum(2).transpose(0, 1).flatten(1)
        )
    else:
        expected = expected.flatten(0, 1)
    for setting in roofline.GATHER_SETTINGS[::3]:
        out.values.fill_(torch.nan)
        loops.gather(rows, batch, task, setting)
        torch.testing.assert_close(out.values, expected)
    retained = weights.clone(), states.clone()
    for setting in roofline.UPDATE_SETTINGS[::3]:
        loops.update(rows, batch, task, setting)
        assert torch.equal(weights, retained[0]) and torch.equal(states, retained[1]), "times one"
        assert task.sums[:2].sum() == task.gradients.numel(), "every gradient is read"


def test_a_sweep_takes_the_fastest_and_never_one_batch_twice_in_a_row() -> None:
    requests: list[tuple[str, roofline.Setting]] = []

    def run(batch: str, setting: roofline.Setting) -> None:
        requests.append((batch, setting))
        for _ in range(20_000 * (setting != (1, 16))):
            pass

    assert roofline.sweep(run, ["a", "b"], [(0, 0), (1, 8), (1, 16)]) == (1, 16)
    assert len(requests) == 3 * roofline.SWEEPS
    assert all(x[0] != y[0] for x, y in itertools.pairwise(requests))


class Counting:
    """A system whose n-th step takes n seconds of forward."""

    phases = ("forward",)

    def step(self, workload: Workload, batches: Iterator[Tensor]):
        def step(laps: Laps) -> None:
            laps.seconds["forward"] = float(next(batches))

        return step


def test_a_block_begins_with_a_step_that_does_not_count(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.arange(4))
    run = Run(Counting(), ONE_HOT, str(tmp_path / "ids.npy"))
    assert run.block(2) == {"seconds": [1.0, 2.0], "phases": {"forward": [1.0, 2.0]}}
    assert run.block(2)["seconds"] == [0.0, 1.0], (
        "the fourth step led in; then from the first batch"
    )


class Diary:
    """Stands where the workers stand: writes down what each is told, and answers."""

    def __init__(self, name: str, entries: list[tuple[str, str]]) -> None:
        self.name, self.entries = name, entries

    def send(self, message: dict) -> None:
        self.message = message
        if "close" in message:
            self.entries.append((self.name, "close"))
        elif "open" in message:
            self.entries.append((self.name, f"open {message['open']['optimizer']}"))

    def answer(self) -> dict:
        phases = ("forward", "rows") if self.name != "fbgemm" else ("forward", "backward")
        return {"seconds": [2.0], "phases": {name: [1.0] for name in phases}}


def test_a_set_opens_its_systems_and_frees_the_others(tmp_path: Path) -> None:
    entries: list[tuple[str, str]] = []
    workers = {name: Diary(name, entries) for name in ("colonnade", "torch", "fbgemm")}
    files = {(w.name, "uniform"): (w, tmp_path) for w in kernels.WORKLOADS}
    figures = Figures()
    tables = Tables(10, 16, "sgd", 0.1)
    for set_ in kernels.SETS:
        kernels.measure_set(set_, tables, workers, files, 1, figures)
    opened: set[str] = set()
    for name, what in entries:
        opened = opened - {name} if what == "close" else opened | {name}
        if what == "open adagrad":
            assert len(opened) <= 2, "three systems with full Adagrad state do not fit"
    at = {str(point): {s for p, s in figures.seconds if p == point} for point, _ in figures.seconds}
    assert at["D=16 one-hot uniform rowwise_adagrad"] == {"colonnade", "open", "roofline", "fbgemm"}
    assert at["D=16 sequence uniform rowwise_adagrad"] == {"colonnade", "roofline", "fbgemm"}
    assert at["D=16 20-hot uniform sgd"] == {"colonnade", "fbgemm", "torch"}
    assert at["D=16 sequence uniform sgd"] == {"colonnade", "torch"}
    assert at["D=16 20-hot uniform adagrad"] == {"colonnade", "fbgemm"}
    assert at["D=16 20-hot uniform adagrad beside torch"] == {"colonnade", "torch"}


def test_without_fbgemm_the_rest_is_measured(tmp_path: Path) -> None:
    workers = {name: Diary(name, []) for name in ("colonnade", "torch")}
    files = {(w.name, "uniform"): (w, tmp_path) for w in kernels.WORKLOADS}
    figures = Figures()
    for set_ in kernels.SETS:
        kernels.measure_set(set_, Tables(10, 16, "sgd", 0.1), workers, files, 1, figures)
    assert {system for _, system in figures.seconds} == {"colonnade", "torch", "open", "roofline"}


def point(workload: str, optimizer: str, dim: int = 16, beside: str = "") -> Point:
    return Point(dim, workload, "uniform", optimizer, beside)


def phases(**medians: float) -> dict[str, list[float]]:
    return {name: [value / 2, value, 3 * value] for name, value in medians.items()}


def made_up() -> Figures:
    figures = Figures()
    native = phases(plan=1.0, slots=1.0, forward=2.0, rows=4.0)
    for dim, factor in ((16, 1.0), (32, 4.0)):
        at = point("one-hot", "rowwise_adagrad", dim)
        figures.seconds[at, "colonnade"] = native
        figures.seconds[at, "fbgemm"] = phases(forward=4 * factor, backward=12.0)
        figures.seconds[at, "roofline"] = phases(forward=1.0, rows=2.0)
        figures.seconds[at, "open"] = phases(plan=1.0, slots=9.0, forward=2.0, rows=4.0)
    figures.seconds[point("sequence", "rowwise_adagrad"), "colonnade"] = native
    figures.seconds[point("sequence", "rowwise_adagrad"), "fbgemm"] = phases(
        forward=1e9, backward=60.0
    )
    for optimizer in ("sgd", "adagrad"):
        figures.seconds[point("one-hot", optimizer), "colonnade"] = native
        figures.seconds[point("one-hot", optimizer), "fbgemm"] = phases(forward=1e9, backward=30.0)
    beside = point("one-hot", "adagrad", beside="torch")
    figures.seconds[beside, "colonnade"] = phases(plan=99.0, slots=1.0, forward=2.0, rows=4.0)
    figures.seconds[beside, "torch"] = phases(forward=6.0, backward=100.0, rows=212.0)
    for ids, seconds in (("uniform", 0.004), ("zipf 1.2", 0.001)):
        at = Point(16, "api", ids, "adagrad")
        figures.seconds[at, "api"] = phases(wait=0.0, forward=seconds / 2, rows=seconds / 2)
    return figures


def test_ratios_mean_what_they_say() -> None:
    result = ratios_of(made_up())
    expected = {
        "forward_vs_fbgemm": 4.0,  # 2 and 8; sequences and other optimizers are apart
        "forward_vs_fbgemm_min": 2.0,
        "update_vs_fbgemm_rowwise_adagrad": 2.0,  # 12 over plan + slots + rows
        "update_vs_fbgemm_other_optimizers": 5.0,
        "update_vs_fbgemm_other_optimizers_min": 5.0,
        "sequence_backward_vs_fbgemm": 10.0,
        "step_vs_torch_embeddingbag": 3.0,
        "forward_of_roofline": 0.5,
        "update_of_roofline": 0.5,  # of rows alone
        "planning_of_update": 0.25,  # the second measurement beside torch is not taken again
        "planning_of_update_max": 0.25,
        "hashed_vs_direct": 0.5,
        "sparse_samples_per_second": 4096 / 0.002,
        "sparse_samples_per_second_min": 4096 / 0.004,
    }
    assert {name: result[name] for name in expected} == pytest.approx(expected)
    assert {name.removesuffix("_min").removesuffix("_max") for name in result} == {
        ratio.name for ratio in RATIOS
    }


def test_what_a_person_reads_names_the_worst_case(capsys: pytest.CaptureFixture) -> None:
    console = kernels.Console(highlight=False, width=kernels.WIDTH)
    print_figures(console, made_up())
    print_ratios(console, made_up())
    printed = capsys.readouterr().out
    assert "forward_vs_fbgemm: 4.00 (wanted >= 4.5); worst 2.00, wanted >= 2.3, at D=16" in printed
    assert "planning_of_update: 0.25 (wanted <= 0.5)" in printed
    print_ratios(console, Figures())
    assert "hashed_vs_direct: not measured" in capsys.readouterr().out


def test_a_reports_cases_are_lines(tmp_path: Path) -> None:
    result = harness.report(
        "kernels", version="1", machine={"cpu": "x"}, measured=made_up().measured(), ratios={"a": 1}
    )
    harness.write_report(tmp_path / "k.json", result)
    text = (tmp_path / "k.json").read_text()
    assert json.loads(text) == result
    lines = [line for line in text.splitlines() if '"case"' in line]
    assert len(lines) == len(result["cases"]) > 10
    assert asdict(ONE_HOT)["name"] == "one-hot" and str(point("one-hot", "sgd")) in text


def test_figures_are_read_back_from_a_files_rows() -> None:
    figures = Figures()
    for point in (
        *(Point(16, "one-hot", ids, "sgd") for ids in SKEWS),
        Point(16, "20-hot", "zipf 1.05", "adagrad", "fbgemm torch"),
    ):
        figures.seconds[point, "colonnade"] = {"forward": [0.001, 0.002], "rows": [0.003]}
    assert Figures.of_measured(figures.measured()) == figures
    print_figures(kernels.Console(), figures)
