"""Trainers with servers train what as many ranks train that hold the rows themselves, and what one rank trains."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import own_model
import pytest
import test_retrieval as retrieval
import torch
from plans import by_table
from ranks import console_of, run_ranks
from small_run import CONFIG, digest, opened
from test_byte_law import CHANNELS, FEATURES, SIZE, STEPS, TABLES, batch_of
from test_run import poisoned

from colonnade import (
    Adam,
    Batch,
    EmbeddingCollection,
    Ids,
    Mesh,
    PlanConfig,
    RowOptimizer,
    build_plan,
    embedding,
    fit,
)
from colonnade.comm.collectives import notify_servers
from colonnade.comm.mesh import TRAINING
from colonnade.comm.process_groups import assign_server_ranks
from colonnade.comm.traffic import Traffic
from colonnade.config.run import build_config, override_settings
from colonnade.data import open_batches
from colonnade.errors import ConfigError
from colonnade.models.retriever import RetrievalObjective
from colonnade.plan.measure.profile import RunBatches, build_table_loads, profile_batches
from colonnade.plan.search import choose
from colonnade.plan.search.candidates import Constraint, Problem
from colonnade.report.reading import read_run_folder
from colonnade.run.run import load_run_config, open_run
from colonnade.topology.sharding import Sharding, row_wise_over_owners, table_wise
from colonnade.topology.world import World
from colonnade.train import trainer
from colonnade.train.dense import DenseGradients
from colonnade.train.metrics_file import FILE_NAME, ROWS_FILE_NAME, read_metrics_lines
from colonnade.train.record import ROW_KINDS


def _plateau(optimizer):
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", factor=0.3, patience=0)


LATE = {"plan.servers": 1, "plan.staleness_steps": 2}
BASE = {"epochs": 1, "batch_size": 50, "evaluate_steps": 5, "dense_lr": 0.05}
"""600 samples: 12 batches, the last of an epoch as full as the others."""
LONG = {"epochs": 2, "evaluate_steps": 9}
CASES = {
    "rows": {},
    "uneven, ahead": {
        "batch_size": 47,
        "epochs": 2,
        "max_steps": 16,
        "staleness_steps": 2,
        "lookahead": 3,
    },
    "uneven": {"batch_size": 47, "epochs": 2, "max_steps": 16},
    "ahead": {"staleness_steps": 2, "lookahead": 3},
    "pooled": {"exchange": "pooled"},
    "partials": {"exchange": "partials"},
    "towers": {"exchange": "towers"},
    "tower_rows": {"exchange": "tower_rows"},
    "coded": {"codec": {"dense": "int8"}},
    "own data": {"epochs": 2, "evaluate_steps": 0},
    "decisions": {
        **LONG,
        "accumulate": 2,
        "patience": 2,
        "min_delta": 0.01,
        "embedding_clip_norm": 0.02,
        "dense_clip_norm": 0.05,
        "row_schedule": {"name": "linear", "warmup_steps": 5},
        "dense_schedule": _plateau,
    },
}


SLOW = ("uneven", "ahead", "towers")
"""Parts of "uneven, ahead", and what `tower_rows` does, too."""


def by_default(names):
    """Return the cases of a test, those marked that `make test-all` alone runs."""
    return [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in names]


def own_data(number):
    """A data set that is made batch by batch, and says nothing of its length; the second trainer's ends first."""

    def of(epoch):
        for step in range(5 - number):
            made = own_model.columns(20 + step, seed=100 * epoch + 10 * number + step)
            ids = {name: Ids(values) for name, values in made["ids"].items()}
            yield Batch(20 + step, made["dense"], ids, label=made["label"][:, None])

    return replace(own_model.splits(), train=open_batches(of, own_model.source(9).schema))


def trained(mesh, name, servers, **more):
    """Return a rank's results: rows and metrics of all ranks, and the dense network on trainers."""
    model, data = own_model.Net("float64", optimizer=Adam(lr=0.05)), own_model.splits()
    if name == "own data":
        world = mesh.world.with_servers(servers)
        data = own_data(None if world.is_server(mesh.rank) else world.trainers.index(mesh.rank))
    result = fit(model, data, mesh=mesh, servers=servers, **(BASE | more | CASES[name]))
    outcome = result.outcome
    return {
        "rows": own_model.rows_of(model),
        "dense": model.bias.state_dict(),
        "metrics": result.metrics,
        "outcome": (outcome.steps, outcome.samples, outcome.stopped_early, outcome.best_step),
        "num_rows": sum(model.collection.store.num_rows(t) for t in range(2)),
        "dense_bytes": model.collection.mesh.traffic.bytes_of("dense"),
    }


