"""fit: a model and data of one's own, through the same trainer as the command line."""

from __future__ import annotations

import json
import shutil
import signal

import numpy as np
import pytest
import torch
from own_model import Net, assert_same, rows_of, source, splits
from ranks import console_of, run_ranks
from small_run import CONFIG
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader

import colonnade
from colonnade import Mesh, RowOptimizer
from colonnade.checkpoint.header import list_checkpoints
from colonnade.config.run import build_config
from colonnade.data import Splits, open_source
from colonnade.errors import CheckpointError, ConfigError, DataError, WorldError
from colonnade.models.build import build_model
from colonnade.run.run import open_run


def test_a_model_of_ones_own_learns():
    model = Net()
    result = colonnade.fit(model, splits(3000), epochs=6, batch_size=100, quiet=True)
    assert result.metrics["test_auc"] > 0.75
    assert result.outcome.steps == 180 and result.outcome.best_step is not None
    assert result.run is None


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"user": 1}, "got a dict .*, wanted a Source, or a DataLoader.*open_tensors"),
        (7, "got a int .*, wanted a Source, or a DataLoader.*open_tensors"),
        (DataLoader([1, 2]), "first batch: got a Tensor, wanted a mapping of names to tensors"),
        (np.arange(3), "first batch: got a int64, wanted a mapping of names to tensors"),
    ],
)
def test_data_that_is_no_source_is_refused_with_what_opens_it(data, message):
    for wrapped in (data, Splits(train=source(10), test=data)):
        with pytest.raises((ConfigError, DataError), match=message):
            colonnade.fit(Net(), wrapped, quiet=True)


def test_fit_is_a_plain_loop_written_down():
    model, other = Net(), Net()
    colonnade.fit(model, source(500), batch_size=50, quiet=True)
    rows = RowOptimizer(other.collection)
    dense = torch.optim.Adam(other.parameters(), lr=1e-3)
    for batch in other.collection.lookahead(source(500).batches(50)):
        dense.zero_grad()
        loss = binary_cross_entropy_with_logits(other(batch), batch.label)
        loss.backward()
        rows.step()
        dense.step()
    assert_same(model, other, rtol=1e-5, atol=1e-6)


def test_fit_trains_what_open_run_trains():
    """One path: the command line's model and data handed to fit give the command line's bits."""
    config = build_config(CONFIG)
    data = open_source("synthetic", **CONFIG["data"]["options"])
    model = build_model(data.train.schema, config)
    colonnade.fit(
        model, data, batch_size=100, epochs=2, threads=1, dense_lr=config.dense.lr, quiet=True
    )
    run = open_run(config, Mesh(), None)
    run.train()
    for name, value in model.state_dict().items():
        assert torch.equal(value, run.trainer.model.state_dict()[name]), name
    for table in model.embeddings.tables:
        ids = torch.arange(table.rows)
        one, other = (m.embeddings.rows(table.name, ids) for m in (model, run.trainer.model))
        assert torch.equal(one, other)


def test_a_run_goes_on_to_the_same_bits_and_its_checkpoints_can_be_read(tmp_path):
    settings = {"batch_size": 50, "quiet": True, "run": tmp_path / "run"}
    colonnade.fit(Net(), splits(), epochs=1, **settings)
    model = Net()
    result = colonnade.fit(model, splits(), epochs=3, **settings)
    assert result.resumed_at == 12 and result.outcome.steps == 24
    straight = Net()
    whole = colonnade.fit(straight, splits(), epochs=3, **settings | {"run": tmp_path / "straight"})
    assert_same(model, straight)
    assert result.metrics == whole.metrics
    read = Net(seed=5)
    assert colonnade.load_checkpoint(read, tmp_path / "run", at="last") == 36
    assert_same(read, model)
    best = Net()
    assert colonnade.load_checkpoint(best, tmp_path / "run", at="best") == result.outcome.best_step


def test_a_finished_run_gives_what_it_recorded_and_its_weights(tmp_path):
    settings = {"batch_size": 50, "epochs": 2, "quiet": True, "run": tmp_path / "run"}
    trained, again = Net(), Net(seed=7)
    first = colonnade.fit(trained, splits(), **settings)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}
    second = colonnade.fit(again, splits(), **settings)
    assert second.outcome == first.outcome and second.metrics == first.metrics
    assert second.resumed_at == 24
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in before} == before
    assert_same(trained, again)


