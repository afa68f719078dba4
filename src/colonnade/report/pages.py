"""Pages of `colonnade report` and `colonnade compare`: everything a run folder tells, and runs side by side."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from colonnade.report import figures, tiers, tower_map, traffic
from colonnade.report.page import NumberTable, render_page
from colonnade.report.reading import (
    RunRecord,
    TableFigures,
    best_of,
    choice_of,
    chosen_value,
    flatten,
    is_constant,
    is_judged,
    is_number,
    metrics_of,
    sums_of,
    tables_of,
)
from colonnade.report.words import (
    bytes_words,
    count_words,
    metric_value,
    metric_words,
    seconds_words,
    setting_words,
)


@dataclass(frozen=True)
class Line:
    """One figure of all runs."""

    name: str
    values: tuple[str, ...]
    best: tuple[int, ...] = ()  # positions of the runs that are best; () where no one is


def names_of(runs: Sequence[RunRecord]) -> list[str]:
    """Folder names; with as much of the path before them as tells them apart."""
    paths = [run.folder.resolve().parts for run in runs]
    for depth in range(1, max(map(len, paths)) + 1):
        names = ["/".join(parts[-depth:]) for parts in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{run.name} ({number})" for number, run in enumerate(runs, 1)]


def figure_lines(runs: Sequence[RunRecord]) -> list[Line]:
    """Metrics first (at the chosen step, then last), then speed and size. A run without a figure shows "-"."""
    return _metric_lines(runs) + _speed_lines(runs)


def _metric_lines(runs: Sequence[RunRecord]) -> list[Line]:
    lines: list[Line] = []
    evaluated, choices = [metrics_of(run) for run in runs], [choice_of(run) for run in runs]
    if any(choices):
        lines.append(Line("chosen step", tuple(c.words if c else "-" for c in choices)))
    pairs = dict.fromkeys(
        (metric, part) for each in evaluated for metric, parts in each.items() for part in parts
    )
    for metric, part in pairs:
        points = [each.get(metric, {}).get(part, []) for each in evaluated]
        name = f"{part} {metric_words(metric)}"
        if is_judged(metric):
            chosen = [
                chosen_value(c, p)[1] if c and p else None
                for c, p in zip(choices, points, strict=True)
            ]
            lines.append(_judged(f"{name}, chosen", metric, chosen))
        elif is_constant(metric):
            continue
        if any(len(p) > 1 for p in points) or not is_judged(metric):
            last = [p[-1][1] if p else None for p in points]
            lines.append(
                _judged(f"{name}, last", metric, last)
                if is_judged(metric)
                else Line(name, tuple(metric_value(metric, v) for v in last))
            )
    return lines


def _speed_lines(runs: Sequence[RunRecord]) -> list[Line]:
    rates = [_rate(run) for run in runs]
    known = [rate for rate in rates if rate is not None]
    fastest = tuple(i for i, r in enumerate(rates) if len(known) > 1 and r == max(known))
    rows = [sum(t.rows_known for t in tables_of(run)) or None for run in runs]
    sizes = [run.summary.get("resident_bytes") for run in runs]
    sent = [sum(traffic.totals(run).values()) for run in runs]
    lines = [
        Line("samples/s, median", tuple(map(count_words, rates)), fastest),
        Line("steps", tuple(f"{run.step:,}" for run in runs)),
        Line("time", tuple(seconds_words(run.seconds or None) for run in runs)),
        Line("ranks", tuple(str(run.plan.get("num_ranks", "-")) for run in runs)),
        Line("rows known, rank 0", tuple(map(count_words, rows))),
        Line("memory for rows, rank 0", tuple(map(bytes_words, sizes))),
    ]
    if any(sent):
        lines.append(Line("sent by rank 0", tuple(map(bytes_words, sent))))
    return [*lines, Line("status", tuple(run.status for run in runs))]


def different_settings(runs: Sequence[RunRecord]) -> list[Line]:
    """Those that are not the same in all runs, and only those; of machines the processor, threads and torch."""
    flat = [flatten(run.config) | _machine(run) for run in runs]
    names = dict.fromkeys(name for each in flat for name in each)
    missing = object()
    found = []
    for name in names:
        values = [each.get(name, missing) for each in flat]
        if any(value != values[0] for value in values):
            found.append(
                Line(name, tuple("-" if v is missing else setting_words(v, name) for v in values))
            )
    return found


def compare_page(runs: Sequence[RunRecord]) -> str:
    """Return the page's HTML."""
    names = names_of(runs)
    lines = figure_lines(runs)
    differences = [[line.name, *line.values] for line in different_settings(runs)]
    return render_page(
        "compare.html",
        charts={"curves": figures.overlaid(dict(zip(names, runs, strict=True)))},
        title=f"{len(runs)} runs compared",
        names=names,
        numbers=NumberTable(
            columns=["", *names],
            rows=[[line.name, *line.values] for line in lines],
            best={i: [1 + b for b in line.best] for i, line in enumerate(lines)},
        ),
        differences=differences
        and NumberTable(columns=["setting", *names], rows=differences, wraps=True),
    )