@cache
def with_a_server(name):
    """Return the results of two trainers and a server in a case."""
    return run_ranks(3, trained, name, 1)


@pytest.fixture(scope="module")
def whole_runs(tmp_path_factory):
    """The folder of whole runs of two ranks and of two with a server; what the first of them and the server had."""
    folder = tmp_path_factory.mktemp("runs")
    run_ranks(2, run_until, folder / "whole-0", 20, 0)
    trainer, _, server = run_ranks(3, run_until, folder / "whole-1", 20, 1)
    return folder, trainer, server


@pytest.mark.parametrize("name", by_default(CASES))
def test_two_trainers_and_a_server_train_what_two_ranks_train(name):
    one, two, server = with_a_server(name)
    wanted = run_ranks(2, trained, name, 0)[0]
    # Norms and pooled sums are added up owner by owner.
    is_exact = name not in ("pooled", "partials", "towers", "tower_rows", "decisions")
    exact = {"rtol": 0, "atol": 0} if is_exact else {"rtol": 1e-11, "atol": 1e-13}
    for result in (one, two, server):
        torch.testing.assert_close(result["rows"], wanted["rows"], **exact)
        assert result["outcome"][0] == wanted["outcome"][0]
        assert result["outcome"][2:] == wanted["outcome"][2:]
        assert list(result["metrics"]) == list(wanted["metrics"])
        for metric, value in wanted["metrics"].items():
            assert result["metrics"][metric] == pytest.approx(value, rel=1e-11, nan_ok=True)
    for result in (one, two):
        torch.testing.assert_close(result["dense"], wanted["dense"], **exact)
    assert server["outcome"][1] == 0  # samples
    assert one["outcome"][1] == wanted["outcome"][1]
    assert one["dense_bytes"] == wanted["dense_bytes"] and not server["dense_bytes"]
    assert server["num_rows"] > 0 and one["num_rows"] == two["num_rows"] == 0