def test_a_run_killed_before_its_summary_gets_the_same_one(tmp_path):
    """Run is killed between the last checkpoint and the summary: the checkpoint knows what the call that made it had
    done."""
    settings = {"batch_size": 50, "epochs": 2, "quiet": True, "run": tmp_path / "run"}
    first = colonnade.fit(Net(), splits(), **settings)
    path = tmp_path / "run" / "summary.json"
    before = json.loads(path.read_text())
    path.unlink()
    second = colonnade.fit(Net(seed=7), splits(), **settings)
    after = json.loads(path.read_text())
    for name in ("steps", "samples", "skipped", "step", "metrics", "best_step", "stopped"):
        assert after[name] == before[name], name
    assert before["steps"] == 24 and second.metrics == first.metrics
    assert 0 < after["seconds"] <= before["seconds"] and after["samples_per_second"] > 0
    assert colonnade.fit(Net(), splits(), **settings).outcome == second.outcome  # finished


def finished_on_two_ranks(mesh, folder):
    run = open_run(build_config(CONFIG), mesh, folder, console=console_of(mesh))
    outcome = run.train()
    run.close()
    again = open_run(build_config(CONFIG), mesh, folder, console=console_of(mesh))
    is_finished, repeated = again.final_summary is not None, again.train()
    again.close()
    before = json.loads((folder / "summary.json").read_text())
    mesh.barrier()
    if mesh.rank == 0:
        (folder / "summary.json").unlink()
    killed = open_run(build_config(CONFIG), mesh, folder, console=console_of(mesh))
    killed.train()
    killed.close()
    mesh.barrier()
    after = json.loads((folder / "summary.json").read_text())
    assert (before["steps"], before["samples"]) == (after["steps"], after["samples"])
    return is_finished, repeated.metrics == outcome.metrics, (folder / "summary.json").read_text()


def test_two_ranks_agree_that_a_run_is_finished(tmp_path):
    for is_finished, is_same, summary in run_ranks(2, finished_on_two_ranks, tmp_path / "run"):
        assert is_finished and is_same and json.loads(summary)["steps"] > 0


def on_two_ranks(mesh, folder):
    model = Net("float64", seed=mesh.rank)  # rank 0's dense weights count
    model.collection.seed = 0
    result = colonnade.fit(
        model, splits(), run=folder, epochs=2, batch_size=50,  # finds its world, as under torchrun
        mirror=f"file://{folder}-mirror",
        dense_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )  # fmt: skip
    return result.metrics, rows_of(model), model.bias.state_dict()


