"""The report's figures and words, of runs in every state. What a browser makes of the page: test_report_browser.py."""

from __future__ import annotations

import json
import os
import re
import stat
from dataclasses import replace
from random import Random

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from run_records import write_run

from colonnade.errors import CheckpointError, StorageError
from colonnade.report import figures, tiers
from colonnade.report.formatting import (
    format_bytes,
    format_count,
    format_digits,
    format_seconds,
    format_setting,
)
from colonnade.report.page import write_page
from colonnade.report.pages import (
    build_figure_lines,
    build_headline,
    find_different_settings,
    find_distinct_run_names,
    render_comparison_page,
    render_run_page,
)
from colonnade.report.reading import (
    collect_metrics,
    collect_table_figures,
    is_judged,
    read_run_folder,
    sum_metrics_lines,
)
from colonnade.train.best import HIGHER, LOWER, get_direction


def figures_in(html: str) -> list[dict]:
    result = re.search(r'<script type="application/json" id="figures">(.*?)</script>', html, re.S)
    assert result
    return json.loads(result[1])


def test_what_is_read_is_what_was_written(tmp_path):
    run = read_run_folder(write_run(tmp_path / "run", steps=400, every=20, evaluations=4))
    assert run.status == "finished" and run.step == 400
    metrics = collect_metrics(run)
    assert [step for step, _ in metrics["auc"]["validation"]] == [100, 200, 300, 400]
    assert sum_metrics_lines(run, "rows") == {
        "resident": 180000,
        "read": 14000,
        "born": 6000,
        "evicted": 13000,
    }
    tables = collect_table_figures(run)
    assert [t.name for t in tables] == [f"C{i}" for i in range(6)]  # most bytes first
    assert tables[0].rows_known == 12000 and tables[0].lookups == 4096 and tables[3].unique == 103


@pytest.mark.parametrize(
    ("settings", "status", "words"),
    [
        ({}, "finished", ["Training loss", "Phases of a step", "Bytes sent", "Learning rates"]),
        ({"finished": False}, "ended early", ["ended without a summary"]),
        ({"steps": 20, "evaluations": 0, "finished": False}, "ended early", ["No evaluation yet"]),
        ({"steps": 0, "finished": False}, "not begun", ["Nothing recorded yet"]),
        ({"nan_from": 200}, "finished", ["11 of 20 recorded losses are not finite, the first at step 200"]),
        ({"nan_from": 0}, "finished", ["20 of 20 recorded losses are not finite"]),
        ({"tables": 1000, "ranks": 1}, "finished", ["960 more", "985 smaller tables", "One rank: nothing is sent"]),
        ({"steps": 200000}, "finished", ["One point in 20 steps"]),
    ],
)  # fmt: skip
def test_every_state_of_a_run_makes_a_page(settings, status, words, tmp_path):
    run = read_run_folder(write_run(tmp_path / "run", **settings))
    assert run.status == status
    html = render_run_page(run)
    for word in [*words, "width=device-width", "@media print"]:
        assert word in html
    drawn = figures_in(html)
    for figure in drawn:
        for trace in figure["data"]:
            assert len(trace["x"]) == len(trace["y"]) <= figures.MAX_POINTS
    assert html.count('class="chart"') == len(drawn)
    head = html[: html.index("<script")]
    assert not re.search(r"(src|href)=.(http|//)", head)  # nothing is loaded from anywhere
    assert not re.search(
        r"\bnan\b|\binf\b|\bNone\b", re.sub("<[^>]*>", " ", head.split("</style>")[1])
    )


def test_tiers_are_shown_where_there_are_some(tmp_path):
    run = read_run_folder(write_run(tmp_path / "run", steps=400, every=20, finished=False))
    result = tiers.sum_tier_counts(run)
    assert list(result) == ["dram", "ssd"]
    lines = run.lines_of_kind("tiers")
    ssd = result["ssd"]
    assert ssd.reads == sum(line["tiers"]["ssd"]["reads"] for line in lines) > 0
    assert ssd.lifetime_bytes == lines[-1]["tiers"]["ssd"]["lifetime_bytes"]
    assert ssd.held_bytes == 500_000
    assert result["dram"].hit_rate == 0.9 and ssd.write_amplification == pytest.approx(1.5)
    words = dict(zip(tiers.TIER_LINES, tiers.format_tier_counts(ssd), strict=True))
    assert (
        words["write amp."] == "1.50x"
        and words["space amp."] == "1.25x"
        and words["hit rate"] == "70.0%"
    )
    assert set(tiers.format_tier_counts(result["dram"])) >= {"-", "90.0%"}
    charts = [chart for chart in tiers.draw_tier_charts(run) if chart is not None]
    assert len(charts) == 6
    rates = charts[0]["data"]
    assert [trace["name"] for trace in rates] == ["dram", "ssd"] and set(rates[0]["y"]) == {90.0}
    # The summary of a run that came to its end says it at once.
    (tmp_path / "run" / "summary.json").write_text(
        json.dumps({"tiers": {"dram": {"hits": 5}, "ssd": {"hits": 7}}})
    )
    assert tiers.sum_tier_counts(read_run_folder(tmp_path / "run"))["ssd"].hits == 7
    old = read_run_folder(write_run(tmp_path / "old", tiers=False))
    assert tiers.sum_tier_counts(old) == {} and tiers.draw_tier_charts(old) == [None] * 6
    assert "<h2>Tiers</h2>" not in render_run_page(old) and "<h2>Tiers</h2>" in render_run_page(run)


