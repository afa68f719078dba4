"""The bench must compare like with like: one dense network, one stream, and ratios that mean what they say."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))  # benches are scripts, not part of the package

import harness  # noqa: E402
import train  # noqa: E402
from harness import BenchError, Measured  # noqa: E402
from plain_models import PlainDeepFM  # noqa: E402
from tables import step_split  # noqa: E402
from workers import loop  # noqa: E402
from workers.loop import PHASES, Case  # noqa: E402
from workers.network import (  # noqa: E402
    DCNv2Network,
    DeepFMNetwork,
    DenseNetwork,
    LibraryLinear,
    use_library_linear,
)
from workers.torch import StackedRows  # noqa: E402

from colonnade import Batch, Feature, Ids, Table  # noqa: E402
from colonnade.models.dcn import DCNv2  # noqa: E402
from colonnade.models.dlrm import DLRM  # noqa: E402
from colonnade.models.linear import DeepFM  # noqa: E402
from colonnade.ops import memory  # noqa: E402
from colonnade.row_state import dense_state_dict  # noqa: E402

ROWS = [7, 50, 3, 1000]
BOTTOM, TOP = [16, 8], [12]


def random_batch(size: int, num_dense: int) -> Batch:
    generator = torch.Generator().manual_seed(size)
    ids = {
        f"C{f + 1}": Ids(torch.randint(rows, (size,), generator=generator))
        for f, rows in enumerate(ROWS)
    }
    return Batch(size=size, dense=torch.randn(size, num_dense, generator=generator), ids=ids)


@pytest.mark.parametrize("dim", [4, 16, 64])
def test_the_peers_network_is_the_models(dim: int) -> None:
    names = [f"C{f + 1}" for f in range(len(ROWS))]
    tables = [Table(name, dim, rows=rows) for name, rows in zip(names, ROWS, strict=True)]
    model = DLRM(tables, [Feature(n, n) for n in names], num_dense=5, bottom=BOTTOM, top=TOP)
    network = DenseNetwork(len(ROWS), dim, num_dense=5, bottom=BOTTOM, top=TOP)
    dense = {k: v for k, v in model.state_dict().items() if not k.startswith("embeddings.")}
    network.load_state_dict(dense, strict=True)
    batch = random_batch(33, 5)
    fields = model.eval().embeddings(batch)["fields"].detach()
    expected = model.train()(batch)
    torch.testing.assert_close(network(batch.dense, fields), expected)

    expected.square().sum().backward()
    network(batch.dense, fields).square().sum().backward()
    for (name, parameter), ours in zip(network.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, ours.grad, msg=name)


def test_the_peers_deepfm_is_ours() -> None:
    names = [f"C{f + 1}" for f in range(len(ROWS))]
    tables = [
        Table(n, {"deep": 4, "wide": 1}, rows=rows) for n, rows in zip(names, ROWS, strict=True)
    ]
    model = DeepFM(tables, [Feature(n, n) for n in names], num_dense=5, top=TOP)
    network = DeepFMNetwork(len(ROWS), 4, num_dense=5, top=TOP)
    load_dense(network, model, PlainDeepFM.taken)
    batch = random_batch(33, 5)
    rows = [model.embeddings.rows(n, batch.ids[n].values) for n in names]
    fields = torch.cat([row[:, :4] for row in rows], dim=1)
    first_order = torch.cat([row[:, 4:] for row in rows], dim=1)
    torch.testing.assert_close(network(batch.dense, fields, first_order), model(batch))


def test_the_peers_dcnv2_is_ours() -> None:
    names = [f"C{f + 1}" for f in range(len(ROWS))]
    tables = [Table(n, 4, rows=rows) for n, rows in zip(names, ROWS, strict=True)]
    model = DCNv2(tables, [Feature(n, n) for n in names], num_dense=5, cross_layers=2, top=TOP)
    network = DCNv2Network(len(ROWS), 4, num_dense=5, cross_layers=2, top=TOP)
    load_dense(network, model)
    batch = random_batch(33, 5)
    fields = torch.cat([model.embeddings.rows(n, batch.ids[n].values) for n in names], dim=1)
    torch.testing.assert_close(network(batch.dense, fields), model(batch))


def load_dense(network: torch.nn.Module, model: torch.nn.Module, taken: Callable = dict) -> None:
    """The model's dense weights, random ones where they start at zero; `taken`: as the network names them."""
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    dense = dense_state_dict(model)
    dense = taken(dense)
    network.load_state_dict({k.replace("layers.0.", ""): v for k, v in dense.items()}, strict=True)