def _judged(name: str, metric: str, values: Sequence[float | None]) -> Line:
    points = [(i, value) for i, value in enumerate(values) if value is not None]
    best: tuple[int, ...] = ()
    if len(points) > 1:
        top = best_of(metric, points)[1]
        best = tuple(i for i, value in points if value == top)
        best = () if len(best) == len(points) else best
    return Line(name, tuple(metric_value(metric, value) for value in values), best)


def _rate(run: RunRecord) -> float | None:
    rates = [v for line in run.of_kind("train") if (v := line.get("samples_per_second"))]
    return statistics.median(rates) if rates else None


def _machine(run: RunRecord) -> dict[str, Any]:
    versions = run.machine.get("versions")
    versions = versions if isinstance(versions, dict) else {}
    return {
        "machine.processor": run.machine.get("processor"),
        "machine.processors": run.machine.get("processors"),
        "machine.threads": run.machine.get("threads"),
        "machine.isa": run.machine.get("isa"),
        "machine.torch": versions.get("torch"),
        "machine.colonnade": versions.get("colonnade"),
    }


MAX_TABLE_LINES = 40
MAX_METRIC_TILES = 4
MAX_COLUMNS = 8


def run_page(run: RunRecord) -> str:
    """Return the page's HTML."""
    tables = tables_of(run)
    tier_table = _tier_table(run)
    towers = tower_map.read_towers(run.folder)
    return render_page(
        "run.html",
        charts={
            "quality": [
                figures.losses(run), *figures.metric_charts(run), figures.learning_rates(run)
            ],
            "speed": [
                figures.throughput(run), figures.phases_total(run), figures.phases_over_time(run)
            ],
            "rows": [figures.row_sources(run)],
            "traffic": [traffic.sent_bytes(run)],
            "tiers": tiers.charts(run) if tier_table else [],
            "tables": [figures.table_sizes(tables), figures.table_traffic(tables)],
            "towers": [tower_map.plane(towers)] if towers else [],
        },
        title=run.name,
        status=run.status,
        lead=_lead(run),
        folder=run.folder.resolve(),
        num_ranks=_ranks(run),
        tiles=headline(run),
        evaluations=_evaluation_table(run),
        missed_updates=_missed_table(run),
        copies=_copy_table(run),
        copy_ages=_copy_age_table(run),
        sent=_traffic_table(run),
        tiers=tier_table,
        tables=_size_table(tables),
        towers=towers and _tower_tables(towers),
        settings={
            name.capitalize(): flat(section)
            for name, section in run.config.items()
            if isinstance(section, Mapping)
        },
        plan=_plan(run),
        machine=_machine_facts(run.machine),
    )  # fmt: skip