def test_copies_of_rows_are_shown_where_there_are_some(tmp_path):
    folder = write_run(tmp_path / "run")
    assert "Row cache" not in render_run_page(read_run_folder(folder))
    counts = {
        "hits": 60,
        "misses": 30,
        "lease_over": 10,
        "renewed": 4,
        "pushed_full": 5,
        "ticks": 20,
    }
    with (folder / "metrics.jsonl").open("a") as lines:
        lines.write("\n" + json.dumps({"step": 400, "kind": "cache", "time": 0.0, **counts}) + "\n")
    ages = {"0": 400, "1": 25, "32": 75}
    with (folder / "metrics.jsonl").open("a") as lines:
        lines.write(json.dumps({"step": 400, "kind": "copy_ages", "time": 0.0, **ages}) + "\n")
    html = render_run_page(read_run_folder(folder))
    assert "Row cache of rank 0" in html
    assert "60.0%" in html and "4.0 batches" in html
    assert "Age of cached rows" in html and "32 to 63" in html and "15.0%" in html


def test_headline_takes_the_test_value_of_the_best_validated_step(tmp_path):
    folder = write_run(tmp_path / "run", evaluations=0)
    with (folder / "metrics.jsonl").open("a") as lines:
        for step, validation, test in ((100, 0.7, 0.9), (200, 0.8, 0.6), (300, 0.75, 0.95)):
            line = {
                "step": step,
                "kind": "evaluate",
                "validation_auc": validation,
                "test_auc": test,
            }
            lines.write(json.dumps(line) + "\n")
    assert ("test AUC", "0.6000", "step 200, best of validation AUC") in build_headline(
        read_run_folder(folder)
    )


def test_headline_never_takes_the_best_of_the_test_part(tmp_path):
    folder = write_run(tmp_path / "run", evaluations=0)
    scores = ((100, 0.9), (200, 0.6), (300, 0.7))
    lines = [{"step": step, "kind": "evaluate", "test_auc": auc} for step, auc in scores]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = read_run_folder(folder)
    assert ("test AUC", "0.7000", "last step, 300; no validation part") in build_headline(run)
    assert "0.9000 at step" not in render_run_page(run)
    assert {line.name: line.values for line in build_figure_lines([run])}["test AUC, chosen"] == (
        "0.7000",
    )