@pytest.mark.slow  # five systems take 20 seconds of processor time
def test_systems_fed_the_same_files_learn_the_same(tmp_path: Path) -> None:
    """Real workers: the two that need nothing installed. The data's entropy is the loss both must come to."""
    num_batches, size, clicks = 120, 512, np.array([0.1, 0.5, 0.9])
    generator = np.random.default_rng(0)
    ids = np.stack([generator.integers(rows, size=(num_batches, size)) for rows in ROWS], axis=1)
    probability = clicks[ids[:, 2, :, None]]  # the third field, of three rows, decides alone
    label = (generator.random(probability.shape) < probability).astype(np.float32)
    dense = generator.standard_normal((num_batches, size, 2), dtype=np.float32)
    for name, values in (("dense", dense), ("ids", ids), ("label", label)):
        np.save(tmp_path / f"{name}.npy", values)
    case = Case(str(tmp_path), ROWS, 4, BOTTOM, TOP, 0.1, 1e-2, num_threads=1, seed=0)
    names = ("colonnade", "torch", "torch helped", "torchrec")
    systems = {name: train.SYSTEMS[name] for name in names}
    pythons = {"colonnade": sys.executable, "torch": sys.executable, "torchrec": "false"}
    versions: dict[str, str] = {}
    workers = train.open_workers(systems, pythons, case, versions, train.Console())
    try:
        blocks = harness.interleave(workers, rounds=2, steps=20, warm_up_steps=80)
    finally:
        harness.close_workers(workers)
    assert list(blocks) == ["colonnade", "torch", "torch helped"], "torchrec cannot start"
    assert list(pythons) == ["colonnade", "torch"]
    assert versions["torch"] == torch.__version__ and "colonnade" in versions
    entropy = -(probability * np.log(probability) + (1 - probability) * np.log(1 - probability))
    for done in blocks.values():
        assert len(done.seconds) == 2 and min(done.seconds) > 0
        phases = [sum(parts) for parts in zip(*done.phases.values(), strict=True)]
        assert done.seconds == pytest.approx(phases)
        assert done.losses[1] == pytest.approx(entropy.mean(), abs=0.03)


@pytest.mark.parametrize(
    "part", ["embeddings", "interaction", pytest.param("products", marks=pytest.mark.slow)]
)
def test_a_part_of_a_step_is_measured_alone(tmp_path: Path, part: str) -> None:
    generator = np.random.default_rng(0)
    ids = np.stack([generator.integers(rows, size=(4, 64)) for rows in ROWS], axis=1)
    for name, values in (("dense", np.zeros((4, 64, 2), np.float32)), ("ids", ids)):
        np.save(tmp_path / f"{name}.npy", values)
    np.save(tmp_path / "label.npy", np.zeros((4, 64, 1), np.float32))
    case = Case(str(tmp_path), ROWS, 4, BOTTOM, TOP, 0.1, 1e-2, 1, seed=0, part=part)
    assert case.gradient(64).shape == (64, 4 * len(ROWS))
    names = ("colonnade", "torch", "torch helped")
    systems = {name: train.SYSTEMS[name] for name in names}
    pythons = {"colonnade": sys.executable, "torch": sys.executable}
    workers = train.open_workers(systems, pythons, case, {}, train.Console())
    try:
        blocks = harness.interleave(workers, rounds=1, steps=2, warm_up_steps=1)
    finally:
        harness.close_workers(workers)
    for system, done in blocks.items():
        assert done.losses == [0.0]
        assert done.phases["forward"][0] > 0 and done.phases["backward"][0] > 0
        units = {m.unit for m in train.cases_of("D=4", system, done, has_loss=False)}
        assert units == {"samples/s", "ms/step"}, "a loss of 0 is no result"