@pytest.mark.parametrize(
    "name", by_default(name for name in CASES if name not in ("own data", "coded"))
)
def test_and_what_one_rank_trains(name):
    result = with_a_server(name)[0]
    wanted = trained(Mesh(), name, 0)
    close = {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(result["rows"], wanted["rows"], **close)
    torch.testing.assert_close(result["dense"], wanted["dense"], **close)
    for metric, value in wanted["metrics"].items():
        assert math.isclose(result["metrics"][metric], value, rel_tol=1e-9)


ON_HOSTS = ("rows", "uneven", "ahead", "coded", "pooled", "decisions")


def on_hosts(mesh, folder, servers):
    cases = {name: trained(mesh, name, servers, **LONG) for name in ON_HOSTS}
    return cases, on_disk(mesh, folder, servers), decided(mesh, servers), retrieved(mesh, servers)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_trainers_and_a_server_on_each_of_two_hosts(tmp_path):
    """The bits of the four trainers alone, on two hosts; and each goes on with what the others have left."""
    without = run_ranks(4, on_hosts, tmp_path, 0, ranks_per_host=2, timeout=500)
    with_servers = run_ranks(6, on_hosts, tmp_path, 1, ranks_per_host=3, timeout=500)
    wanted, runs, _, tables = without[0]
    for number, (cases, halves, decided_on, result) in enumerate(with_servers):
        for name, case in cases.items():
            is_exact = name not in ("pooled", "decisions")
            close = {"rtol": 0, "atol": 0} if is_exact else {"rtol": 1e-11, "atol": 1e-13}
            torch.testing.assert_close(case["rows"], wanted[name]["rows"], **close)
            assert case["outcome"][0] == wanted[name]["outcome"][0]
            is_server = number in (2, 5)
            assert (case["num_rows"] > 0) == is_server == (case["dense_bytes"] == 0)
            if not is_server:
                torch.testing.assert_close(case["dense"], wanted[name]["dense"], **close)
        assert decided_on == without[0][2] == (5, 1, True)
        assert halves[0]["metrics"] == runs[0]["metrics"]
        torch.testing.assert_close(result, tables, rtol=1e-10, atol=1e-12)
    run_ranks(4, run_until, tmp_path / "half-1", 20, 0, ranks_per_host=2)
    for name in ("whole-1", "half-0", "half-1"):
        assert digest(tmp_path / name) == digest(tmp_path / "whole-0"), name


TIERED = {
    "plan.memory.dram": 30_000,
    "plan.staleness_steps": 1,
    "train.evaluate_steps": 6,
    "data.next_use_hints": True,
}


def run_until(mesh, folder, step, servers):
    """A run of files below memory, begun or gone on with; what this rank's rows came from."""
    settings = {**TIERED, "plan.servers": servers, "train.max_steps": step}
    config = override_settings(build_config(CONFIG), settings)
    run = open_run(config, mesh, folder, data=opened(config), console=console_of(mesh))
    outcome = run.train()
    run.close()
    sources = run.trainer.collection.store.sources
    return {
        "steps": outcome.steps,
        "read": sources.read,
        "metrics": outcome.metrics,
        "summary": run.summary,
    }


def on_disk(mesh, folder, servers):
    """A whole run, half a run, and the other half of what others have left."""
    results = [run_until(mesh, folder / f"whole-{servers}", 20, servers)]
    if (folder / f"half-{1 - servers}").exists():
        results.append(run_until(mesh, folder / f"half-{1 - servers}", 20, servers))
    results.append(run_until(mesh, folder / f"half-{servers}", 9, servers))
    return results


def decided(mesh, servers):
    """Return the outcome of a run whose second rank meets a NaN in step 3, and whose last is asked to stop after
    that."""
    settings = {
        "plan.servers": servers, "train.on_non_finite": "skip", "train.evaluate_steps": 4,
        "train.test_at": "evaluations",
    }  # fmt: skip
    config = override_settings(build_config(CONFIG), settings)
    run = open_run(
        config,
        mesh,
        None,
        data=poisoned(3) if mesh.rank == 1 else opened(config),
        console=console_of(mesh),
    )
    evaluate, run.trainer.evaluate = run.trainer.evaluate, lambda source: ask(source)

    def ask(source):
        run.trainer.stop_requested = mesh.rank == mesh.num_ranks - 1
        return evaluate(source)

    outcome = run.train()
    return outcome.steps, outcome.skipped, outcome.stopped


def begun(mesh):
    """Updates under way when a run's evaluations begin, and at each word of theirs to servers."""
    config = override_settings(
        build_config(CONFIG),
        LATE | {"train.max_steps": 5, "train.evaluate_steps": 2, "train.test_at": "evaluations"},
    )
    run = open_run(config, mesh, None, data=opened(config), console=console_of(mesh))
    updates, evaluate, before, at = (
        run.trainer.collection.pipeline.updates, run.trainer.evaluate, [], [],
    )  # fmt: skip

    def watched(source):
        before.append(updates.num_pending)
        return evaluate(source)

    def notify(mesh, own):
        at.append(updates.num_pending)
        return notify_servers(mesh, own)

    run.trainer.evaluate = watched
    with pytest.MonkeyPatch.context() as patch:
        for module in (trainer, embedding):
            patch.setattr(module, "notify_servers", notify)
        run.train()
    return before, at


def test_nothing_is_under_way_when_servers_begin_to_listen():
    """Trainers would ask them for what an update's end needs, and they would answer reads alone."""
    for before, at in run_ranks(3, begun):
        assert any(before) and len(at) > len(before) and not any(at)


def test_the_first_server_tells_of_rows(whole_runs):
    folder, trainer, server = whole_runs
    assert server["read"] > 0 and trainer["read"] == 0  # from its files
    assert trainer["summary"]["row_sources"]["read"] == server["read"]
    assert trainer["summary"]["num_trainers"] == 2
    kinds = {
        name: [line["kind"] for line in read_metrics_lines(folder / "whole-1" / name)]
        for name in (FILE_NAME, ROWS_FILE_NAME)
    }
    assert set(ROW_KINDS).isdisjoint(kinds[FILE_NAME]) and set(kinds[ROWS_FILE_NAME]) == set(
        ROW_KINDS
    )
    assert {"train", "tiers", "tables"} <= {
        line["kind"] for line in read_run_folder(folder / "whole-1").lines
    }


def halves(mesh, folder):
    """Train with a server: the second half of a run of two ranks, and half a run."""
    return [
        run_until(mesh, folder / "half-0", 20, 1)["steps"],
        run_until(mesh, folder / "half-1", 9, 1)["steps"],
    ]


@pytest.mark.slow
def test_checkpoints_go_from_ranks_with_servers_to_ranks_without_and_back(whole_runs):
    folder, of_trainer, of_server = whole_runs
    run_ranks(2, run_until, folder / "half-0", 9, 0)
    assert run_ranks(3, halves, folder) == [[11, 9]] * 3
    again = run_ranks(2, run_until, folder / "half-1", 20, 0)
    wanted = digest(folder / "whole-0")
    assert digest(folder / "whole-1") == wanted
    assert digest(folder / "half-0") == wanted
    assert digest(folder / "half-1") == wanted
    assert of_trainer["steps"] == 20 and again[0]["steps"] == 11
    metrics = of_trainer["metrics"]
    assert metrics == of_server["metrics"]
    read = open_run(load_run_config(folder / "whole-1"), Mesh(), folder / "whole-1", read_only=True)
    result = read.trainer.evaluate(
        read.trainer.data.test
    )  # one process reads what servers have left
    read.close()
    assert result["auc"] == pytest.approx(metrics["test_auc"], abs=1e-4)


def retrieved(mesh, servers):
    """Rows of a model whose candidates are those of all trainers, in a loop of one's own."""
    mesh, model = assign_server_ranks(mesh, servers), retrieval.two_tower()
    trainers, collection = mesh.trainers, model.embeddings.open(mesh=mesh)
    rows, dense = RowOptimizer(collection), DenseGradients(list(model.parameters()), mesh)
    dense.build_buckets()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts = 99 if mesh.is_server else trainers.num_ranks  # the first of 99 parts of 8 is empty
    made = (retrieval.share_of(retrieval.pair_batch(n, n), trainers.rank, parts) for n in (8, 2, 7))
    for batch in collection.lookahead(made):
        dense.zero_gradients()
        if mesh.is_server:
            collection(batch)
        else:
            RetrievalObjective().loss(model, batch, trainers).backward()
        dense.reduce(finite=collection.pipeline.gradients.are_finite(), stop=False)
        rows.step(agreed=True)
        optimizer.step()
    return {t.name: collection.rows(t.name, torch.arange(t.rows)) for t in collection.tables}


def test_candidates_of_a_retrieval_model_are_those_of_the_trainers():
    _, _, tables = retrieval.train(Mesh(), "two_tower", sizes=(8, 2, 7))
    for results in (*run_ranks(2, retrieved, 0), *run_ranks(3, retrieved, 1)):
        torch.testing.assert_close(results, tables, rtol=1e-10, atol=1e-12)


def test_nan_and_a_wish_to_stop_are_heard_by_all():
    outcomes = [*run_ranks(2, decided, 0), *run_ranks(3, decided, 1)]
    assert outcomes == [(5, 1, True)] * 5


WORLD = World(num_hosts=2, ranks_per_host=2, servers_per_host=1)
DEALT = Constraint("row_wise", "rows")
FORCED = {
    "rows": {},
    "rows of some on one server": {
        "big": Constraint("table_wise", "rows", (1,)), "small": Constraint("table_wise", "rows", (3,)),
    },
    "pooled beside rows": {"bags": Constraint("row_wise", "pooled"), "small": Constraint("table_wise", "pooled", (3,))},
}  # fmt: skip


def sharding_of(constraint: Constraint) -> Sharding:
    return table_wise(*constraint.ranks) if constraint.ranks else row_wise_over_owners(WORLD)


def counted(mesh):
    """Return this rank's bytes of all steps by (channel, link), for each case, in a loop of one's own."""
    results = {}
    for case, forced in FORCED.items():
        alone = replace(assign_server_ranks(mesh, 1), traffic=Traffic())
        collection = EmbeddingCollection(TABLES, FEATURES)
        plan = build_plan(
            TABLES,
            alone.world,
            PlanConfig(
                tables=by_table(
                    sharding={name: sharding_of(constraint) for name, constraint in forced.items()},
                    exchange={name: constraint.exchange for name, constraint in forced.items()},
                )
            ),
        )
        collection.open(plan, alone)
        rows, size = RowOptimizer(collection), 0 if alone.is_server else SIZE // 2
        own_batches = (
            batch_of(1000 + 2 * t + alone.trainers.rank, "spread", size) for t in range(STEPS)
        )
        for batch in collection.lookahead(own_batches):
            sum(value.sum() for value in collection(batch).values()).backward()
            rows.step()
        results[case] = dict(alone.traffic.sent_bytes)
    return results


def test_bytes_are_foretold_for_trainers_and_servers():
    everyone = run_ranks(4, counted, ranks_per_host=2)
    sampled = profile_batches(TABLES, FEATURES, [batch_of(step, "spread") for step in range(30)])
    loads = build_table_loads(
        TABLES, FEATURES, sampled, WORLD, RunBatches(batch_size=SIZE, last_batch=100)
    )
    for case, text in FORCED.items():
        forced = {table.name: text.get(table.name, DEALT) for table in TABLES}
        choice = choose(Problem(loads, WORLD, forced=forced))
        for channel in CHANNELS:
            for link in ("local", "remote"):
                sent = sum(item[case].get((channel, link), 0) for item in everyone) / (4 * STEPS)
                assert choice.sent[channel, link] == pytest.approx(sent, rel=0.02), (case, channel)


def test_tables_are_chosen_places_on_servers_alone():
    sampled = profile_batches(TABLES, FEATURES, [batch_of(step, "spread") for step in range(9)])
    for servers in (1, 3):
        world = World(num_hosts=2, ranks_per_host=4, servers_per_host=servers)
        loads = build_table_loads(
            TABLES, FEATURES, sampled, world, RunBatches(batch_size=SIZE, last_batch=100)
        )
        for table in choose(Problem(loads, world)).tables:
            for other in (table.chosen, *table.others):
                assert set(other.sharding.ranks) <= set(world.servers)
                assert other.exchange != "replicated"


def test_numbers_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="got 2 of the 2 ranks of each host"):
        WORLD.with_servers(2)
    with pytest.raises(ConfigError, match="got 1 of the 1 ranks of each host"):
        fit(own_model.Net(), own_model.splits(), servers=1, quiet=True)
    with pytest.raises(ConfigError, match="servers"):
        build_config({"plan": {"servers": -1}})
    with pytest.raises(ConfigError, match="rank 0 trains and has no rows"):
        build_plan(TABLES, 2, PlanConfig(servers=1, tables={"big": {"sharding": table_wise(0)}}))