def test_two_ranks_train_what_one_trains(tmp_path):
    wanted = on_two_ranks(Mesh(), tmp_path / "one")
    for metrics, rows, dense in run_ranks(2, on_two_ranks, tmp_path / "two"):
        assert metrics == pytest.approx(wanted[0], rel=1e-9)
        for name, value in rows.items():
            torch.testing.assert_close(value, wanted[1][name], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(dense["weight"], wanted[2]["weight"], rtol=1e-9, atol=1e-12)
    read = Net("float64", seed=5)  # and one process reads what two have saved
    assert colonnade.load_checkpoint(read, tmp_path / "two") == 24
    torch.testing.assert_close(rows_of(read), rows)
    colonnade.fetch_run(f"file://{tmp_path}/two-mirror", tmp_path / "fetched")
    fetched = Net("float64", seed=6)
    assert colonnade.load_checkpoint(fetched, tmp_path / "fetched") == 24
    assert_same(read, fetched)


def of_another_width(mesh):
    with pytest.raises(WorldError, match=r"ranks disagree: .*more"):
        colonnade.fit(Net(extra=("more",) * mesh.rank), source(50), mesh=mesh)


def test_ranks_with_other_models_are_refused():
    run_ranks(2, of_another_width)


def test_ctrl_c_checkpoints_and_the_same_call_goes_on(tmp_path):
    def interrupted(output, batch):
        signal.raise_signal(signal.SIGINT)
        return output[:, 0] ** 2

    settings = {"run": tmp_path, "batch_size": 50, "quiet": True}
    before = signal.getsignal(signal.SIGINT)
    result = colonnade.fit(Net(), source(200), loss=interrupted, **settings)
    assert result.outcome.stopped and result.outcome.steps == 1
    assert signal.getsignal(signal.SIGINT) is before
    again = colonnade.fit(Net(), source(200), **settings)
    assert again.resumed_at == 1 and again.outcome.steps == 3


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_cut_by_max_steps_and_gone_on_with_is_never_cut(staleness, tmp_path):
    models = []
    for folder, cuts in (("whole", [None]), ("cut", [7, 8, None])):
        for max_steps in cuts:
            torch.manual_seed(0)
            model = Net()
            colonnade.fit(
                model, splits(), run=tmp_path / folder, epochs=2, batch_size=50, quiet=True,
                staleness_steps=staleness, max_steps=max_steps,
            )  # fmt: skip
        models.append(model)
    assert_same(*models)


def test_no_epoch_trains_nothing():
    result = colonnade.fit(Net(), source(200), epochs=0, batch_size=50, quiet=True)
    assert result.outcome.steps == 0
    with pytest.raises(DataError, match="got no samples to train on"):
        colonnade.fit(Net(), source(0), batch_size=50, quiet=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there():
    with pytest.raises(ConfigError, match=r"train\.device=cuda, but torch sees no GPU"):
        colonnade.fit(Net(), source(100), device="cuda", quiet=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU on this machine")
def test_the_dense_network_on_a_gpu_trains_what_the_processor_trains():
    results = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = Net()
        colonnade.fit(model, splits(), epochs=1, batch_size=64, device=device, quiet=True)
        results.append(rows_of(model).values())
        assert next(model.parameters()).device.type == device
    for ours, other in zip(*results, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-3, atol=1e-4)


def test_a_loss_of_ones_own():
    def squares(output, batch):
        return (output[:, 0] - batch.label[:, 0]).square()

    model = Net()
    before = colonnade.fit(model, splits(), loss=squares, epochs=1, batch_size=50, quiet=True)
    after = colonnade.fit(model, splits(), loss=squares, epochs=5, batch_size=50, quiet=True)
    assert after.metrics["validation_loss"] < before.metrics["validation_loss"]
    assert after.outcome.best_step is not None
    with pytest.raises(DataError, match="wanted one number per sample"):
        colonnade.fit(Net(), source(50), loss=lambda o, b: o.sum(), batch_size=50, quiet=True)


def test_what_cannot_work_is_said(tmp_path):
    with pytest.raises(ConfigError, match="did you mean epochs"):
        colonnade.fit(Net(), source(50), epoch=3)
    with pytest.raises(ConfigError, match="which the model's tables hold"):
        colonnade.fit(Net(), source(50), embedding_lr=0.1)
    with pytest.raises(ConfigError, match="0 EmbeddingCollections"):
        colonnade.fit(torch.nn.Linear(2, 1), source(50), quiet=True)
    with pytest.raises(ConfigError, match="no"):
        colonnade.fit(Net(), Splits(train=source(50)), patience=2, quiet=True)
    folder = tmp_path / "run"
    colonnade.fit(Net(), source(50), run=folder, batch_size=50, quiet=True)
    assert list_checkpoints(folder) == [1]
    with pytest.raises(ConfigError, match=r"colonnade\.load_checkpoint"):
        open_run(build_config({"data": {"name": "own"}}), Mesh(), folder)
    with pytest.raises(CheckpointError, match="another model"):
        colonnade.load_checkpoint(Net(extra=("more",)), folder)


@pytest.mark.parametrize(("then", "now"), [(4, 2), (3, 0)])
def test_a_smaller_bound_goes_on_to_the_same_bits_too(then, now, tmp_path):
    """Rows read further ahead than this run reads are read again: its own checkpoints could not hold them."""
    models = []
    settings = {"batch_size": 100, "lookahead": 4, "threads": 1, "quiet": True}
    first = tmp_path / "first"
    colonnade.fit(Net(), splits(2000), max_steps=6, run=first, staleness_steps=then, **settings)
    for name, stops in (("straight", [12]), ("killed", [7, 12])):
        shutil.copytree(first, tmp_path / name)
        for stop in stops:
            model = Net()
            colonnade.fit(
                model, splits(2000), max_steps=stop, run=tmp_path / name, staleness_steps=now, **settings
            )  # fmt: skip
        models.append(model)
    assert_same(*models)