def test_headline_goes_by_the_metric_that_the_run_monitored(tmp_path):
    folder = write_run(tmp_path / "run", evaluations=0)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["train"]["monitor"] = "log_loss"
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    lines = [
        {"step": 100, "kind": "evaluate", "validation_auc": 0.7, "validation_log_loss": 0.4, "test_auc": 0.6},
        {"step": 200, "kind": "evaluate", "validation_auc": 0.8, "validation_log_loss": 0.9, "test_auc": 0.9},
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert ("test AUC", "0.6000", "step 100, best of validation log loss") in build_headline(
        read_run_folder(folder)
    )


@pytest.mark.parametrize("finished", [True, False])
def test_the_chosen_step_is_the_one_that_training_chose_with_min_delta(tmp_path, finished):
    folder = write_run(tmp_path / "run", evaluations=0)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["train"] |= {"monitor": "auc", "min_delta": 0.01}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    scores = ((100, 0.7), (200, 0.72), (300, 0.725), (400, 0.71))
    lines = [{"step": step, "kind": "evaluate", "validation_auc": auc} for step, auc in scores]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = json.loads((folder / "summary.json").read_text())
    if finished:  # as after a run that was resumed with another min_delta
        (folder / "summary.json").write_text(json.dumps(summary | {"best_step": 100}))
    wanted = ("0.7000", 100) if finished else ("0.7200", 200)
    run = read_run_folder(folder)
    description = f"step {wanted[1]}, best of validation AUC"
    assert ("validation AUC", wanted[0], description) in build_headline(run)
    lines_by_name = {line.name: line for line in build_figure_lines([run, run])}
    assert lines_by_name["chosen step"].values == (description, description)


def test_hostile_names_are_text(tmp_path):
    folder = write_run(tmp_path / "<script>alert(1)</script>", name="</script><b>x")
    html = render_run_page(read_run_folder(folder))
    assert "<script>alert" not in html and "<b>x" not in html.lower()
    assert "</script>" not in re.search(r'id="figures">(.*?)</script>', html, re.S)[1]


def test_a_cut_line_is_left_out_and_a_broken_file_is_named(tmp_path):
    folder = write_run(tmp_path / "run", finished=False)
    whole = (folder / "metrics.jsonl").read_text().count("\n")
    assert len(read_run_folder(folder).lines) == whole
    (folder / "plan.json").write_text('{"num_ranks": ')
    with pytest.raises(CheckpointError, match=r"plan\.json: got broken JSON"):
        read_run_folder(folder)
    with pytest.raises(CheckpointError, match="no run folder"):
        read_run_folder(tmp_path)
    with pytest.raises(CheckpointError, match="is no folder"):
        read_run_folder(tmp_path / "nowhere")


def test_a_page_is_written_whole_or_not_at_all(tmp_path):
    write_page("one", tmp_path / "page.html")
    with pytest.raises(StorageError, match="could not write"):
        write_page("two", tmp_path / "no" / "page.html")
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(StorageError, match="could not write"):
        write_page("two", tmp_path / "folder.html")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder.html", "page.html"]


def test_comparison_shows_only_what_differs_and_marks_the_best(tmp_path):
    one = write_run(tmp_path / "a" / "run", lr=0.1, loss=0.6)
    two = write_run(tmp_path / "b" / "run", lr=0.2, loss=0.5, steps=800, evaluations=2)
    runs = [read_run_folder(one), read_run_folder(two)]
    assert find_distinct_run_names(runs) == ["a/run", "b/run"]
    assert {line.name for line in find_different_settings(runs)} == {"embedding.lr", "train.epochs"}
    assert find_different_settings([runs[0], runs[0]]) == []
    lines = {line.name: line for line in build_figure_lines(runs)}
    assert lines["steps"].values == ("400", "800")
    assert lines["test AUC, chosen"].best == ()  # equal
    drawn = figures_in(render_comparison_page(runs))
    for figure in drawn:
        assert [trace["name"] for trace in figure["data"]] == ["a/run", "b/run"]
    empty = read_run_folder(write_run(tmp_path / "c", steps=0, finished=False))
    assert (
        "-"
        in {line.name: line for line in build_figure_lines([*runs, empty])}[
            "test AUC, chosen"
        ].values
    )
    assert "3 runs compared" in render_comparison_page([*runs, empty])


def test_metrics_of_the_user_are_marked_in_the_direction_of_the_monitor_alone(tmp_path):
    runs = []
    for name, value in (("a", 0.2), ("b", 0.3)):
        write_run(tmp_path / name, evaluations=0)
        line = {
            "step": 400,
            "kind": "evaluate",
            "validation_cost": value,
            "validation_profit": value,
        }
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        runs.append(read_run_folder(tmp_path / name))
    assert not any(line.best for line in build_figure_lines(runs) if "validation" in line.name)
    for mode, best in (("min", (0,)), ("max", (1,))):
        for run in runs:
            run.config["train"] |= {"monitor": "cost", "monitor_mode": mode}
        lines = {line.name: line.best for line in build_figure_lines(runs)}
        assert lines["validation cost, chosen"] == best and lines["validation profit, chosen"] == ()


def write_tested_run(folder, auc, blocks=None, digest="same"):
    write_run(folder, evaluations=0)
    lines = [{"step": 400, "kind": "evaluate", "test_auc": auc}]
    if blocks is not None:
        metrics = {"auc": list(blocks)}
        lines.append({"step": 400, "kind": "test_blocks", "digest": digest, "metrics": metrics})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_run_folder(folder)


def find_winners(*runs):
    lines = {line.name: line for line in build_figure_lines(runs)}
    return lines["test AUC, chosen"].best


def test_no_run_wins_within_rounding_or_two_standard_errors_of_paired_blocks(tmp_path):
    random = Random(1)
    noise = [random.gauss(0, 0.02) for _ in range(64)]
    other = [random.gauss(0, 0.02) for _ in range(64)]
    other = [value - sum(other) / 64 for value in other]  # errors of 0.0025
    base = [0.8 + value for value in noise]
    worse = [value - 0.002 + 0.0005 * one for value, one in zip(base, other, strict=True)]
    level = [value - 0.002 + one for value, one in zip(base, other, strict=True)]
    best = write_tested_run(tmp_path / "a", 0.802, base)
    clearly_worse = write_tested_run(tmp_path / "b", 0.800, worse)
    within_errors = write_tested_run(tmp_path / "c", 0.800, [None, *level[1:]])
    assert find_winners(best, clearly_worse) == (0,)
    assert find_winners(best, within_errors) == ()
    assert find_winners(clearly_worse, best, within_errors) == (1, 2)
    elsewhere = write_tested_run(tmp_path / "d", 0.800, level, digest="other samples")
    assert find_winners(best, elsewhere) == (0,)  # not paired: by what is shown
    plain = write_tested_run(tmp_path / "e", 0.80201)
    assert find_winners(best, plain) == ()  # 0.8020, both
    assert find_winners(clearly_worse, plain) == (1,)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=5000))
