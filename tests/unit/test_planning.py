"""Plans from a sample: the same bits as any other plan, a prediction in the run's folder, nothing left behind."""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from own_model import Net, columns
from ranks import console_of, run_ranks
from rich.console import Console

from colonnade import Plan, PlanConfig, Table, build_plan, fit
from colonnade.cli import app
from colonnade.cli.plan import _default_to_automatic
from colonnade.cli.plan_tables import print_advice
from colonnade.comm.mesh import Mesh
from colonnade.config.plan import CacheConfig, TablePlanConfig
from colonnade.config.run import build_config, override_settings
from colonnade.data import open_source, open_tensors
from colonnade.embedding import find_collection
from colonnade.errors import BudgetExceeded, ConfigError, DataError
from colonnade.models.build import build_model
from colonnade.plan.advice import Advice, BatchCost, ScalingPoint, ServerDemand
from colonnade.plan.caching import build_table_caches, remote_copy_bytes
from colonnade.plan.cost.prediction import StepCosts
from colonnade.plan.measure.device import Device
from colonnade.planning import planner, timing
from colonnade.planning.planner import fix_choices
from colonnade.planning.timing import choose_resident_rows
from colonnade.run.run import open_run, plan_run
from colonnade.store.budget import slot_bytes
from colonnade.store.log.backing import LogBacking
from colonnade.topology.world import World
from colonnade.train.metrics_file import read_metrics_lines

CONFIG = build_config(
    {
        "data": {"name": "synthetic", "options": {"num_train": 2000, "num_test": 500, "seed": 3}},
        "model": {"name": "dlrm", "dim": 4, "bottom": [8], "top": [8]},
        "plan": {"memory": {"dram": "220KiB"}},
        "train": {"batch_size": 50, "epochs": 1},
    }
)
PREDICTED = override_settings(CONFIG, {"plan.lookahead": "auto"})


def trained(config, folder):
    run = open_run(config, Mesh(), folder, console=Console(quiet=True))
    try:
        run.train()
        summary = run.summary
        collection = run.trainer.collection
        ids = torch.arange(3)
        rows = [collection.rows(table.name, ids) for table in collection.tables]
        return summary, collection.plan, rows
    finally:
        run.close()


def reads_of(summary) -> int:
    """Rows that had left memory: out of files, or of what the writer still held."""
    return summary["row_sources"]["read"] + summary["row_sources"]["copied"]


MEASURED: list[Device] = []


@pytest.fixture
def quick(monkeypatch):
    """Small scratch files, timed once for all tests: any folder is as fast as the first one."""
    real = planner.measure_device

    def measure(places):
        if not MEASURED:
            MEASURED.append(real(places, scratch_bytes=8 << 20, seconds=0.003, widths=(16,)))
        (device,) = MEASURED
        directories = (replace(device.directories[0], path=str(place)) for place in places)
        return replace(device, directories=tuple(directories))

    monkeypatch.setattr(planner, "measure_device", measure)


def test_a_profiled_run_gives_the_bits_of_an_even_one_and_checks_its_prediction(tmp_path, quick):
    summary, plan, rows = trained(PREDICTED, tmp_path / "profiled")
    even = override_settings(CONFIG, {"plan.placement": "even"})
    other, even_plan, even_rows = trained(even, tmp_path / "even")
    assert summary["metrics"] == other["metrics"]
    assert all(torch.equal(a, b) for a, b in zip(rows, even_rows, strict=True))
    assert plan.needs_backing and plan.placement == "profiled" and even_plan.placement == "even"
    assert [t.capacity_rows for t in plan.tables] != [t.capacity_rows for t in even_plan.tables]
    assert reads_of(summary) > 0  # the budget was felt
    rate, foretold = summary["samples_per_second"], summary["predicted_samples_per_second"]
    assert summary["prediction_error"] == pytest.approx(foretold / rate - 1)
    assert "prediction_error" not in other and other["samples_per_second"] > 0
    written = Plan.from_json((tmp_path / "profiled" / "plan.json").read_text())
    assert written.prediction["samples_per_second"] == foretold
    assert Device.from_json((tmp_path / "profiled" / "device.json").read_text()).directories
    assert not list(tmp_path.rglob(".timing*"))