def headline(run: RunRecord) -> list[tuple[str, str, str]]:
    """(name, value, unit): the metrics at the chosen step first, then speed and size."""
    found = []
    choice = choice_of(run)
    judged = {m: p for m, p in metrics_of(run).items() if is_judged(m) and choice is not None}
    for metric, parts in list(judged.items())[:MAX_METRIC_TILES]:
        assert choice is not None
        part = "test" if "test" in parts else next(iter(parts))
        value = chosen_value(choice, parts[part])[1]
        found.append((f"{part} {metric_words(metric)}", metric_value(metric, value), choice.words))
    rates = [v for line in run.of_kind("train") if (v := line.get("samples_per_second"))]
    if rates:
        found.append(("throughput", count_words(statistics.median(rates)), "samples/s"))
    found.append(("trained", count_words(run.step), "steps"))
    if run.seconds:
        found.append(("time", seconds_words(run.seconds), ""))
    if scales := [line["loss_scale"] for line in run.of_kind("train") if "loss_scale" in line]:
        skipped = run.summary.get("skipped", 0)
        found.append(("loss scale", f"{scales[-1]:,g}", f"{skipped:,} steps skipped"))
    tables = tables_of(run)
    if known := sum(t.rows_known for t in tables):
        found.append(("rows known", count_words(known), f"in {len(tables)} tables"))
    if "resident_bytes" in run.summary:
        found.append(
            ("memory for rows", bytes_words(run.summary["resident_bytes"]), "a rank, with index")
        )
    if run.checkpoints:
        found.append(("newest checkpoint", f"{run.checkpoints[-1]:,}", "step"))
    return found


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings in one list; those left at the optimizer's own default are left out."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name == "schema" and isinstance(value, Mapping):
            found[name] = f"{len(value.get('fields', ()))} fields"
        elif isinstance(value, Mapping):
            found |= {f"{name}.{k}": v for k, v in flat(value).items()}
        elif value is not None:
            found[name] = setting_words(value, name)
    return found


def _lead(run: RunRecord) -> str:
    model, data = run.config.get("model", {}), run.config.get("data", {})
    ranks = _ranks(run)
    files = data.get("path")
    source = f"{data.get('name', 'data')}{f' ({files})' if files else ''}"
    words = (
        f"{model.get('name', 'a model')} on {source}, {ranks} {'rank' if ranks == 1 else 'ranks'}"
    )
    times = [line["time"] for line in run.lines if line.get("time")]
    if times:
        words += f", from {_when(times[0])} to {_when(times[-1])}"
    ends = {
        "under way": "Still going when this was written.",
        "ended early": "It ended without a word: it goes on from its newest checkpoint if trained again.",
        "stopped": "It was asked to stop; the same command goes on from its newest checkpoint.",
        "not begun": "Nothing is recorded yet.",
    }
    return f"{words}. {ends.get(run.status, '')}".strip()


def _evaluation_table(run: RunRecord) -> NumberTable | None:
    """Return a line for each evaluation, the chosen one marked; of very many the newest; None if there was none."""
    lines = run.of_kind("evaluate")
    if not lines:
        return None
    metrics = metrics_of(run)
    shown = [(part, metric) for metric, parts in metrics.items() for part in parts]
    shown = [pair for pair in shown if not is_constant(pair[1])][:MAX_COLUMNS]
    choice = choice_of(run)
    assert choice is not None
    rows: list[list[str]] = []
    marked: dict[int, list[int]] = {}
    for line in lines[-MAX_TABLE_LINES:]:
        values = [metric_value(m, line.get(f"{part}_{m}")) for part, m in shown]
        if line["step"] == choice.step:
            marked[len(rows)] = [2 + i for i, pair in enumerate(shown) if is_judged(pair[1])]
        rows.append([f"{line['step']:,}", str(line.get("epoch", "-")), *values])
    left_out = f" The newest {len(rows)} of {len(lines)}." if len(rows) < len(lines) else ""
    return NumberTable(
        columns=["step", "epoch", *(f"{part} {metric_words(m)}" for part, m in shown)],
        rows=rows,
        title="Evaluations",
        note=f"Marked: {choice.words}.{left_out}",
        best=marked,
        wide=range(5, 2 + len(shown)),
    )