@pytest.mark.parametrize("kind", ["dlrm", "deepfm", "dcnv2"])
def test_a_helped_network_computes_what_the_shipped_one_does(kind: str) -> None:
    torch.manual_seed(0)
    shape = {"num_fields": 5, "dim": 8, "num_dense": 3, "top": [128, 64]}
    network = {
        "dlrm": lambda: DenseNetwork(**shape, bottom=[64, 80]),
        "deepfm": lambda: DeepFMNetwork(**shape),
        "dcnv2": lambda: DCNv2Network(**shape, cross_layers=2),
    }[kind]()
    inputs = torch.randn(96, 3), torch.randn(96, 40), torch.randn(96, 5)
    inputs = inputs if kind == "deepfm" else inputs[:2]
    results = []
    for item in (network, use_library_linear(network)):
        network.zero_grad()
        item(*inputs).square().sum().backward()
        results.append([item(*inputs).detach(), *(p.grad for p in item.parameters())])
    assert any(type(module) is LibraryLinear for module in network.modules())
    for shipped, helped in zip(*results, strict=True):
        torch.testing.assert_close(helped, shipped, rtol=1e-4, atol=1e-4)


def test_peers_get_the_librarys_settings_of_malloc(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        def __init__(self) -> None:
            self.calls: list[tuple[int, int]] = []

        def mallopt(self, name: int, value: int) -> int:
            self.calls.append((name, value))
            return 0

    calls = []
    for keep in (memory.keep_freed_memory, loop.keep_freed_memory):
        library = Library()
        monkeypatch.setattr("ctypes.CDLL", lambda _, library=library: library)
        monkeypatch.setattr("platform.libc_ver", lambda: ("glibc", "2.36"))
        keep()
        calls.append(library.calls)
    assert calls[0] == calls[1] and len(calls[0]) == 3


def test_stacked_rows_train_as_a_dense_table_would() -> None:
    torch.manual_seed(0)
    bag = torch.nn.EmbeddingBag(30, 4, mode="sum", sparse=True)
    optimizer = StackedRows(torch.nn.ModuleList([bag]), lr=0.5)
    expected, state = bag.weight.detach().clone(), torch.zeros(30)
    for _ in range(3):
        ids, gradient = torch.randint(30, (64,)), torch.randn(64, 4)
        optimizer.zero_grad()
        bag(ids, torch.arange(64)).backward(gradient)
        optimizer.step()
        for row in ids.unique().tolist():
            summed = gradient[ids == row].sum(0)
            state[row] += summed.square().mean()
            expected[row] -= 0.5 * summed / (state[row].sqrt() + 1e-8)
    torch.testing.assert_close(bag.weight.detach(), expected)


def test_parts_of_a_step_add_up_to_it() -> None:
    ms = {
        ("D=16", "colonnade"): 40, ("D=16", "torchrec"): 80, ("D=16", "torchrec helped"): 60,
        ("D=16", "torchrec helped, planner"): 50,
        ("D=16 sparse only", "colonnade"): 4, ("D=16 sparse only", "torchrec helped"): 8,
        ("D=16 sparse only", "torchrec helped, planner"): 9,
        ("D=16 interaction", "colonnade"): 5, ("D=16 interaction", "torch, our malloc"): 20,
        ("D=16 interaction", "torch helped"): 21,
        ("D=16 products", "colonnade"): 25, ("D=16 products", "torch, our malloc"): 30,
        ("D=16 products", "torch helped"): 15,
        ("D=16 malloc", "torchrec"): 84, ("D=16 malloc", "torchrec, our malloc"): 72,
        ("D=16 malloc", "colonnade"): 41, ("D=16 malloc", "colonnade, malloc as shipped"): 52,
    }  # fmt: skip
    measured = [Measured(c, s, "samples/s", [4000 / value]) for (c, s), value in ms.items()]
    splits = step_split.split_step(measured, 16, 4)
    assert list(splits) == ["colonnade", step_split.SHIPPED, "torchrec", "torchrec helped"]
    expected = {
        "step": 80, "embeddings": 8, "interaction": 20, "products": 30, "allocator": 12, "rest": 10,
    }  # fmt: skip
    assert splits["torchrec"] == pytest.approx(expected)
    assert splits["torchrec helped"]["embeddings"] == pytest.approx(9), (
        "of the fastest, the planner's"
    )
    assert splits[step_split.SHIPPED]["allocator"] == pytest.approx(11)
    saved = step_split.saved_by_part(splits, 16)
    assert saved["saved_ms_step_vs_torchrec_d16"] == pytest.approx(40)
    assert saved["saved_ms_embeddings_vs_torchrec_helped_d16"] == pytest.approx(5)
    rows = step_split.split_rows(measured, 16, 4)
    assert {m.case for m in rows} == {f"D=16 split {part}" for part in step_split.PARTS}


def test_a_file_of_pieces_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "find_commit", lambda: "abc")
    path = tmp_path / "train.json"
    file = harness.PieceFile(path, "train", rounds=3)
    file.add_piece("D=16", [Measured("D=16", "torch", "samples/s", [1.0])], 0.01)
    file.add_piece("D=64", [Measured("D=64", "torch", "samples/s", [1.0])], 0.4)

    def write(file: harness.PieceFile) -> None:
        machine = {"rounds": 3, "shares": file.shares, "versions": {"torch": "2"}}
        result = harness.report(
            "train", version="1", machine=machine, measured=file.measured, ratios={}
        )
        harness.write_report(path, result)

    write(file)
    again = harness.PieceFile(path, "train", rounds=3)
    assert again.has_piece("D=16") and again.versions == {"torch": "2"}
    assert not again.has_piece("D=64"), "others were busy"
    again.add_piece("D=64", [Measured("D=64", "torch", "samples/s", [2.0])], 0.02)
    assert again.others_share == 0.02
    assert [m.values for m in again.measured] == [[1.0], [2.0]]
    with pytest.raises(BenchError, match="other extent"):
        harness.PieceFile(path, "train", rounds=12)
    monkeypatch.setattr(harness, "find_commit", lambda: "def")
    with pytest.raises(BenchError, match="of commit abc, not def"):
        harness.PieceFile(path, "train", rounds=3)


