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
from workers.loop import PHASES, Case  # noqa: E402
from workers.network import DCNv2Network, DeepFMNetwork, DenseNetwork  # noqa: E402

from colonnade import Batch, Feature, Ids, Table  # noqa: E402
from colonnade.models.dcnv2 import DCNv2  # noqa: E402
from colonnade.models.deepfm import DeepFM  # noqa: E402
from colonnade.models.dlrm import DLRM  # noqa: E402
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
    for (name, theirs), ours in zip(network.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(theirs.grad, ours.grad, msg=name)


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
    systems = {"colonnade": sys.executable, "torch": sys.executable, "torchrec": "false"}
    versions: dict[str, str] = {}
    workers = train.open_workers(systems, case, versions, train.Console())
    try:
        blocks = harness.interleave(workers, rounds=2, steps=20, warm_up_steps=80)
    finally:
        harness.close_workers(workers)
    assert list(systems) == list(blocks) == ["colonnade", "torch"], "torchrec cannot start"
    assert versions["torch"] == torch.__version__ and "colonnade" in versions
    entropy = -(probability * np.log(probability) + (1 - probability) * np.log(1 - probability))
    for done in blocks.values():
        assert len(done.seconds) == 2 and min(done.seconds) > 0
        phases = [sum(parts) for parts in zip(*done.phases.values(), strict=True)]
        assert done.seconds == pytest.approx(phases)
        assert done.losses[1] == pytest.approx(entropy.mean(), abs=0.03)


def test_the_embeddings_share_is_measured_without_the_network(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    ids = np.stack([generator.integers(rows, size=(4, 64)) for rows in ROWS], axis=1)
    for name, values in (("dense", np.zeros((4, 64, 2), np.float32)), ("ids", ids)):
        np.save(tmp_path / f"{name}.npy", values)
    np.save(tmp_path / "label.npy", np.zeros((4, 64, 1), np.float32))
    case = Case(str(tmp_path), ROWS, 4, BOTTOM, TOP, 0.1, 1e-2, 1, seed=0, sparse_only=True)
    assert case.gradient(64).shape == (64, 4 * len(ROWS))
    systems = {"colonnade": sys.executable, "torch": sys.executable}
    workers = train.open_workers(systems, case, {}, train.Console())
    try:
        blocks = harness.interleave(workers, rounds=1, steps=2, warm_up_steps=1)
    finally:
        harness.close_workers(workers)
    for system, done in blocks.items():
        assert done.losses == [0.0]
        assert done.phases["forward"][0] > 0 and done.phases["rows"][0] > 0
        units = {m.unit for m in train.cases_of("D=4" + train.SPARSE_ONLY, system, done)}
        assert units == {"samples/s", "ms/step"}, "a loss of 0 is no result"


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
    }
    measured = [Measured(case, system, "samples/s", v) for (case, system), v in rates.items()]
    measured.append(Measured("D=16 wait", "torch", "ms/step", [1.0]))
    assert train.ratios_of(measured) == {
        "samples_vs_torch": 2.0,
        "samples_vs_torch_d16": 2.0,
        "samples_vs_torch_d64": 3.0,
        "samples_vs_torchrec": 1.5,
        "samples_vs_torchrec_d64": 1.5,
        "sparse_step_vs_torchrec": 4.5,
        "sparse_step_vs_torchrec_d64": 4.5,
    }
    assert harness.geometric_mean([2.0, 8.0]) == pytest.approx(4.0)


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
    ours, theirs = harness.Blocks(losses=[0.50]), harness.Blocks(losses=[0.55])
    with pytest.raises(BenchError, match="D=16"):
        train.check_same_model({"colonnade": ours, "torch": theirs}, "D=16")
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