def test_thinned_curves_keep_their_mean_and_ends(values):
    points = list(enumerate(values))
    steps, means = zip(*figures.thin_points(points), strict=True)
    run = -(-len(values) // figures.MAX_POINTS)
    assert len(steps) <= figures.MAX_POINTS and steps[-1] == len(values) - 1
    assert list(steps) == sorted(set(steps))
    assert min(values) - 1 <= min(means) and max(means) <= max(values) + 1
    assert len(steps) == -(-len(values) // run)


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=300))
def test_smoothed_curves_stay_inside(values):
    smooth = [value for _, value in figures.smooth_curve(list(enumerate(values)))]
    assert len(smooth) == len(values)
    slack = 1e-4 * max(1.0, *map(abs, values))
    assert all(min(values) - slack <= v <= max(values) + slack for v in smooth)


@pytest.mark.parametrize(
    ("function", "value", "words"),
    [
        (format_count, 1234567, "1.23 M"), (format_count, 99999, "99,999"), (format_count, 0, "0"),
        (format_count, None, "-"), (format_count, float("nan"), "-"), (format_count, 3.14159, "3.14"),
        (format_count, 123456, "123 k"), (format_bytes, 2**20, "1 MiB"), (format_bytes, 12, "12 B"),
        (format_bytes, 1000 * 2**30, "1,000 GiB"), (format_bytes, 999.7 * 2**20, "1,000 MiB"),
        (format_bytes, 300 << 10, "300 KiB"), (format_count, 999_700, "1,000 k"), (format_digits, 1024, "1,020"),
        (format_digits, 0.012345, "0.0123"), (format_digits, 1.25e-6, "1.25e-06"),
        (format_seconds, 0.9999, "1,000 ms"), (format_setting, 1.2499999999999999e-06, "1.25e-06"),
        (format_seconds, 0.0123, "12.3 ms"),
        (format_seconds, 3600 * 2 + 120, "2 h 2 min"), (format_seconds, 5e-5, "50 µs"),
    ],
)  # fmt: skip
def test_numbers_in_words(function, value, words):
    assert function(value) == words


@pytest.mark.parametrize(
    ("metric", "judged", "best"),
    [("auc", True, 2), ("log_loss", True, 1), ("log_loss_buy", True, 1), ("recall@10", True, 2),
     ("normalized_entropy", True, 1), ("expected_calibration_error", True, 1), ("calibration", False, None),
     ("auc_data_loss", True, 2), ("group_auc_error", True, 2), ("auc_num_clicks", True, 2),
     ("auc_calibration", True, 2), ("log_loss_num_clicks", True, 1), ("calibration_click", False, None),
     ("num_samples_loss", False, None), ("positive_rate_error", False, None), ("rmse", True, 1),
     ("mean rank", True, 1), ("hits@1", True, 2), ("places_error", True, 1), ("num_places", False, None)],
)  # fmt: skip
def test_which_way_a_metric_is_better(metric, judged, best):
    assert is_judged(metric) is judged
    if best is not None:
        assert get_direction(metric) == {1: LOWER, 2: HIGHER}[best]