class Diary:
    """Stands where a worker stands and writes down when it was asked for what."""

    def __init__(self, name: str, entries: list[tuple[str, int]]) -> None:
        self.name, self.entries = name, entries

    def send(self, message: dict) -> None:
        self.entries.append((self.name, message["steps"]))

    def answer(self) -> dict:
        seconds = [float(len(self.entries)), float(len(self.entries)) + 2]
        return {"seconds": seconds, "phases": {"wait": seconds}, "loss": 0.5}


def test_blocks_are_interleaved_and_the_warm_up_is_not_kept() -> None:
    entries: list[tuple[str, int]] = []
    workers = [Diary(name, entries) for name in "ab"]
    blocks = harness.interleave(workers, rounds=2, steps=5, warm_up_steps=30)
    assert entries == [("a", 30), ("b", 30), ("a", 5), ("b", 5), ("a", 5), ("b", 5)]
    assert blocks["a"].seconds == [4.0, 6.0]  # asked third and fifth; the mean of a block's steps
    assert blocks["b"].phases == {"wait": [5.0, 7.0]}


def test_a_worker_that_dies_says_why() -> None:
    worker = harness.open_worker("torch", sys.executable, "workers.no_such_system")
    with pytest.raises(BenchError, match=r"worker torch .*\n(.*\n)*.*no_such_system"):
        worker.answer()
    worker.close()


