"""Bench exchange: ratios mean what they say, ids follow the law they claim, and a broken system stops no other."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))  # benches are scripts, not part of the package

import exchange  # noqa: E402
from cluster import race  # noqa: E402
from harness import BenchError, Measured, PieceFile  # noqa: E402
from tables import exchange as tables  # noqa: E402
from workers.exchange_loop import Case  # noqa: E402


def block(ms: list[float], **more) -> list[dict]:
    """Build a block with one rank per time."""
    rank = {"payload_bytes": {}, "phases": {}, "cpu_seconds": 0.01, "rss_bytes": 5e8, "digest": 1.0}
    return [
        {**rank, "seconds": [m / 1e3], "sent_bytes": 2e6 * (r % 2 == 0), **more}
        for r, m in enumerate(ms)
    ]


def test_a_step_is_as_long_as_its_slowest_rank_and_bytes_are_a_hosts():
    blocks = [block([10, 12, 11, 9]), block([10, 20, 11, 9])]
    rows = {
        m.case: m.values for m in tables.cases_of("2x2 X 1 Gbit/s", "rows", blocks, 2, 0.010, None)
    }
    assert rows["2x2 X 1 Gbit/s"] == pytest.approx([12, 20])
    assert rows["2x2 X 1 Gbit/s uplink"] == pytest.approx(
        [2, 2]
    )  # four ranks, two hosts of 2 MB each
    assert rows["2x2 X 1 Gbit/s processor"] == pytest.approx([40, 40])
    assert rows["2x2 X 1 Gbit/s exposed"] == pytest.approx([16 - 10])
    rows = tables.cases_of("c", tables.AUTO, blocks, 2, None, None)
    assert not [m for m in rows if m.case.endswith(tables.EXPOSED)], (
        "another plan has no time without links"
    )


def test_payload_and_what_was_foretold_of_it_are_both_of_a_host():
    blocks = [block([10, 10, 10, 10], payload_bytes={"fetch remote": 3e6, "push local": 1e6})]
    foretold = {"payload_bytes": {"fetch remote": 3.3e6, "push local": 1.1e6}, "seconds": 0.011}
    rows = tables.cases_of("2x2 X 1 Gbit/s", "rows", blocks, 2, 0.01, foretold)
    results = {m.case: m.median for m in rows}
    assert results["2x2 X 1 Gbit/s payload"] == pytest.approx(8)
    assert results["2x2 X 1 Gbit/s predicted payload"] == pytest.approx(8.8)
    ratios = tables.ratios_of(rows)
    assert ratios["predicted_bytes_error"] == pytest.approx(0.1)
    assert ratios["predicted_time_error"] == pytest.approx(0.1)
    assert "predicted_time_error_of_the_chosen" not in ratios
    ratios = tables.ratios_of(tables.cases_of("2x2 X", tables.AUTO, blocks, 2, 0.01, foretold))
    assert ratios["predicted_time_error_of_the_chosen"] == pytest.approx(0.1)
    assert "best_vs_torchrec_best" not in ratios, "no peer"


def test_memory_that_grows_in_a_session_is_that_of_the_rank_that_grows_most():
    before, after = block([10, 10]), block([10, 10])
    after[1] = {**after[1], "rss_bytes": 5e8 + 7e6}
    one = tables.session_of("2x2 X", tables.AUTO, before, after)
    assert one.median == pytest.approx(7) and tables.has_session([one])
    assert not tables.names_of([one]), "no speed"


def measured(case: str, **ms: float) -> list[Measured]:
    names = {n: n.replace("_", " ") for n in ms}
    steps = [Measured(case, names[n], "ms/step", [value]) for n, value in ms.items()]
    return steps + [Measured(case + tables.UPLINK, n, "MB/step", [1.0]) for n in names.values()]


def test_ratios_are_of_the_worst_case():
    result = measured("2x2 a", rows=10, pooled=20, auto=11, torchrec_x=30, torchrec_y=25)
    result += measured("2x2 b", rows=40, pooled=20, auto=20, torchrec_x=36, torchrec_y=90)
    result += measured("1x1 a", rows=50, torchrec_x=5)  # one rank exchanges nothing
    ratios = tables.ratios_of(result)
    assert ratios["best_vs_torchrec_best"] == pytest.approx(1.8)
    assert ratios["best_vs_torchrec_best 2x2 a"] == pytest.approx(2.5)
    assert ratios["choice_within_of_best"] == pytest.approx(1.1)


def test_a_lossy_codec_is_in_no_ratio():
    result = measured("2x2 a", rows=10, rows_int8_lossy=1, auto=10, torchrec_x=30)
    ratios = tables.ratios_of(result)
    assert ratios["best_vs_torchrec_best"] == pytest.approx(3)
    assert ratios["choice_within_of_best"] == pytest.approx(1)


def test_the_tables_print_without_peers_or_predictions():
    console = Console(file=io.StringIO(), width=200)
    actual = measured("1x1 a", rows=10) + measured("2x2 a", rows=20)
    tables.print_case(console, actual, "2x2 a")
    machine = {
        "cpu": "c", "cores": 2, "threads": 1, "others_share": 0.0, "versions": {}, "batch_size": 100,
        "left_out": ["x: y"],
    }  # fmt: skip
    result = {"ratios": tables.ratios_of(actual), "machine": machine, "commit": "c"}
    tables.print_result(console, actual, result)
    output = console.file.getvalue()
    assert "left out: x: y" in output and "1 ranks on 1 hosts: rows 10,000" in output
    assert "4 ranks on 2 hosts: rows 20,000" in output


@pytest.mark.parametrize("workload", exchange.WORKLOADS, ids=lambda w: w.name)
def test_ids_are_those_of_the_workload(workload, tmp_path, monkeypatch):
    monkeypatch.setattr(exchange, "BATCH_SIZE", 64)
    case = exchange.write_case(tmp_path, workload, num_ranks=2, max_cardinality=1000)
    assert Case(**{**case.__dict__}) == case and len(case.names) == len(workload.fields)
    ids = np.load(case.ids)
    assert ids.shape == (race.NUM_BATCHES, 2, len(workload.fields), 64 * workload.lookups)
    for f, rows in enumerate(case.rows):
        of = ids[:, :, f].ravel()
        assert 0 <= of.min() and of.max() < rows <= 1000
        if (
            rows == 1000
        ):  # Zipf 1.1: the most frequent of 1000 has a seventh to a fifth of all lookups
            share = np.bincount(of).max() / of.size
            assert 0.13 < share < 0.23
    assert not np.array_equal(ids[:, 0], ids[:, 1]), "ranks have samples of their own"
    shape = case.gradient().shape
    assert shape[1] == (len(case.rows) * case.dim if case.pooled else case.dim)


class Answering:
    """Stands where a fleet stands."""

    def __init__(self, digests: dict[str, float], dies: str = "") -> None:
        self.digests, self.dies, self.message = digests, dies, {}

    def send(self, message: dict) -> None:
        self.message = message

    def answers(self) -> list[dict]:
        if self.message["system"] == self.dies:
            raise BenchError("killed")
        return block([1.0, 1.0], digest=self.digests[self.message["system"]])


def turns(**digests: float) -> list[race.Turn]:
    fleet = Answering(digests)
    made = [race.Turn(name, fleet) for name in digests]
    for turn in made:
        turn.block(3, keep=True)
    return made


@pytest.mark.parametrize("same", [None, "rows"])
def test_a_choice_that_is_one_of_the_systems_is_measured_as_that_one(same, tmp_path):
    """Blocks of one plan vary: what the same plan took under two names would count as regret."""
    bench = race.Bench.__new__(race.Bench)
    bench.question, bench.extent = exchange.QUESTION, exchange.QUICK
    bench.console, bench.measured, bench.facts = Console(file=io.StringIO()), [], {}
    bench.left_out, bench.broken, requests = [], set(), []

    class Fleet(Answering):
        def answers(self) -> list[dict]:
            if "plan" in self.message:
                facts = {"predicted": {}, "left_out": {}, "links": "", "chosen": "26 x rows"}
                return [facts | ({"same": same} if same else {})]
            requests.append(self.message["system"])
            return block([len(requests)] * 2)

    fleet = Fleet({})
    systems = [race.Turn("rows", fleet), race.Turn("pooled", fleet)]
    hosts = type("Hosts", (), {"shape": lambda *_: None})()
    bench.measure("1x2 a", systems, hosts, 2, (1.0,), lambda: None)
    steps = {m.system: m.values for m in bench.measured if m.case == "1x2 a 1 Gbit/s"}
    assert (race.AUTO in requests) is (same is None)
    assert set(steps) == {"rows", "pooled", race.AUTO}
    assert (steps[race.AUTO] == steps["rows"]) is (same is not None)


def test_systems_that_did_other_work_are_refused():
    race.check_same_work(turns(rows=1.0, torchrec=1.0000001), "case")
    race.check_same_work(turns(rows=1.0, rows_lossy=1.1), "case")
    with pytest.raises(BenchError, match="outputs differ"):
        race.check_same_work(turns(rows=1.0, torchrec=1.01), "case")


def test_a_system_that_dies_is_named():
    turn = race.Turn("pooled", Answering({}, dies="pooled"))
    with pytest.raises(race.Broken) as caught:
        turn.block(1, keep=True)
    assert caught.value.system == "pooled" and "killed" in str(caught.value)


def test_a_broken_system_is_left_out_and_its_case_done_again(tmp_path, monkeypatch):
    bench = race.Bench.__new__(race.Bench)
    bench.folder, bench.extent, bench.only = tmp_path, exchange.QUICK, ""
    bench.console = Console(file=io.StringIO())
    bench.measured, bench.left_out, bench.broken, tried = [], [], set(), []
    bench.file, bench.pieces = PieceFile(None, "exchange"), []

    class NoHosts:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    def measure(name, *_):
        tried.append((name, sorted(bench.broken)))
        bench.measured.append(Measured(f"{name} half done", "rows", "ms/step", [1.0]))
        if "pooled" not in bench.broken:
            raise race.Broken("pooled", f"killed\nlast words in {tmp_path}")

    monkeypatch.setattr(race, "open_hosts", lambda _: NoHosts())
    bench.open_fleets = lambda *_: {}
    bench.open_case = lambda *_: []
    bench.measure = measure
    bench.run(lambda: None)
    first, second = (f"2x2 {w.name}" for w in exchange.QUICK.workloads)
    assert tried == [(first, []), (first, ["pooled"]), (second, ["pooled"])]
    assert [m.case for m in bench.measured] == [f"{first} half done", f"{second} half done"]
    assert bench.pieces == [first, second]
    assert bench.left_out == [f"{first} pooled: killed"]  # a log names folders; the screen has it
    assert "last words in" in bench.console.file.getvalue()