def test_a_page_takes_no_device_away_and_follows_links(tmp_path):
    os.mkfifo(tmp_path / "pipe")  # as /dev/null: a rename would put the page in its place
    with pytest.raises(StorageError, match="got a pipe"):
        write_page("one", tmp_path / "pipe")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    (tmp_path / "link.html").symlink_to("page.html")
    write_page("one", tmp_path / "link.html")
    assert (tmp_path / "page.html").read_text() == "one" and (tmp_path / "link.html").is_symlink()


JUNK = [None, "x", -1, 1e300, [], {}, [1], {"a": 1}, True, {"a": {"b": 2}}, [[]], 10**30]


def altered(value, random):
    """The same with some values replaced and some left out."""
    if random.random() < 0.05:
        return random.choice(JUNK)
    if isinstance(value, dict):
        return {k: altered(v, random) for k, v in value.items() if random.random() > 0.02}
    return [altered(v, random) for v in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "plan.json", "summary.json", "machine.json", "config.yaml"]
)
def test_files_that_training_never_wrote_still_make_a_page(name, tmp_path):
    random = Random(name)
    folder = write_run(tmp_path / "run", steps=60, tables=3, evaluations=2)
    path = folder / name
    whole = path.read_text()
    for _ in range(40):
        if name.endswith(".jsonl"):
            lines = [json.loads(line) for line in whole.splitlines()]
            path.write_text("".join(json.dumps(altered(line, random)) + "\n" for line in lines))
        else:  # YAML reads JSON
            path.write_text(json.dumps(altered(yaml.safe_load(whole), random)))
        run = read_run_folder(folder)
        assert figures_in(render_run_page(run)) is not None and render_comparison_page([run, run])


def test_the_last_batch_of_an_epoch_does_not_count_as_a_typical_one(tmp_path):
    folder = write_run(tmp_path / "run")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    first = next(line for line in lines if line["kind"] == "traffic")
    small = first | {"lookups": dict.fromkeys(first["lookups"], 7)}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(small) + "\n")
    assert collect_table_figures(read_run_folder(folder))[0].lookups == 4096


def test_tiers_are_left_out_where_files_hold_checkpoints_alone(tmp_path):
    folder = write_run(tmp_path / "run")
    retained = [
        line for line in (folder / "metrics.jsonl").read_text().splitlines() if '"rows"' not in line
    ]
    (folder / "metrics.jsonl").write_text("\n".join(retained) + "\n")
    for ssd, shown in [({"written_bytes": 4096}, False), ({"hits": 3, "reads": 3}, True)]:
        summary = {"tiers": {"dram": {"hits": 9}, "ssd": ssd}}
        (folder / "summary.json").write_text(json.dumps(summary))
        assert ("<h2>Tiers</h2>" in render_run_page(read_run_folder(folder))) == shown


def test_small_tables_are_drawn_in_kib_and_few_losses_as_one_curve(tmp_path):
    run = read_run_folder(write_run(tmp_path / "run", steps=400, every=20))
    sizes = figures.draw_table_size_chart(
        [replace(t, bytes_in_memory=40_960, bytes_in_files=0) for t in collect_table_figures(run)]
    )
    assert sizes["data"][0]["x"][0] == 40 and "KiB" in json.dumps(sizes["layout"])
    assert [trace["name"] for trace in figures.draw_loss_chart(run)["data"]] == ["loss"]
    many = read_run_folder(write_run(tmp_path / "many", steps=4000, every=20))
    assert [trace["name"] for trace in figures.draw_loss_chart(many)["data"]] == [
        "recorded",
        "smoothed",
    ]


def test_the_speed_up_of_a_run_is_on_its_curve(tmp_path):
    """4 ranks that compute for 3 s and wait for 1 s, of which a disk takes half, have 3/4 of 4 ranks' speed, and more:
    one rank would wait, too."""
    folder = write_run(tmp_path / "run")
    phases = {"forward": 1.0, "backward": 2.0, "wait for rows": 0.5, "exchange: rows": 0.5}
    line = {"kind": "phases", "step": 10, **phases, "evaluate": 9.0, "total": 13.0}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    run = read_run_folder(folder)
    curve, own = figures.draw_scaling_chart(run, 4)["data"]
    overhead = 1 / 12
    assert own["x"] == [4] and own["y"] == [pytest.approx((12 + 1) / (3 + 1))]
    assert curve["x"] == [1, 2, 4, 8, 16, 32] and curve["y"][0] == 1 and own["y"][0] in curve["y"]
    assert max(curve["y"]) < 1 + 1 / overhead
    assert figures.draw_scaling_chart(run, 1) is None
    line |= {"wait for rows": 0.0, "exchange: rows": 0.0}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert figures.draw_scaling_chart(read_run_folder(folder), 4) is None