@pytest.mark.slow
def test_going_on_plans_anew_without_measuring_the_disk_again(tmp_path, quick, monkeypatch):
    trained(PREDICTED, tmp_path / "run")
    monkeypatch.setattr(planner, "measure_device", lambda places: pytest.fail("measured again"))
    summary, plan, _ = trained(override_settings(PREDICTED, {"train.epochs": 2}), tmp_path / "run")
    assert summary["steps"] == 40 and plan.prediction is not None
    (tmp_path / "run" / "device.json").write_text("{torn")
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        trained(override_settings(PREDICTED, {"train.epochs": 3}), tmp_path / "run")


def test_reads_and_first_touches_are_foretold(tmp_path, quick, monkeypatch):
    costs = StepCosts(step_seconds=1e-3)
    monkeypatch.setattr(planner, "run_micro_benchmark", lambda *_, **__: costs)
    config = override_settings(
        CONFIG, {"data.options.num_train": 10_000, "plan.memory.dram": "300KiB"}
    )
    summary, _, _ = trained(config, tmp_path / "run")
    # 1M lookups would be the whole data: from a tenth of it.
    monkeypatch.setattr(planner, "SAMPLE_LOOKUPS", 2)
    result, _ = plan_run(config, tmp_path, World(), lookups=10_000 // 10 * 26)
    sources, samples = summary["row_sources"], 10_000
    assert result.prediction.births_per_sample * samples == pytest.approx(sources["born"], rel=0.1)
    assert result.prediction.reads_per_sample * samples == pytest.approx(
        reads_of(summary), rel=0.35
    )


def test_a_batch_that_does_not_fit_is_said_before_the_disk_is_touched(tmp_path, monkeypatch):
    monkeypatch.setattr(planner, "measure_device", lambda places: pytest.fail("measured"))
    config = override_settings(CONFIG, {"plan.memory.dram": "20KiB"})
    with pytest.raises(BudgetExceeded, match=r"plan.memory.dram: got 20,480 bytes"):
        open_run(config, Mesh(), tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_a_sample_of_one_batch_is_enough(tmp_path, quick):
    path = tmp_path / "ten.csv"
    path.write_text("label,item,price\n" + "".join(f"{i % 2},i{i},{i}.5\n" for i in range(10)))
    small = override_settings(
        CONFIG, {"data": {"name": "csv", "path": str(path)}, "plan.memory.dram": None}
    )
    for config in (small, override_settings(small, {"plan.memory.dram": 440})):
        result, _ = plan_run(config, tmp_path, World())
        assert result.profile.batches == 1 and result.profile.samples == 10
        assert result.prediction.samples_per_second > 0
        plan_run(config, tmp_path, World(ranks_per_host=3))
    summary, plan, _ = trained(config, tmp_path / "run")
    assert plan.placement == "profiled" and summary["steps"] == 1
    path.write_text("label,item,price\n")
    with pytest.raises(DataError, match=r"ten.csv: got no row.*wanted at least one"):
        plan_run(small, tmp_path, World())


@pytest.mark.parametrize("batch_size", [50, pytest.param(600, marks=pytest.mark.slow), 4096])
def test_what_one_batch_needs_is_enough_and_no_byte_less(batch_size, tmp_path, quick):
    """A plan accepts the least that training can do with; longer windows become shorter."""
    config = override_settings(
        CONFIG, {"train.batch_size": batch_size, "data.options.num_train": 1000}
    )
    data = open_source("synthetic", None, **config.data.options)
    collection = find_collection(build_model(data.train.schema, config))
    limit = dict.fromkeys((table.name for table in collection.tables), 0)
    for batch in data.train.batches(batch_size):
        for feature in collection.declaration.features:
            unique = len(batch.ids[feature.name].values.unique())
            limit[feature.table] = max(limit[feature.table], unique)
    least = sum(limit[table.name] * slot_bytes(table) for table in collection.tables)
    enough = override_settings(config, {"plan.memory.dram": least, "data.options.num_test": 50})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the window becomes shorter, and says so
        summary, plan, _ = trained(enough, tmp_path / "run")
    assert [table.capacity_rows for table in plan.tables] == list(limit.values())
    assert summary["steps"] == -(-1000 // batch_size)
    with pytest.raises(BudgetExceeded, match=f"for a batch, and all tables together {least:,}"):
        plan_run(override_settings(config, {"plan.memory.dram": least - 1}), tmp_path, World())


def test_micro_benchmarks_change_no_random_bits(tmp_path, quick):
    data = open_source("synthetic", None, **CONFIG.data.options)
    build_model(data.train.schema, CONFIG)
    before = torch.get_rng_state()
    plan_run(CONFIG, tmp_path, World())
    assert torch.equal(torch.get_rng_state(), before)
    assert not list(tmp_path.iterdir())


def test_a_micro_benchmark_that_fails_leaves_nothing(tmp_path, quick, monkeypatch):
    def fail(*_, **__):
        raise OSError("gone")

    monkeypatch.setattr(timing, "open_stores", fail)
    with pytest.raises(OSError, match="gone"):
        plan_run(CONFIG, tmp_path / "runs", World())
    assert not list(tmp_path.iterdir())


def test_a_micro_benchmark_that_fails_after_it_opened_stores_closes_them(
    tmp_path, quick, monkeypatch
):
    opened, closed, real_close = [], [], LogBacking.close
    real_open, real_trainer = timing.open_stores, timing.open_timed_trainer

    def open_stores(*arguments):
        opened.extend(real_open(*arguments))
        return opened

    def build_trainer(*arguments, **options):
        if opened:
            raise OSError("gone")
        return real_trainer(*arguments, **options)

    def close(store):
        closed.append(store)
        real_close(store)

    monkeypatch.setattr(timing, "open_stores", open_stores)
    monkeypatch.setattr(timing, "open_timed_trainer", build_trainer)
    monkeypatch.setattr(LogBacking, "close", close)
    with pytest.raises(OSError, match="gone"):
        plan_run(CONFIG, tmp_path / "runs", World())
    assert opened and {id(store) for store in closed} == {id(store) for store in opened}
    assert not list(tmp_path.iterdir())


def test_auto_lookahead_is_chosen(tmp_path, quick):
    result, _ = plan_run(override_settings(CONFIG, {"plan.lookahead": "auto"}), tmp_path, World())
    assert 2 <= result.plan.lookahead <= 8 and result.prediction.lookahead == result.plan.lookahead


def test_mapped_memory_takes_what_is_read_most(tmp_path, quick):
    result, _ = plan_run(
        override_settings(CONFIG, {"plan.memory.mapped": f"{tmp_path}/mapped:60KiB"}),
        tmp_path,
        World(),
    )
    assert "mapped" in {table.tier for table in result.plan.tables}
    assert not (tmp_path / "mapped").exists()


def test_fit_plans_for_a_model_of_ones_own(tmp_path, quick):
    data = open_tensors(**columns(400))
    result = fit(
        Net(),
        data,
        run=tmp_path / "run",
        dram="1MiB",
        batch_size=64,
        quiet=True,
    )
    assert result.outcome.steps
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["placement"] == "profiled"


SETTINGS = [
    "--data",
    "synthetic",
    "--set",
    "data.options.num_train=2000",
    "--set",
    "train.batch_size=100",
]
CARDINALITIES = [20, 90, 400, 900, 2000, 5000, 9000, 20000]
EIGHT_TABLES = [
    *SETTINGS,
    "--set",
    f"data.options.cardinalities={CARDINALITIES}",
]
"""Plans of eight tables take a third of the time of plans of 26, and say the same where no test counts tables."""


def test_plan_prints_a_table_and_json(capsys, tmp_path, monkeypatch, quick):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    command = ["plan", *EIGHT_TABLES, "--set", "model.dim=4", "--dram", "600KiB"]
    assert app.run_command([*command, "--target", "1000"]) == 0
    output = capsys.readouterr().out
    for words in (
        "MB/s at 1,000 samples/s",
        "dram+files",
        "predicted:",
        "what limits:",
        "C8",
    ):
        assert words in output
    assert app.run_command([*command, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["plan"]["prediction"]["samples_per_second"] > 0
    assert len(result["plan"]["tables"]) == 8 and result["device"]["directories"]
    assert result["costs"]["step_seconds"] > 0
    assert result["cache_bytes"] == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("reads", "rows"), [(math.inf, 6), (1e9, 6), (2.0, 6), (1.5, 8), (1.0, 10), (0.0, 10)]
)
def test_a_micro_benchmark_has_the_memory_that_reads_as_much_as_the_run(reads, rows):
    """Ids 0 and 1 come in each of four batches, two more in one each: any two batches have six rows; keeping two of the
    others leaves six uses that are reads, and two more for the batches that hold none of those kept."""
    batches = [np.array([0, 1, 2 + 2 * step, 3 + 2 * step]) for step in range(4)]
    assert choose_resident_rows(batches, 2, reads) == rows


def test_plan_of_a_world_fits_a_terminal_and_shows_a_table_s_choices(
    capsys, tmp_path, monkeypatch, quick
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    command = ["plan", *EIGHT_TABLES, "--set", "model.dim=4", "--world", "2x2", "--uplink", "1Gbit"]
    assert app.run_command(command) == 0
    message = capsys.readouterr().out
    assert max(map(len, message.splitlines())) <= 80
    for words in ("exchange:", "rows, all", "next best", "is not running", "waiting for links"):
        assert words in message
    assert "…" not in message
    force = ["--set", "plan.tables.C8.sharding=table_wise", "--table", "C8"]
    assert app.run_command([*command, *force]) == 0
    message = capsys.readouterr().out
    assert "rows, rank" in message and "set by you" in message and "copies" in message
    assert app.run_command(["plan", *SETTINGS, "--world", "2 by 2"]) == 2
    assert "HOSTSxRANKS" in capsys.readouterr().err


def test_plan_predicts_cached_rows(capsys, tmp_path, monkeypatch, quick):
    """Their memory, and what they save; nothing is chosen that they cannot go with."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    command = ["plan", *EIGHT_TABLES, "--set", "model.dim=4", "--world", "2x1"]
    assert app.run_command([*command, "--set", "plan.cache.staleness=10"]) == 0
    message = " ".join(capsys.readouterr().out.split())
    assert (
        "more for plan.cache" in message and "plan.cache: with cached rows of 8 tables" in message
    )
    assert app.run_command([*command, "--set", "plan.cache.size=7", "--json"]) == 0
    message = json.loads(capsys.readouterr().out)
    for table in message["choices"].values():
        assert table[0]["exchange"] == "cached"
        assert {"rows", "pooled"} < {other["exchange"] for other in table}
    kinds = {(item["cache"]["rows"], item["exchange"]) for item in message["plan"]["tables"]}
    assert kinds == {(7, "cached")}
    config = override_settings(build_config({}), {"model.dim": 4})
    tables = find_collection(
        build_model(open_source("synthetic", cardinalities=CARDINALITIES).train.schema, config)
    ).tables
    assert message["cache_bytes"] == sum(
        min(7, table.rows) * remote_copy_bytes(table) for table in tables
    )


@pytest.mark.parametrize(("uplink", "is_cached"), [("5Mbit", True), ("100Gbit", False)])
def test_auto_caches_where_links_are_slow(capsys, tmp_path, monkeypatch, quick, uplink, is_cached):
    monkeypatch.chdir(tmp_path)
    settings = ["plan.cache.staleness=100", "plan.exchange=auto", "plan.sharding=auto"]
    options = [word for item in settings for word in ("--set", item)]
    command = ["plan", *EIGHT_TABLES, *options, "--world", "2x1", "--uplink", uplink, "--json"]
    assert app.run_command(command) == 0
    planned = json.loads(capsys.readouterr().out)
    tables = planned["plan"]["tables"]
    for table in tables:
        assert (table["cache"] is not None) == (table["exchange"] == "cached")
        assert planned["choices"][table["name"]][0]["exchange"] == table["exchange"]
    assert ("cached" in {table["exchange"] for table in tables}) == is_cached
    assert (planned["cache_bytes"] > 0) == is_cached
    exact, int8, thresholded = planned["dense_seconds"].values()
    assert min(exact, int8, thresholded) > 0 and (not is_cached or exact > int8 > thresholded)


def test_a_choice_without_a_cache_drops_it_where_it_was_free():
    """A resumed run reads its choice, too."""
    tables = [Table("a", 4, rows=50), Table("b", 4, rows=50)]
    open_config = PlanConfig(exchange="auto", sharding="auto", cache=CacheConfig(size="10%"))
    only_a = open_config.model_copy(
        update={"tables": {"b": TablePlanConfig(exchange="rows", sharding="row_wise")}}
    )
    uncached = build_plan(tables, 2, PlanConfig(exchange="pooled"))
    for config, dropped in ((open_config, {"a", "b"}), (only_a, {"a"})):
        fixed = fix_choices(config, uncached)
        caches = build_table_caches(fixed.cache, tables)
        assert set(caches) == {"a", "b"} - dropped
        assert all(cache.rows == 5 for cache in caches.values())
    cached = build_plan(tables, 2, PlanConfig(cache=CacheConfig(size="10%")))
    fixed = fix_choices(open_config, cached)
    assert build_plan(tables, 2, fixed).tables == cached.tables


def test_only_copies_that_there_are_leave_exchanges_alone(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text("plan: {cache: null}\n")
    assert "plan.exchange" in _default_to_automatic(config, None)
    assert not _default_to_automatic(config, ["plan.cache.staleness=3"])


def test_plan_refuses_before_it_measures(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("colonnade.run.run.plan_from_sample", never)
    for wrong, words in (
        (["--table", "C27"], "--table: got 'C27', wanted a table of this model: C1, C2"),
        (["--world", "2x1", "--uplink", "5"], "uplink: got '5', wanted a rate such as 1Gbit"),
        (["--world", "2x1", "--local", "5"], "local: got '5', wanted a rate such as 1Gbit"),
        (
            ["--efficiency", "0.5"],
            "got --efficiency or --hosts-up-to without --advise; add --advise",
        ),
        (["--advise", "--table", "C1"], "--table or --target with --advise, which shows neither"),
    ):
        assert app.run_command(["plan", *SETTINGS, *wrong]) == 2
        assert words in " ".join(capsys.readouterr().err.split())


def test_plan_says_of_each_consumer_what_travels(capsys, tmp_path, monkeypatch, quick):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    model = ["model.name=deepfm", "model.bottom=none", "model.dim=4", "plan.exchange=partials"]
    command = ["plan", *SETTINGS, "--world", "16x1", "--uplink", "1Gbit"]
    assert app.run_command([*command, *(word for item in model for word in ("--set", item))]) == 0
    output = capsys.readouterr().out
    assert "partials, all!" in output and "…" not in output
    assert "linear: partial (values 416, partial 16): fewer floats" in output
    lines = " ".join(output.split())
    assert "fm: values (values 1,664, partial 80): values are sent anyway for deep" in lines
    assert "deep: values (values 1,664, partial 2,048): costs more" in lines, output


def never(*_, **__):
    raise AssertionError("measured")


def train_with_auto_servers(mesh, folder):
    """Train with one server, then resume where the choice would be another; return both plans' servers."""
    servers = []
    config = override_settings(CONFIG, {"plan.servers": "auto", "plan.memory.dram": None})
    for choice, epochs in ((1, 1), (0, 2)):
        with patch.object(planner, "choose_servers", lambda *_, count=choice, **__: count):
            settings = override_settings(config, {"train.epochs": epochs})
            run = open_run(settings, mesh, folder, console=console_of(mesh))
        servers.append((run.trainer.collection.plan.servers, run.config.plan.servers))
        run.train()
        run.close()
    return servers


def test_auto_servers_are_recorded_and_kept(tmp_path):
    for servers in run_ranks(2, train_with_auto_servers, tmp_path / "run"):
        assert servers == [((1,), 1), ((1,), 1)]


def test_auto_servers_are_planned_for_the_links(tmp_path, quick, monkeypatch):
    """Seconds of 0, 1 and 2 servers of three ranks decide; what no plan can do is no choice."""
    real = planner.plan_world
    seconds = {0: 3.0, 1: 2.0, 2: 1.99}

    def plan(setup, world, **options):
        if world.servers_per_host == 2 and is_refused:
            raise ConfigError("got rows that do not fit")
        planned = real(setup, world, **options)
        predicted = replace(planned.prediction, step_seconds=seconds[world.servers_per_host])
        return replace(planned, prediction=predicted)

    monkeypatch.setattr(planner, "plan_world", plan)
    config = override_settings(CONFIG, {"plan.servers": "auto", "plan.memory.dram": None})
    for is_refused, last in ((False, 1.0), (True, 1.0), (False, 1.99)):
        seconds[2] = last
        expected = 2 if last == 1.0 and not is_refused else 1
        result, _ = plan_run(config, tmp_path, World(ranks_per_host=3))
        assert result.world.servers_per_host == len(result.plan.servers) == expected
    result, _ = plan_run(config, tmp_path, World())
    assert not result.plan.servers
    with pytest.raises(ConfigError, match=r"got plan\.servers=auto"):
        build_plan([Table("a", 4, rows=10)], 2, config.plan)


ADVISE = ["plan", *EIGHT_TABLES, "--set", "model.dim=4", "--advise", "--uplink", "1Gbit"]


def test_advice_is_a_table_and_a_sentence_for_each_lemma(capsys, tmp_path, monkeypatch, quick):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    assert app.run_command([*ADVISE, "--world", "2x1", "--hosts-up-to", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:5]] == ["1", "2", "4"]
    assert lines[2].split()[3:5] == ["1.00", "100%"]
    for line, words in zip(
        lines[5:], ("ranks: ", "servers: 1 for 2 trainers: link ", "batch: "), strict=True
    ):
        assert line.startswith(words)
    assert "not hidden" in lines[6] and "no run measured the noise of gradients" in lines[7]
    assert not list(tmp_path.iterdir())


def test_advice_is_whole_on_narrow_terminals(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    limit = "processor; 38% of a step waits for links between ranks, and more than fits"
    need = ServerDemand(
        compute_seconds=1.0,
        requested_rows=1.0,
        link_bytes=1.0,
        processor_seconds=1.0,
        row_bytes=1.0,
        link_bytes_per_second=1.0,
        memory_bytes=None,
    )
    advice = Advice(
        batch_size=100,
        curve=(
            ScalingPoint(num_ranks=1, step_seconds=1.0, speedup=1.0, efficiency=1.0, limit=limit),
        ),
        num_ranks=1,
        world=World(),
        num_servers=1,
        servers=need,
        staleness_steps=0,
        batch=BatchCost(fixed_seconds=1.0, sample_seconds=1.0),
        noise=None,
    )
    print_advice(advice, 0.8)
    table = capsys.readouterr().out.split("\nranks: ")[0]
    assert set(limit.split()) <= set(table.split())


def test_advice_as_json_has_the_curve_that_it_is_read_from(capsys, tmp_path, monkeypatch, quick):
    monkeypatch.chdir(tmp_path)
    options = ["--hosts-up-to", "300", "--efficiency", "1", "--json", "--dram", "100KiB"]
    options += ["--set", "plan.staleness_steps=1"]
    assert app.run_command([*ADVISE, *options]) == 0
    result = json.loads(capsys.readouterr().out)
    points = result["curve"]
    assert [point["num_ranks"] for point in points] == [1, 2, 4, 8, 16, 32, 64]  # 100 samples
    for point in points:
        assert point["speedup"] == points[0]["step_seconds"] / point["step_seconds"]
    assert result["num_servers"] >= result["servers"]["row_bytes"] / (100 << 10) > 1
    assert result["batch"]["fixed_seconds"] >= 0 and result["noise"] is None
    assert result["staleness_steps"] == 1


@pytest.mark.parametrize(
    ("square", "words"),
    [
        (0.5, "B_noise = 800 by the gradients of steps 31 to 150"),
        (-0.5, "batch: it could be larger than measured"),
    ],
)
def test_the_noise_of_a_run_advises_a_batch(capsys, tmp_path, monkeypatch, quick, square, words):
    monkeypatch.setenv("COLUMNS", "400")
    lines = [{"step": 150, "kind": "noise", "steps": 120, "variance": 400.0, "square": square}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert app.run_command([*ADVISE, "--hosts-up-to", "1", "--run", str(tmp_path)]) == 0
    assert words in capsys.readouterr().out


def test_a_run_with_micro_batches_measures_noise_and_one_without_none(tmp_path):
    lines = {}
    for parts in (1, 2):
        folder = tmp_path / str(parts)
        trained(
            override_settings(CONFIG, {"train.accumulate": parts, "plan.memory.dram": None}), folder
        )
        lines[parts] = [
            line for line in read_metrics_lines(folder / "metrics.jsonl") if line["kind"] == "noise"
        ]
    assert lines[1] == []
    assert sum(line["steps"] for line in lines[2]) == 40
    assert sum(line["variance"] for line in lines[2]) > 0


def test_a_model_without_dense_weights_is_advised_too(capsys, tmp_path, monkeypatch, quick):
    monkeypatch.setenv("COLUMNS", "400")
    command = [
        *ADVISE,
        "--set",
        "model.name=fm",
        "--set",
        "model.bottom=none",
        "--set",
        "model.top=none",
    ]
    assert app.run_command([*command, "--hosts-up-to", "2", "--run", str(tmp_path)]) == 0
    assert "no run measured" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--efficiency", "0"], "--efficiency: got 0, wanted a number above 0"),
        (["--efficiency", "1.1"], "--efficiency: got 1.1"),
        (["--hosts-up-to", "0"], "--hosts-up-to: got 0, wanted 1 or more"),
        (["--world", "101x1"], "got a batch of 100 samples for 101 ranks"),
    ],
)
def test_advice_refuses_what_has_no_answer(capsys, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(planner, "measure_device", lambda places: pytest.fail("measured"))
    assert app.run_command([*ADVISE, *options]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
