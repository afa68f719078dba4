"""Pages of `colonnade report` and `colonnade compare`: one run, or several runs compared."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from colonnade.formats import flatten_to_dotted_names
from colonnade.plan.comparison import PlanComparison
from colonnade.report import figures, tiers, tower_map, traffic
from colonnade.report.formatting import (
    format_bytes,
    format_count,
    format_metric,
    format_metric_name,
    format_seconds,
    format_setting,
)
from colonnade.report.intervals import BlockValues, are_within_noise
from colonnade.report.page import NumberTable, render_page
from colonnade.report.reading import (
    RunRecord,
    TableFigures,
    collect_metrics,
    collect_table_figures,
    find_block_values,
    find_direction,
    is_constant,
    is_judged,
    is_number,
    select_evaluation,
    sum_metrics_lines,
    value_at_selection,
)
from colonnade.train.best import NEITHER


@dataclass(frozen=True)
class ComparisonLine:
    """Values of one figure or setting, one per run."""

    name: str
    values: tuple[str, ...]
    best: tuple[int, ...] = ()  # indices of the best runs; () if none is better than the others


def find_distinct_run_names(runs: Sequence[RunRecord]) -> list[str]:
    """Return the runs' folder names, with as many parent folders as make them distinct."""
    paths = [run.folder.resolve().parts for run in runs]
    for depth in range(1, max(map(len, paths)) + 1):
        names = ["/".join(parts[-depth:]) for parts in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{run.name} ({number})" for number, run in enumerate(runs, 1)]


def build_figure_lines(runs: Sequence[RunRecord]) -> list[ComparisonLine]:
    """Return the lines of figures: metrics (at the selected step, then last), speed and size; "-" if a run has none."""
    return _build_metric_lines(runs) + _build_speed_lines(runs)


def _build_metric_lines(runs: Sequence[RunRecord]) -> list[ComparisonLine]:
    lines: list[ComparisonLine] = []
    evaluated = [collect_metrics(run) for run in runs]
    selections = [select_evaluation(run) for run in runs]
    if any(selections):
        lines.append(
            ComparisonLine("chosen step", tuple(c.description if c else "-" for c in selections))
        )
    pairs = dict.fromkeys(
        (metric, part)
        for metrics in evaluated
        for metric, parts in metrics.items()
        for part in parts
    )
    for metric, part in pairs:
        points = [metrics.get(metric, {}).get(part, []) for metrics in evaluated]
        name = f"{part} {format_metric_name(metric)}"
        if is_judged(metric):
            chosen = [
                value_at_selection(c, p)[1] if c and p else None
                for c, p in zip(selections, points, strict=True)
            ]
            blocks = [
                find_block_values(run, part, metric, c)
                for run, c in zip(runs, selections, strict=True)
            ]
            direction = find_direction(metric, runs)
            lines.append(_build_metric_line(f"{name}, chosen", metric, direction, chosen, blocks))
        elif is_constant(metric):
            continue
        if any(len(p) > 1 for p in points) or not is_judged(metric):
            last = [p[-1][1] if p else None for p in points]
            lines.append(
                _build_metric_line(f"{name}, last", metric, direction, last)
                if is_judged(metric)
                else ComparisonLine(name, tuple(format_metric(metric, v) for v in last))
            )
    return lines


def _build_speed_lines(runs: Sequence[RunRecord]) -> list[ComparisonLine]:
    rates = [_median_rate(run) for run in runs]
    finite_rates = [rate for rate in rates if rate is not None]
    fastest = tuple(
        i for i, r in enumerate(rates) if len(finite_rates) > 1 and r == max(finite_rates)
    )
    rows = [sum(t.rows_known for t in collect_table_figures(run)) or None for run in runs]
    sizes = [run.summary.get("resident_bytes") for run in runs]
    sent = [sum(traffic.sum_run_traffic(run).values()) for run in runs]
    lines = [
        ComparisonLine("samples/s, median", tuple(map(format_count, rates)), fastest),
        ComparisonLine("steps", tuple(f"{run.step:,}" for run in runs)),
        ComparisonLine("time", tuple(format_seconds(run.seconds or None) for run in runs)),
        ComparisonLine("ranks", tuple(str(run.plan.get("num_ranks", "-")) for run in runs)),
        ComparisonLine("rows known, rank 0", tuple(map(format_count, rows))),
        ComparisonLine("memory for rows, rank 0", tuple(map(format_bytes, sizes))),
    ]
    if any(sent):
        lines.append(ComparisonLine("sent by rank 0", tuple(map(format_bytes, sent))))
    return [*lines, ComparisonLine("status", tuple(run.status for run in runs))]


def find_different_settings(runs: Sequence[RunRecord]) -> list[ComparisonLine]:
    """Return the settings that differ between runs, and of machines the processor, threads and versions."""
    settings = [
        flatten_to_dotted_names(run.config) | _collect_machine_settings(run) for run in runs
    ]
    names = dict.fromkeys(name for run_settings in settings for name in run_settings)
    missing = object()
    lines = []
    for name in names:
        values = [run_settings.get(name, missing) for run_settings in settings]
        if any(value != values[0] for value in values):
            lines.append(
                ComparisonLine(
                    name, tuple("-" if v is missing else format_setting(v, name) for v in values)
                )
            )
    return lines


def render_comparison_page(runs: Sequence[RunRecord]) -> str:
    """Return the HTML of a page that compares runs."""
    names = find_distinct_run_names(runs)
    lines = build_figure_lines(runs)
    differences = [[line.name, *line.values] for line in find_different_settings(runs)]
    return render_page(
        "compare.html",
        charts={"curves": figures.draw_overlay_charts(dict(zip(names, runs, strict=True)))},
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


def _build_metric_line(
    name: str,
    metric: str,
    direction: int,
    values: Sequence[float | None],
    blocks: Sequence[BlockValues | None] = (),
) -> ComparisonLine:
    """Return a line with the runs marked that are level with the best one; with none if all are, or if it is unknown
    which values are better (`direction` NEITHER)."""
    points = [(i, value) for i, value in enumerate(values) if value is not None]
    texts = tuple(format_metric(metric, value) for value in values)
    best: tuple[int, ...] = ()
    if len(points) > 1 and direction != NEITHER:
        top = max(points, key=lambda point: direction * point[1])[0]
        best = tuple(
            i
            for i, _ in points
            if texts[i] == texts[top] or (blocks and are_within_noise(blocks[i], blocks[top]))
        )
        best = () if len(best) == len(points) else best
    return ComparisonLine(name, texts, best)


def _median_rate(run: RunRecord) -> float | None:
    rates = [v for line in run.lines_of_kind("train") if (v := line.get("samples_per_second"))]
    return statistics.median(rates) if rates else None


def _collect_machine_settings(run: RunRecord) -> dict[str, Any]:
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


def render_run_page(run: RunRecord) -> str:
    """Return the HTML of a run's page."""
    tables = collect_table_figures(run)
    tier_table = _build_tier_table(run)
    towers = tower_map.read_tower_map(run.folder)
    return render_page(
        "run.html",
        charts={
            "quality": [
                figures.draw_loss_chart(run),
                *figures.draw_metric_charts(run),
                figures.draw_learning_rate_chart(run),
                figures.draw_codistillation_chart(run),
            ],
            "speed": [
                figures.draw_throughput_chart(run),
                figures.draw_phase_total_chart(run),
                figures.draw_phase_history_chart(run),
                figures.draw_scaling_chart(run, _count_trainers(run)),
            ],
            "rows": [figures.draw_row_source_chart(run)],
            "traffic": [traffic.draw_sent_bytes_chart(run)],
            "tiers": tiers.draw_tier_charts(run) if tier_table else [],
            "tables": [
                figures.draw_table_size_chart(tables),
                figures.draw_table_traffic_chart(tables),
            ],
            "towers": [tower_map.draw_feature_chart(towers)] if towers else [],
        },
        title=run.name,
        status=run.status,
        lead=_describe_run(run),
        folder=run.folder.resolve(),
        num_ranks=_count_ranks(run),
        tiles=build_headline(run),
        evaluations=_build_evaluation_table(run),
        types=_build_type_table(run),
        missed_updates=_build_missed_updates_table(run),
        copies=_build_cache_table(run),
        copy_ages=_build_cache_age_table(run),
        sent=_build_traffic_table(run),
        tiers=tier_table,
        tables=_build_table_size_table(tables),
        towers=towers and _build_tower_tables(towers),
        settings={
            name.capitalize(): flatten_settings_section(section)
            for name, section in run.config.items()
            if isinstance(section, Mapping)
        },
        plan=_collect_plan_facts(run),
        machine=_collect_machine_facts(run.machine),
    )


def build_headline(run: RunRecord) -> list[tuple[str, str, str]]:
    """Return the headline figures as (name, value, unit): metrics at the selected step, then speed and size."""
    tiles = []
    selection = select_evaluation(run)
    judged = {
        m: p for m, p in collect_metrics(run).items() if is_judged(m) and selection is not None
    }
    for metric, parts in list(judged.items())[:MAX_METRIC_TILES]:
        assert selection is not None
        part = "test" if "test" in parts else next(iter(parts))
        value = value_at_selection(selection, parts[part])[1]
        tiles.append(
            (
                f"{part} {format_metric_name(metric)}",
                format_metric(metric, value),
                selection.description,
            )
        )
    if rate := _median_rate(run):
        tiles.append(("throughput", format_count(rate), "samples/s"))
    tiles.append(("trained", format_count(run.step), "steps"))
    if run.seconds:
        tiles.append(("time", format_seconds(run.seconds), ""))
    if scales := [
        line["loss_scale"] for line in run.lines_of_kind("train") if "loss_scale" in line
    ]:
        skipped = run.summary.get("skipped", 0)
        tiles.append(("loss scale", f"{scales[-1]:,g}", f"{skipped:,} steps skipped"))
    tables = collect_table_figures(run)
    if num_rows := sum(t.rows_known for t in tables):
        tiles.append(("rows known", format_count(num_rows), f"in {len(tables)} tables"))
    if "resident_bytes" in run.summary:
        tiles.append(
            ("memory for rows", format_bytes(run.summary["resident_bytes"]), "a rank, with index")
        )
    if run.checkpoints:
        tiles.append(("newest checkpoint", f"{run.checkpoints[-1]:,}", "step"))
    return tiles


def flatten_settings_section(values: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten a section of settings to text by name, without settings at the optimizer's own default."""
    texts: dict[str, Any] = {}
    for name, value in values.items():
        if name == "schema" and isinstance(value, Mapping):
            texts[name] = f"{len(value.get('fields', ()))} fields"
        elif isinstance(value, Mapping):
            texts |= {f"{name}.{k}": v for k, v in flatten_settings_section(value).items()}
        elif value is not None:
            texts[name] = format_setting(value, name)
    return texts


def _describe_run(run: RunRecord) -> str:
    model = run.config.get("model", {})
    data = run.config.get("data", {})
    ranks = _count_ranks(run)
    files = data.get("path")
    source = f"{data.get('name', 'data')}{f' ({files})' if files else ''}"
    text = (
        f"{model.get('name', 'a model')} on {source}, {ranks} {'rank' if ranks == 1 else 'ranks'}"
    )
    times = [line["time"] for line in run.lines if line.get("time")]
    if times:
        text += f", from {_format_time(times[0])} to {_format_time(times[-1])}"
    ends = {
        "under way": "It was still training when this page was written.",
        "ended early": "It ended without a summary, so it was probably killed; train again to resume it.",
        "stopped": "It was stopped; the same command resumes it from its newest checkpoint.",
        "not begun": "Nothing is recorded yet.",
    }
    return f"{text}. {ends.get(run.status, '')}".strip()


def _build_evaluation_table(run: RunRecord) -> NumberTable | None:
    """Return a table of evaluations with the selected one marked, the newest ones if there are many; None if none."""
    lines = run.lines_of_kind("evaluate")
    if not lines:
        return None
    metrics = collect_metrics(run)
    shown = [(part, metric) for metric, parts in metrics.items() for part in parts]
    shown = [pair for pair in shown if not is_constant(pair[1])][:MAX_COLUMNS]
    selection = select_evaluation(run)
    assert selection is not None
    rows: list[list[str]] = []
    marked: dict[int, list[int]] = {}
    line_by_step: dict[int, dict[str, Any]] = {}
    for line in lines:  # the test part may have been evaluated later
        line_by_step[line["step"]] = line_by_step.get(line["step"], {}) | line
    lines = list(line_by_step.values())
    for line in lines[-MAX_TABLE_LINES:]:
        values = [format_metric(m, line.get(f"{part}_{m}")) for part, m in shown]
        if line["step"] == selection.step:
            marked[len(rows)] = [2 + i for i, pair in enumerate(shown) if is_judged(pair[1])]
        rows.append([f"{line['step']:,}", str(line.get("epoch", "-")), *values])
    limit_note = f" The newest {len(rows)} of {len(lines)}." if len(rows) < len(lines) else ""
    return NumberTable(
        columns=["step", "epoch", *(f"{part} {format_metric_name(m)}" for part, m in shown)],
        rows=rows,
        title="Evaluations",
        note=f"Marked: {selection.description}.{limit_note}",
        best=marked,
        wide=range(5, 2 + len(shown)),
    )


def _build_type_table(run: RunRecord) -> NumberTable | None:
    """Return a table of the types of feedback by the tested weights; None if the model does not tell types apart."""
    types = (run.lines_of_kind("types") or [{"types": {}}])[-1]["types"]
    if not types:
        return None
    columns = list(dict.fromkeys(column for figures in types.values() for column in figures))
    return NumberTable(
        columns=["type", *(column.replace("_", " ") for column in columns)],
        rows=[
            [name, *(f"{values.get(c, math.nan):,.4g}" for c in columns)]
            for name, values in types.items()
        ],
        title="Types of feedback",
        note="Strongest first; by training pairs, with the tested weights.",
    )


def _build_tier_table(run: RunRecord) -> NumberTable | None:
    """Return a table of the tiers' counts; None if all rows are in memory, or if the record has no counts."""
    counts = tiers.sum_tier_counts(run)
    if not tiers.has_moved_rows(counts, sum_metrics_lines(run, "rows").get("evicted", 0)):
        return None
    by_tier = [tiers.format_tier_counts(tier) for tier in counts.values()]
    return NumberTable(
        columns=["", *counts],
        rows=list(zip(tiers.TIER_LINES, *by_tier, strict=True)),
        title="Counts of each tier",
        note="On the first rank with rows, since the newest start of the run; lifetime: of its files, since step 0.",
    )


def _build_missed_updates_table(run: RunRecord) -> NumberTable | None:
    """Return a table of updates that reads missed; None if reads missed none."""
    return _build_share_table(
        {f"{n:,}": count for n, count in _sum_by_number(run, "missed").items()},
        columns=["updates missed", "reads", "share"],
        title="Staleness of row reads",
        note="One read for each step and staleness bound; reads restored from a checkpoint are not counted.",
    )


def _sum_by_number(run: RunRecord, line_kind: str) -> dict[int, float]:
    """Return the sums of counts that are named by numbers, in the order of these."""
    sums = sum_metrics_lines(run, line_kind)
    return dict(sorted((int(name), count) for name, count in sums.items() if name.isdigit()))


def _build_share_table(counts: Mapping[str, float], **words: Any) -> NumberTable | None:
    """Return a table of counts and their shares; None if there are none. words: columns, title and note."""
    total = sum(counts.values())
    if not total:
        return None
    rows = [[name, f"{count:,.0f}", f"{count / total:.1%}"] for name, count in counts.items()]
    return NumberTable(rows=rows, **words)


def _build_cache_table(run: RunRecord) -> NumberTable | None:
    """Return a table of the row cache's counts; None without a cache."""
    counts = sum_metrics_lines(run, "cache")
    total = sum(counts.get(name, 0.0) for name in ("hits", "misses", "lease_over"))
    if not total:
        return None
    labels = {
        "hits": "read from the cache",
        "misses": "not cached: requested from the owner",
        "lease_over": "cached, but expired: checked with the owner",
        "renewed": "of these, unchanged at the owner: only a bit was sent",
        "pushed_full": "gradients sent: pending batches reached write_bound",
        "pushed_leaving": "gradients sent: row removed after its batch",
        "pushed_evicted": "gradients sent: row evicted",
    }
    pushed = sum(counts.get(name, 0) for name in labels if name.startswith("pushed"))
    return NumberTable(
        columns=["rows of batches", "rows", "of all"],
        rows=[
            [text, f"{counts.get(name, 0):,.0f}", f"{counts.get(name, 0) / total:.1%}"]
            for name, text in labels.items()
        ],
        title="Row cache of rank 0",
        note=f"{counts.get('ticks', 0) / max(1.0, pushed):,.1f} batches on average in each gradient sum sent.",
    )


def _build_cache_age_table(run: RunRecord) -> NumberTable | None:
    """Return a table of the ages of cached rows at their reads; None without a cache."""
    return _build_share_table(
        {_format_ages(age): count for age, count in _sum_by_number(run, "copy_ages").items()},
        columns=["batches since the last check", "rows", "share"],
        title="Age of cached rows when rank 0 read them",
        note="Age: batches since the row was last checked with its owner. A read misses at most that many batches of "
        "each other rank, plus those pending there at the check (write_bound at most).",
    )


def _format_ages(lowest: int) -> str:
    """Format an interval of `cache.directory.AGES`, given its lowest age."""
    if lowest < 2:
        return "0: checked for this batch" if lowest == 0 else "1"
    return f"{lowest:,} to {2 * lowest - 1:,}"


def _build_traffic_table(run: RunRecord) -> NumberTable | None:
    """Return a table of the bytes that rank 0 sent; None if none were recorded."""
    sent = traffic.sum_run_traffic(run)
    if not sent:
        return None
    return NumberTable(
        columns=traffic.COLUMNS,
        rows=traffic.build_traffic_lines(
            sent, traffic.sum_run_traffic(run, "messages"), traffic.count_steps(run)
        ),
        title="Traffic of rank 0",
        note="Payload that the rank sent, including payload that it relayed for other ranks.",
    )


def _build_tower_tables(towers: tower_map.TowerMap) -> list[NumberTable]:
    """Return tables of the affinities inside and across towers, and of the towers' loads."""
    return [
        NumberTable(
            columns=tower_map.AFFINITY_COLUMNS,
            rows=tower_map.format_affinity_lines(towers),
            title="Mean |cosine| of two features",
            note="For pairs inside a tower, and for pairs across towers.",
        ),
        NumberTable(
            columns=tower_map.LOAD_COLUMNS,
            rows=tower_map.format_load_lines(towers),
            title="Load of each tower",
        ),
    ]


def _build_table_size_table(tables: list[TableFigures]) -> NumberTable | None:
    """Return a table of the tables' sizes, with the smallest ones as one line if there are many; None without
    tables."""
    if not tables:
        return None
    rows = [_format_table_line(t) for t in tables[:MAX_TABLE_LINES]]
    rest = tables[MAX_TABLE_LINES:]
    if rest:
        total = TableFigures(
            f"{len(rest):,} more",
            sum(t.rows_in_memory or 0 for t in rest),
            sum(t.rows_in_files or 0 for t in rest),
            sum(t.bytes_in_memory for t in rest),
            sum(t.bytes_in_files for t in rest),
            sum(t.lookups or 0 for t in rest),
            sum(t.unique or 0 for t in rest),
        )
        rows.append(_format_table_line(total))
    return NumberTable(
        columns=[
            "table",
            "rows in memory",
            "rows in files",
            "memory",
            "files",
            "lookups a batch",
            "rows a batch",
        ],
        rows=rows,
        wide=(2, 4, 5),
    )


def _format_table_line(t: TableFigures) -> list[str]:
    return [
        t.name,
        format_count(t.rows_in_memory),
        format_count(t.rows_in_files),
        format_bytes(t.bytes_in_memory),
        format_bytes(t.bytes_in_files),
        format_count(_round_count(t.lookups)),
        format_count(_round_count(t.unique)),
    ]


def _round_count(value: float | None) -> float | None:
    return None if value is None else round(value)


def _count_ranks(run: RunRecord) -> int:
    return int(run.plan.get("num_ranks") or run.summary.get("num_ranks") or 1)


def _count_trainers(run: RunRecord) -> int:
    servers = run.plan.get("servers")
    return _count_ranks(run) - (len(servers) if isinstance(servers, list) else 0)


def _collect_plan_facts(run: RunRecord) -> dict[str, Any]:
    plan = {name: value for name, value in run.plan.items() if not isinstance(value, list | dict)}
    if "dram_bytes" in plan:
        size = plan.pop("dram_bytes")
        plan["memory for rows"] = "no limit" if size is None else f"{format_bytes(size)} a rank"
    if is_number(budget := plan.pop("write_budget", None)):
        plan["write budget"] = f"{format_bytes(budget)}/s a rank"
    prediction = run.plan.get("prediction")
    if isinstance(prediction, dict) and is_number(prediction.get("samples_per_second")):
        measured = run.summary.get("samples_per_second")
        predicted = format_count(round(prediction["samples_per_second"]))
        plan["samples/s predicted"] = (
            f"{predicted}, measured {format_count(_round_count(measured))}"
        )
        plan["what limits"] = prediction.get("limit", "-")
    plan |= _collect_comparison_facts(run.plan.get("comparison"))
    if tables := run.plan.get("tables"):
        plan["tables"] = len(tables)
        plan["tables with rows beyond memory"] = sum(not t.get("fits", True) for t in tables)
    return {name.replace("_", " "): value for name, value in plan.items()}


def _collect_comparison_facts(comparison: Any) -> dict[str, Any]:
    """Return the plans that a run chose from in words; {} if its settings left nothing open."""
    try:
        first, *others = PlanComparison.from_dict(comparison).describe()
    except (KeyError, TypeError, ValueError):
        return {}
    facts = {"exchanges": first.removeprefix("plan: ")}
    if others:
        facts["plans compared"] = "; ".join(line.strip() for line in others)
    return facts


def _collect_machine_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in facts.items():
        if isinstance(value, Mapping):
            values |= {f"{k}": v for k, v in value.items() if v is not None}
        elif value is not None:
            label = name.removesuffix("_bytes").replace("_", " ")
            values[label] = format_bytes(value) if name.endswith("_bytes") else value
    return values or {"machine": "not recorded"}


def _format_time(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M}"