def test_every_rank_makes_the_groups_of_trainers_in_one_order(monkeypatch):
    made = []

    def group(ranks=None, timeout=None, backend=None):
        made.append(tuple(ranks))
        return made[-1]

    monkeypatch.setattr("colonnade.comm.process_groups.dist.new_group", group)
    orders = set()
    for rank in range(6):
        made.clear()
        peer_monitor = SimpleNamespace(timeout=1.0, participants={})
        world = World(num_hosts=2, ranks_per_host=3)
        mesh = assign_server_ranks(Mesh(world, rank, peer_monitor=peer_monitor), 1)
        orders.add(tuple(made))
        trainers = mesh.trainers
        assert mesh.is_server == (rank in (2, 5)) and mesh.num_ranks == 6
        if mesh.is_server:
            assert trainers.num_ranks == 1 and not trainers.groups
            continue
        assert (trainers.num_ranks, trainers.rank) == (4, (0, 1, None, 2, 3)[rank])
        assert trainers.group("dense") == trainers.group(TRAINING) == (0, 1, 3, 4)
        assert trainers.group("dense", trainers.host_scope) == ((0, 1) if rank < 3 else (3, 4))
        over_hosts = trainers.group("dense", trainers.cross_host_scope)
        assert over_hosts == ((0, 3) if rank in (0, 3) else (1, 4))
        assert peer_monitor.participants["trainers dense in host"] == {0, 1, 3, 4}
    assert len(orders) == 1


