"""Pages in headless Chromium: charts drawn, nothing cut off, nothing said on the console, few sheets."""

from __future__ import annotations

import pytest
from browser import CHROMIUM, look, on_paper
from run_records import write_run

from colonnade.report.page import write_page
from colonnade.report.pages import render_comparison_page, render_run_page
from colonnade.report.reading import read_run_folder

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on this machine to look at pages with"
)


@pytest.mark.parametrize("width", [390, pytest.param(1280, marks=pytest.mark.slow)])
def test_a_report_is_drawn_and_fits(width, tmp_path):
    write_page(render_run_page(read_run_folder(write_run(tmp_path / "run"))), tmp_path / "run.html")
    output = look(tmp_path / "run.html", width, tmp_path)
    assert output["console"] == []
    assert output["width"] == width and output["scroll"] <= width  # no sideways scrolling
    titles = [chart["title"] for chart in output["charts"]]
    assert titles == [
        "Training loss", "AUC", "Log loss", "Learning rates", "Throughput", "Phases of a step",
        "Phases of a step over time", "Speed-up by ranks", "Row sources", "Bytes sent", "Hit rates", "Reads from below",
        "Bytes to and from below", "Time spent waiting for rows", "Write amplification", "Lifetime bytes written",
        "Table sizes", "Table traffic",
    ]  # fmt: skip
    for chart in output["charts"]:
        assert chart["svgs"] >= 1 and chart["shapes"] >= 1, chart
        assert chart["width"] <= chart["room"] + 1, chart
    for heading in ("run" + "finished", "Quality", "Speed", "Rows", "Tiers", "Tables", "Settings"):
        assert heading in output["titles"]


@pytest.mark.slow
def test_odd_runs_are_drawn_too(tmp_path):
    odd = ({"steps": 20, "evaluations": 0, "finished": False}, {"tables": 1000, "nan_from": 0})
    for number, settings in enumerate(odd):
        page = tmp_path / f"{number}.html"
        write_page(
            render_run_page(read_run_folder(write_run(tmp_path / f"run{number}", **settings))), page
        )
        output = look(page, 390, tmp_path)
        assert output["console"] == [] and output["scroll"] <= 390
        assert all(chart["svgs"] for chart in output["charts"]) and output["charts"]


@pytest.mark.slow
def test_a_comparison_is_drawn_and_fits(tmp_path):
    runs = [
        read_run_folder(write_run(tmp_path / f"run{i}", lr=i / 10, name="a" * 30 * i))
        for i in range(1, 7)
    ]
    write_page(render_comparison_page(runs), tmp_path / "page.html")
    output = look(tmp_path / "page.html", 390, tmp_path)
    assert output["console"] == [] and output["scroll"] <= 390
    assert len(output["charts"]) >= 4 and all(chart["shapes"] for chart in output["charts"])


@pytest.mark.slow
def test_on_paper_nothing_is_cut(tmp_path):
    write_page(render_run_page(read_run_folder(write_run(tmp_path / "run"))), tmp_path / "run.html")
    sheets, charts = on_paper(tmp_path / "run.html", tmp_path)
    assert 3 <= sheets <= 8
    assert len(charts) == 17 and all(200 < drawing <= card for drawing, card in charts)
    assert max(card for _, card in charts) <= 700  # A4 without its margins
