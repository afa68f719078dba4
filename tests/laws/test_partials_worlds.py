"""`partials` beside everything else a plan says: tiers, staleness, admission and eviction at the owners, servers,
codecs, and whole runs by configuration. N ranks train what one rank trains, and remember the rows that it remembers."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch
from plans import by_table
from ranks import console_of, run_ranks
from scenario import all_rows, features, global_batch, open_backings, share_of, tables
from small_run import CONFIG, opened

from colonnade import (
    FM,
    AgeEviction,
    CountMinAdmission,
    EmbeddingCollection,
    MaxRowsEviction,
    Mesh,
    PlanConfig,
    RandomAdmission,
    RowOptimizer,
    Sum,
    build_plan,
)
from colonnade.comm.process_groups import assign_server_ranks
from colonnade.config.run import build_config, override_settings
from colonnade.errors import ConfigError
from colonnade.models.build import build_model
from colonnade.plan.plan import EXACT, Codecs
from colonnade.run.run import load_run_config, open_run, prepare_run
from colonnade.topology.sharding import table_wise
from colonnade.train.objective import get_objective
from colonnade.train.setup import RunSetup
from colonnade.wire.transport import HostRoute

SIZES = [23, 0, 1, 24, 23, 22]
FIELDS = ("user.deep", "item", "seen", "tags")
TABLES = ("user", "item", "tag", "wide")
LINEAR = {"linear": (Sum(), ("user.wide",)), "past": (Sum(), ("history",))}
WHOLE = {"fm": (FM(), FIELDS), **LINEAR}
SPLIT = {"sums": (Sum(), ("seen", "tags", "item")), "fm": (FM(), ("user.deep", "item")), **LINEAR}
BY_CHANCE = {
    "item": {"admission": RandomAdmission(probability=0.5), "eviction": AgeEviction(steps=2)},
    "wide": {"eviction": AgeEviction(steps=1)},
}
COUNTED = {  # so wide that no two ids meet: then counts are exact, however ids are dealt
    "item": {
        "admission": CountMinAdmission(updates=2, expected_ids=1 << 16, error=0.001, halve_steps=3),
        "eviction": AgeEviction(steps=3),
    }
}
FULLEST = {  # a quota has one owner
    "item": {
        "admission": CountMinAdmission(updates=2, expected_ids=1 << 16, error=0.001),
        "eviction": MaxRowsEviction(rows=20, by="frequency", halve_steps=4),
    },
    "wide": {"eviction": MaxRowsEviction(rows=9, by="recency")},
}
STAYS = {
    "by chance": (BY_CHANCE, False),
    "counted": (COUNTED, False),
    "by chance, whole": (BY_CHANCE, True),
    "fullest, whole": (FULLEST, True),
}
"""Settings by table, and whether tables are whole."""


def train(mesh, *, stays=None, is_whole=False, folder=None, codecs=EXACT, **settings):
    """Outputs by step; at the end all rows, how many of open tables there are over all ranks, and bytes."""
    declared = [replace(t, **(stays or {}).get(t.name, {})) for t in tables("float64")]
    looked_up = [replace(f, pooling="mean") if f.pooling == "sequence" else f for f in features()]
    collection = EmbeddingCollection(
        declared, looked_up, consumers=WHOLE if is_whole else SPLIT, seed=3
    )
    shardings, owners = {}, mesh.world.owners
    if is_whole:
        shardings = {name: table_wise(owners[t % len(owners)]) for t, name in enumerate(TABLES)}
    plan = build_plan(
        collection.tables,
        mesh.world,
        PlanConfig(
            exchange="partials",
            codec=asdict(codecs),
            **settings,
            tables=by_table(sharding=shardings),
        ),
    )
    backings = [] if folder is None else open_backings(folder, mesh, declared, plan.shardings)
    collection.open(plan, mesh, backings=backings)
    rows, outputs, trainers = RowOptimizer(collection), [], mesh.trainers
    assert mesh.num_ranks == 1 or collection.exchange.consumers  # else nothing is tried
    mesh.traffic.sent_bytes.clear()

    def batches():
        for t, n in enumerate(SIZES):
            whole = global_batch(t, n)
            yield (
                share_of(whole, 0, 99)
                if mesh.is_server
                else share_of(whole, trainers.rank, trainers.num_ranks)
            )

    for step, batch in enumerate(collection.lookahead(batches())):
        result = collection(batch)
        outputs.append({name: output.detach().clone() for name, output in result.items()})
        first, last = (
            SIZES[step] * r // trainers.num_ranks for r in (trainers.rank, trainers.rank + 1)
        )
        gradients = []
        for i, output in enumerate(result.values()):
            random = torch.Generator().manual_seed(10 * step + i)
            whole = torch.randn(SIZES[step], output.shape[1], generator=random, dtype=output.dtype)
            gradients.append(whole[:0] if mesh.is_server else whole[first:last])
        torch.autograd.backward(list(result.values()), gradients)
        rows.step()
    sent = {channel: mesh.traffic.bytes_of(channel) for channel in ("fetch", "push")}
    retained = collection.policies  # rows that nobody has trained may lie in memory, too
    counts = torch.tensor(
        [len(retained[t]) if t in retained else collection.store.num_rows(t) for t in (1, 3)]
    )
    result = outputs, all_rows(collection), mesh.all_reduce("control", counts).tolist(), sent
    for backing in backings:
        backing.close()
    return result


def everything(mesh, folder):
    budget = {"memory": {"dram": 40_000}, "lookahead": 3}
    results = {}
    for is_whole in (False, True):
        results["plain", is_whole] = train(mesh, is_whole=is_whole)
        results["coded", is_whole] = train(mesh, is_whole=is_whole, codecs=Codecs("bf16", "bf16"))
    results["tiered", False] = train(mesh, folder=folder / "tiered", **budget)
    results["late", True] = train(mesh, is_whole=True, staleness_steps=2)
    results["late and tiered", True] = train(
        mesh, is_whole=True, staleness_steps=2, folder=folder / "late", **budget
    )
    for name, (stays, is_whole) in STAYS.items():
        results[name] = train(mesh, stays=stays, is_whole=is_whole, folder=folder / name, **budget)
    return results


def close(result, wanted, what, bound=1e-10):
    torch.testing.assert_close(
        result, wanted, rtol=bound, atol=bound, msg=lambda message: f"{what}: {message}"
    )


def check(everyone, wanted, what, bound=1e-10):
    for step, outputs in enumerate(wanted[0]):
        for name, value in outputs.items():
            result = torch.cat([rank[0][step][name] for rank in everyone])
            close(result, value, f"{what}, step {step}, {name}", bound)
    for rank in everyone:
        for table, value in wanted[1].items():
            close(rank[1][table], value, f"{what}, rows of {table}", bound)
        assert rank[2] == wanted[2], f"{what}: rows of open tables"


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return everything(Mesh(), tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_train_and_remember_what_one_does(num_ranks, alone, tmp_path):
    everyone = run_ranks(num_ranks, everything, tmp_path)
    for name, wanted in alone.items():
        ours = [rank[name] for rank in everyone]
        is_coded = name[0] == "coded"
        check(ours, wanted, f"{name}", 0.05 if is_coded else 1e-10)
    pairs = ((("plain", False), ("tiered", False)), (("late", True), ("late and tiered", True)))
    for rank in everyone:
        for one, other in pairs:
            for table, value in rank[one][1].items():
                assert torch.equal(value, rank[other][1][table]), (one, table)
        for is_whole in (False, True):
            exact, coded = (rank[name, is_whole][3] for name in ("plain", "coded"))
            assert coded["fetch"] * 4 == exact["fetch"] and coded["push"] * 4 == exact["push"]
    for name in STAYS:
        assert alone[name][2][0] < alone["plain", False][2][0], f"{name}: nobody left"


def on_hosts(mesh):
    """Train on hosts, exactly and coded; return also how many messages were summed inside a host."""
    sends = []
    send_values = HostRoute.send_values

    def count_and_send(route, *arguments):
        sends.append(route.columns.width)
        return send_values(route, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostRoute, "send_values", count_and_send)
        return train(mesh), train(mesh, codecs=Codecs("bf16", "bf16")), train(mesh), sends


def test_sums_inside_hosts_train_what_one_rank_does(alone):
    """Two hosts of two ranks: partials of rows that are split over all ranks are summed inside a host first."""
    everyone = run_ranks(4, on_hosts, ranks_per_host=2)
    assert all(len(rank[3]) == 3 * len(SIZES) for rank in everyone)
    check([rank[0] for rank in everyone], alone["plain", False], "on hosts")
    check([rank[1] for rank in everyone], alone["coded", False], "on hosts, coded", 0.05)
    for first, _, again, _ in everyone:
        torch.testing.assert_close(first[:2], again[:2], rtol=0, atol=0)


def with_a_server(mesh):
    mesh = assign_server_ranks(mesh, 1)
    return mesh.is_server, train(mesh), train(mesh, stays=COUNTED)


def test_trainers_with_a_server_train_what_one_rank_does(alone):
    everyone = run_ranks(3, with_a_server)
    trainers = [rank for rank in everyone if not rank[0]]
    assert len(trainers) == 2
    for i, name in ((1, ("plain", False)), (2, "counted")):
        check([rank[i] for rank in trainers], alone[name], f"with a server: {name}")


NFM = {"model.name": "nfm", "model.bottom": None, "plan.exchange": "partials"}


def config_of(**settings):
    return override_settings(
        build_config(CONFIG), NFM | {name.replace("__", "."): v for name, v in settings.items()}
    )


def run_until(mesh, folder, step, settings):
    config = config_of(train__max_steps=step, **settings)
    run = open_run(config, mesh, folder, data=opened(config), console=console_of(mesh))
    exchanges = {table.exchange for table in run.trainer.collection.plan.tables}
    outcome = run.train()
    run.close()
    traffic = mesh.traffic
    return exchanges, outcome.steps, outcome.metrics, traffic.bytes_of("fetch")


def scores_of(mesh, folder):
    run = open_run(load_run_config(folder), mesh, folder, read_only=True, console=console_of(mesh))
    result = run.trainer.evaluate(run.trainer.data.test)
    run.close()
    return result


def on_two_ranks(mesh, folder):
    whole = run_until(mesh, folder / "whole", 10, {})
    half = run_until(mesh, folder / "half", 5, {})
    return whole, half, scores_of(mesh, folder / "whole")


def test_runs_by_configuration_are_evaluated_and_go_on_in_another_world(tmp_path):
    everyone = run_ranks(2, on_two_ranks, tmp_path)
    wanted = run_until(Mesh(), tmp_path / "alone", 10, {})
    again = run_until(Mesh(), tmp_path / "half", 10, {})  # 5 steps of a rank after 5 of two
    for whole, half, scores in everyone:
        assert whole[0] == {"partials"} and whole[1] == 10 and half[1] == 5
        assert whole[2] == pytest.approx(wanted[2], rel=1e-3)
        assert scores["auc"] == pytest.approx(whole[2]["test_auc"], rel=1e-6)
    assert again[0] == {"rows"} and again[1] == 5
    assert again[2] == pytest.approx(wanted[2], rel=1e-3)
    assert scores_of(Mesh(), tmp_path / "whole")["auc"] == pytest.approx(scores["auc"], rel=1e-3)


class Bags:
    """The data, of columns with several ids each."""

    def __init__(self, source):
        self.source, whole = source, source.schema
        columns = tuple(replace(column, kind="bag") for column in whole.categorical)
        self.schema, self.num_samples = replace(whole, categorical=columns), source.num_samples


def refusals(mesh):
    """Return the errors for bags whose rows are split, and that whole tables, pairs of ids, or sums, are allowed."""
    lines = []
    whole = {f"C{i}": {"sharding": "table_wise", "ranks": [0]} for i in range(1, 5)}
    for settings in (
        {"model__over": "fields"},
        {"model__over": "fields", "plan__tables": whole},
        {},
        {"model__name": "lr", "model__dim": None, "model__top": None},
    ):
        config = config_of(**settings)
        data = opened(config)
        data = replace(data, train=Bags(data.train), test=Bags(data.test))
        model = build_model(data.train.schema, config)
        try:
            setup = RunSetup(
                model=model,
                data=data,
                config=config,
                mesh=mesh,
                objective=get_objective(model),
                console=console_of(mesh),
            )
            prepare_run(setup)
            lines.append("")
        except ConfigError as error:
            lines.append(str(error))
    return lines


def test_bags_that_are_split_are_refused_before_the_first_batch():
    for split, whole, ids, sums in run_ranks(2, refusals):
        assert "table 'C1': got exchange=partials with sharding=row_wise" in split
        assert "plan.tables.C1.sharding=table_wise" in split
        assert whole == ids == sums == ""