def pushes_and_signals(mesh, staleness_steps):
    """Train some steps; return in which order the ranks' status and gradients of rows were sent."""
    calls, all_reduce, all_to_all = [], Mesh.all_reduce, Mesh.all_to_all

    def record_status(self, channel, *arguments, **options):
        calls.extend(["status"] * (channel == "push"))
        return all_reduce(self, channel, *arguments, **options)

    def record_gradients(self, channel, *arguments, **options):
        calls.extend(["gradients"] * (channel == "push"))
        return all_to_all(self, channel, *arguments, **options)

    Mesh.all_reduce, Mesh.all_to_all = record_status, record_gradients
    settings = {"plan.servers": 1, "plan.staleness_steps": staleness_steps, "train.max_steps": 4}
    config = override_settings(build_config(CONFIG), settings)
    try:
        run = open_run(config, mesh, None, console=console_of(mesh))
        run.train()
        run.close()
    finally:
        Mesh.all_reduce, Mesh.all_to_all = all_reduce, all_to_all
    return calls


@pytest.mark.parametrize("staleness_steps", [0, 1, 2])
def test_no_rank_waits_for_late_gradients_to_learn_the_others_status(staleness_steps):
    """Both travel on the same connections, so a status that is sent second arrives after all gradients."""
    pair = ["status", "gradients"] if staleness_steps >= 2 else ["gradients", "status"]
    for calls in run_ranks(3, pushes_and_signals, staleness_steps):
        assert calls[:6] == 3 * pair