def test_an_environment_is_made_once_and_pips_reason_is_given(tmp_path: Path) -> None:
    python = harness.open_environment(tmp_path / "env", [["--no-index", "pip"]])  # has it already
    made = Path(python).lstat().st_mtime_ns
    assert harness.open_environment(tmp_path / "env", [["--no-index", "pip"]]) == python
    assert Path(python).lstat().st_mtime_ns == made
    with pytest.raises(BenchError, match="No matching distribution found for no-such"):
        harness.open_environment(tmp_path / "env", [["--no-index", "no-such-distribution"]])


def test_ratios_are_of_medians_and_the_worst_dim_counts() -> None:
    rates = {
        ("D=16", "colonnade"): [100.0, 300.0, 200.0],
        ("D=16", "torch"): [100.0, 100.0, 1.0],
        ("D=64", "colonnade"): [60.0],
        ("D=64", "torch"): [20.0],
        ("D=64", "torchrec"): [40.0],
        ("D=64" + train.SPARSE_ONLY, "colonnade"): [90.0],
        ("D=64" + train.SPARSE_ONLY, "torchrec"): [20.0],
        ("D=64", "torchrec helped"): [45.0],
        ("D=64", "torchrec helped, pipeline"): [50.0],
    }
    measured = [Measured(case, system, "samples/s", v) for (case, system), v in rates.items()]
    measured.append(Measured("D=16 wait", "torch", "ms/step", [1.0]))
    assert train.ratios_of(measured) == pytest.approx({
        "samples_vs_torch": 2.0,
        "samples_vs_torch_d16": 2.0,
        "samples_vs_torch_d64": 3.0,
        "samples_vs_torchrec": 1.5,
        "samples_vs_torchrec_d64": 1.5,
        "samples_vs_torchrec_helped": 1.2,
        "samples_vs_torchrec_helped_d64": 1.2,
        "sparse_step_vs_torchrec": 4.5,
        "sparse_step_vs_torchrec_d64": 4.5,
    })  # fmt: skip


def test_the_report_has_the_agreed_shape() -> None:
    blocks = harness.Blocks()
    for loss in (0.5, 0.4, 0.3):
        blocks.add({"seconds": [2.0], "phases": {name: [0.4] for name in PHASES}, "loss": loss})
    measured = train.cases_of("D=16", "torch", blocks)
    machine = harness.describe_machine(threads=2)
    result = harness.report("train", version="1", machine=machine, measured=measured, ratios={})
    assert list(result) == ["bench", "version", "commit", "machine", "cases", "ratios"]
    assert all(list(c) == ["case", "system", "unit", "median", "values"] for c in result["cases"])
    by_case = {case["case"]: case for case in result["cases"]}
    assert by_case["D=16"]["values"] == [train.BATCH_SIZE / 2] * 3
    assert by_case["D=16 loss"]["median"] == 0.4
    assert by_case["D=16 rows"]["median"] == pytest.approx(400)


def test_systems_that_learn_differently_are_not_compared() -> None:
    ours, other = harness.Blocks(losses=[0.50]), harness.Blocks(losses=[0.55])
    with pytest.raises(BenchError, match="D=16"):
        train.check_same_model({"colonnade": ours, "torch": other}, "D=16")
    train.check_same_model({"colonnade": ours, "torch": harness.Blocks(losses=[0.51])}, "D=16")


def test_a_workers_time_is_ours_once_it_has_ended() -> None:
    if harness.read_cpu_seconds() == (0.0, 0.0):
        pytest.skip("no /proc/stat here")
    burn = "import time\nwhile time.process_time() < 0.5: pass\nprint()"
    child = subprocess.Popen([sys.executable, "-c", burn], stdout=subprocess.PIPE)
    child.stdout.read()  # it has used its half second, and counts as another until it is waited for
    others_running, _ = harness.read_cpu_seconds()
    child.wait()
    others_ended, _ = harness.read_cpu_seconds()
    child.stdout.close()
    assert others_running - others_ended > 0.3