def _tier_table(run: RunRecord) -> NumberTable | None:
    """Return None if all rows are in memory and files hold checkpoints alone, or the record has no counts."""
    counts = tiers.totals(run)
    if not tiers.has_rows_below_memory(counts, sums_of(run, "rows").get("evicted", 0)):
        return None
    by_tier = [tiers.tier_words(each) for each in counts.values()]
    return NumberTable(
        columns=["", *counts],
        rows=list(zip(tiers.TIER_LINES, *by_tier, strict=True)),
        title="What each tier did",
        note="Of the first rank with rows, since the newest start of the run; lifetime: of its files, from step 0 on.",
    )


def _missed_table(run: RunRecord) -> NumberTable | None:
    """Return None where every read saw every update."""
    counts = {int(n): count for n, count in sums_of(run, "missed").items() if n.isdigit()}
    total = sum(counts.values())
    if not total:
        return None
    return NumberTable(
        columns=["updates missed", "reads", "share"],
        rows=[[f"{n:,}", f"{counts[n]:,.0f}", f"{counts[n] / total:.1%}"] for n in sorted(counts)],
        title="How late reads of rows were",
        note="One read for each step and bound of tables; those that a checkpoint held are not counted.",
    )


def _copy_table(run: RunRecord) -> NumberTable | None:
    """Return None where ranks keep no copies of rows."""
    counts = sums_of(run, "cache")
    total = sum(counts.get(name, 0.0) for name in ("hits", "misses", "lease_over"))
    if not total:
        return None
    words = {
        "hits": "used without a word",
        "misses": "no copy: the row was asked for",
        "lease_over": "a copy too old to be used unasked",
        "renewed": "of these, still what the owner had: a bit came",
        "pushed_full": "gradients of more batches waited than may",
        "pushed_leaving": "the copy left with the batch that used it",
        "pushed_evicted": "the copy was driven out",
    }
    pushed = sum(counts.get(name, 0) for name in words if name.startswith("pushed"))
    return NumberTable(
        columns=["rows of batches", "rows", "of all"],
        rows=[
            [text, f"{counts.get(name, 0):,.0f}", f"{counts.get(name, 0) / total:.1%}"]
            for name, text in words.items()
        ],
        title="Copies of rows on rank 0",
        note=f"{counts.get('ticks', 0) / max(1.0, pushed):,.1f} batches' gradients in each sum that was sent.",
    )


def _copy_age_table(run: RunRecord) -> NumberTable | None:
    """Return None where ranks keep no copies of rows."""
    counts = {int(n): count for n, count in sums_of(run, "copy_ages").items() if n.isdigit()}
    total = sum(counts.values())
    if not total:
        return None
    return NumberTable(
        columns=["batches since the owner was asked", "rows", "share"],
        rows=[
            [_age_words(age), f"{counts[age]:,.0f}", f"{counts[age] / total:.1%}"]
            for age in sorted(counts)
        ],
        title="How old rows were when rank 0 read them",
        note="Of each other rank a read misses at most so many batches, and those that waited there when the owner was "
        "asked: write_bound at most.",
    )


def _age_words(least: int) -> str:
    """Of a kind of `exchange.cached.AGES`, by the least of its ages."""
    if least < 2:
        return "none: with the batch" if least == 0 else "1"
    return f"{least:,} to {2 * least - 1:,}"


def _traffic_table(run: RunRecord) -> NumberTable | None:
    """Return None where no bytes sent were recorded."""
    sent = traffic.totals(run)
    if not sent:
        return None
    return NumberTable(
        columns=traffic.COLUMNS,
        rows=traffic.table_lines(sent, traffic.totals(run, "messages"), traffic.steps_of(run)),
        title="What rank 0 sent",
        note="Payload that left the rank, each byte once; what it passes on for others included.",
    )


def _tower_tables(towers: tower_map.TowerMap) -> list[NumberTable]:
    """Return how alike features of a tower are, and what each tower holds."""
    return [
        NumberTable(
            columns=tower_map.AFFINITY_COLUMNS,
            rows=tower_map.affinity_lines(towers),
            title="Mean |cosine| of two features",
            note="Of pairs inside a tower, and of pairs across towers.",
        ),
        NumberTable(
            columns=tower_map.LOAD_COLUMNS,
            rows=tower_map.load_lines(towers),
            title="What each tower holds",
        ),
    ]


def _size_table(tables: list[TableFigures]) -> NumberTable | None:
    """Return a line for each table, the smallest of very many as one; None if there are none."""
    if not tables:
        return None
    rows = [_table_line(t) for t in tables[:MAX_TABLE_LINES]]
    rest = tables[MAX_TABLE_LINES:]
    if rest:
        total = TableFigures(
            f"{len(rest):,} more",
            None,
            sum(t.rows_in_memory or 0 for t in rest),
            sum(t.rows_in_files or 0 for t in rest),
            sum(t.bytes_in_memory for t in rest),
            sum(t.bytes_in_files for t in rest),
            sum(t.lookups or 0 for t in rest),
            sum(t.unique or 0 for t in rest),
        )
        rows.append(_table_line(total))
    return NumberTable(
        columns=[
            "table", "rows in memory", "rows in files", "memory", "files", "lookups a batch",
            "rows a batch",
        ],
        rows=rows,
        wide=(2, 4, 5),
    )  # fmt: skip


def _table_line(t: TableFigures) -> list[str]:
    return [
        t.name,
        count_words(t.rows_in_memory),
        count_words(t.rows_in_files),
        bytes_words(t.bytes_in_memory),
        bytes_words(t.bytes_in_files),
        count_words(_round(t.lookups)),
        count_words(_round(t.unique)),
    ]


def _round(value: float | None) -> float | None:
    return None if value is None else round(value)


def _ranks(run: RunRecord) -> int:
    return int(run.plan.get("num_ranks") or run.summary.get("num_ranks") or 1)


def _plan(run: RunRecord) -> dict[str, Any]:
    plan = {name: value for name, value in run.plan.items() if not isinstance(value, list | dict)}
    if "dram_bytes" in plan:
        size = plan.pop("dram_bytes")
        plan["memory for rows"] = "no limit" if size is None else f"{bytes_words(size)} a rank"
    if is_number(budget := plan.pop("write_budget", None)):
        plan["write budget"] = f"{bytes_words(budget)}/s a rank"
    foretold = run.plan.get("prediction")
    if isinstance(foretold, dict) and is_number(foretold.get("samples_per_second")):
        measured = run.summary.get("samples_per_second")
        said = count_words(round(foretold["samples_per_second"]))
        plan["samples/s foretold"] = f"{said}, measured {count_words(_round(measured))}"
        plan["what limits"] = foretold.get("limit", "-")
    if tables := run.plan.get("tables"):
        plan["tables"] = len(tables)
        plan["tables with rows beyond memory"] = sum(not t.get("fits", True) for t in tables)
    return {name.replace("_", " "): value for name, value in plan.items()}


def _machine_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in facts.items():
        if isinstance(value, Mapping):
            found |= {f"{k}": v for k, v in value.items() if v is not None}
        elif value is not None:
            words = name.removesuffix("_bytes").replace("_", " ")
            found[words] = bytes_words(value) if name.endswith("_bytes") else value
    return found or {"machine": "not recorded"}


def _when(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M}"
