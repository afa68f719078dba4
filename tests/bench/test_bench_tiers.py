"""`bench tiers`: the stream is what it says, the simulator does what naive policies do, ratios mean what they say."""

import ctypes
import math
import shutil
import sys
import threading
import time
from collections import Counter
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))  # benches are scripts, not part of the package

from harness import Measured  # noqa: E402
from tables import tier_programs, tiers  # noqa: E402
from workers import tiers_store  # noqa: E402
from workers.memory_group import NoMemoryGroup, open_group  # noqa: E402
from workers.tier_delay import count_lines, delay_moves  # noqa: E402
from workers.tier_stream import Law, Shape, Stream, probabilities, scaled, write_stream  # noqa: E402
from workers.tiers_loop import Case, Gate  # noqa: E402
from workers.tiers_peer import PeerTraining, look_up, update  # noqa: E402
from workers.tiers_shards import ShardedTraining, Shards, apply_newer, shard_of  # noqa: E402
from workers.tiers_store import Commits, store_counts  # noqa: E402

from colonnade import (  # noqa: E402
    Batch,
    EmbeddingCollection,
    Feature,
    Ids,
    PlanConfig,
    RowOptimizer,
    RowWiseAdagrad,
    Table,
    build_plan,
)  # fmt: skip
from colonnade.cache.next_use import encode_distance  # noqa: E402
from colonnade.store.dram import MappedTier, open_dram_store  # noqa: E402

SMALL = Shape((50, 400, 3, 90), 1.1, batch_size=16, num_batches=60, history=800.0)
HORIZON = 1 << 17


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> Stream:
    return write_stream(tmp_path_factory.mktemp("stream"), SMALL)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> tier_programs.Programs:
    if sys.platform != "linux":
        pytest.skip("tier_device.cc asks for io_uring, a thing of Linux")
    if not shutil.which("c++"):
        pytest.skip("no C++ compiler")
    return tier_programs.build(tmp_path_factory.mktemp("programs"))


# ---- the stream


def test_a_stream_is_a_function_of_its_shape(stream: Stream, tmp_path: Path) -> None:
    again = write_stream(tmp_path / "again", SMALL)
    assert np.array_equal(stream.rows(), again.rows())
    for name in ("rate", "count", "age", "after"):
        assert np.array_equal(stream.state(name), again.state(name)), name
    assert Stream(stream.folder).shape == SMALL


def test_ids_stay_in_their_field_and_are_scattered(stream: Stream) -> None:
    starts = SMALL.starts
    for f in range(len(SMALL.cardinalities)):
        part = stream.rows()[:, f]
        assert part.min() >= starts[f] and part.max() < starts[f + 1]
        rate = np.array(stream.state("rate")[starts[f] : starts[f + 1]])
        assert rate.sum() == pytest.approx(1, rel=1e-5)
        assert sorted(rate, reverse=True) == pytest.approx(
            probabilities(SMALL.cardinalities[f], SMALL.skew), rel=1e-5
        )
    field = stream.state("rate")[starts[1] : starts[2]]
    assert not np.all(np.diff(field) <= 0)


@pytest.mark.parametrize("skew", [0.95, 1.1])
def test_draws_follow_the_law_also_beyond_its_head(skew: float) -> None:
    n, draws = 100_000, 400_000
    ranks = Law(n, skew).draw(np.random.default_rng(1), draws)
    wanted = probabilities(n, skew)
    for first, last in ((0, 1), (1, 10), (10, 1000), (3000, 4096), (4096, 4200), (4200, n)):
        mass = wanted[first:last].sum()
        result = np.mean((ranks >= first) & (ranks < last))
        assert result == pytest.approx(mass, abs=5 * math.sqrt(mass / draws)), (first, last)
    assert ranks.min() == 0 and ranks.max() < n


def test_state_is_what_endless_training_leaves(tmp_path: Path) -> None:
    shape = Shape((20_000,), 1.1, batch_size=64, num_batches=1, history=50_000.0)
    made = write_stream(tmp_path, shape)
    rate, counts, age, after = (
        np.array(made.state(name), np.float64) for name in ("rate", "count", "age", "after")
    )
    assert counts.sum() == pytest.approx(shape.history, rel=0.03)
    # Waits between draws at `rate` per sample are exponential, both ways, whatever was counted.
    for waits in (age, after):
        assert np.mean(waits * 64 * rate) == pytest.approx(1, rel=0.05)
    assert np.all(age[counts > 0] * 64 <= shape.history * 1.0001)
    assert np.all(age[counts == 0] * 64 >= shape.history * 0.9999)


def test_a_smaller_model_keeps_small_fields() -> None:
    assert scaled((5, 9_000, 40_000, 10_000_000), 0.01) == (5, 9_000, 10_000, 100_000)


# ---- the simulator


def naive_misses(stream: Stream, policy: str, capacity: int, lookahead: int) -> list[int]:
    """Row misses by batch, with a search over all unpinned rows for each victim."""
    shape = stream.shape
    counts, age, after = (stream.state(name) for name in ("count", "age", "after"))
    batches = [list(dict.fromkeys(b.reshape(-1).tolist())) for b in np.array(stream.rows())]
    uses: dict[int, list[int]] = {row: [] for row in range(shape.num_rows)}
    for number, batch in enumerate(batches):
        for row in batch:
            uses[row].append(number)

    def next_use(row: int, past: int) -> int:
        later = [b for b in uses[row] if b > past]
        end = len(batches) + min(float(after[row]), HORIZON)
        return later[0] if later else int(end)

    half_life = shape.history / shape.batch_size
    heat = {r: math.log2(counts[r]) if counts[r] > 0 else -100.0 for r in range(shape.num_rows)}

    def key(row: int, past: int) -> int:
        if policy == "lru":
            return 0
        if policy == "belady":
            return -next_use(row, past)
        return min(max(0, math.floor(np.float32((np.float32(heat[row]) + 1) * 16))), 639)

    def worth(row: int) -> tuple[float, float, int]:
        first = uses[row][0] if uses[row] else np.float32(len(batches)) + after[row]
        by = {"lru": -age[row], "belady": -(age[row] + np.float32(first))}.get(policy, counts[row])
        return -float(by), float(age[row]), row

    by_score = sorted(range(shape.num_rows), key=worth)[:capacity]
    if policy == "static":
        retained = set(by_score)
        return [sum(row not in retained for row in batch) for batch in batches]
    turn = count()
    free = {
        row: (key(row, -1), next(turn)) for row in sorted(by_score, key=lambda r: (-age[r], -r))
    }
    pins: Counter[int] = Counter()
    now_key: dict[int, int] = {}
    misses, released = [], 0

    def release(number: int) -> None:
        for row in batches[number]:
            pins[row] -= 1
            if not pins[row]:
                free[row] = (now_key[row], next(turn))

    for number, batch in enumerate(batches):
        missed = 0
        for row in batch:
            if not pins[row] and row not in free:
                missed += 1
                if len(free) + sum(p > 0 for p in pins.values()) >= capacity:
                    while not free:
                        release(released)
                        released += 1
                    del free[min(free, key=free.__getitem__)]
            free.pop(row, None)
            pins[row] += 1
            if policy == "lfu":
                high, low = (f(heat[row], number / half_life) for f in (max, min))
                heat[row] = float(np.float32(high + math.log2(1 + 2 ** (low - high))))
            now_key[row] = key(row, number)
        misses.append(missed)
        while released + lookahead <= number:
            release(released)
            released += 1
    return misses


@pytest.mark.parametrize(
    ("policy", "capacity", "lookahead"),
    [
        ("lru", 120, 0), ("lru", 200, 3), ("lfu", 120, 0), ("lfu", 200, 3), ("belady", 120, 0),
        ("belady", 200, 2), ("static", 120, 0), ("lfu", 90, 40),
    ],
)  # fmt: skip
def test_simulated_policies_are_the_naive_ones(
    stream: Stream,
    programs: tier_programs.Programs,
    tmp_path: Path,
    policy: str,
    capacity: int,
    lookahead: int,
) -> None:
    """The last case's window does not fit: it gets shorter."""
    out = tmp_path / "out"
    run = f"{policy}:{capacity}:{lookahead}"
    tier_programs.run([str(programs.policies), str(stream.folder), str(out), run])
    result = tier_programs.read_misses(out)[run]
    assert result == naive_misses(stream, policy, capacity, lookahead)
    assert sum(result) > 100


def test_belady_is_best_and_knowledge_helps(
    stream: Stream, programs: tier_programs.Programs, tmp_path: Path
) -> None:
    misses = tier_programs.simulate(programs, stream, (4,), 2, tmp_path)
    total = {policy: sum(by_batch) for (policy, _), by_batch in misses.items()}
    assert total["belady"] < min(v for k, v in total.items() if k != "belady")
    assert total["lfu"] < total["lru"]


def test_hints_are_distances_on_a_logarithmic_scale(
    stream: Stream, programs: tier_programs.Programs
) -> None:
    tier_programs.write_hints(programs, stream)
    rows, hints = np.array(stream.rows()), stream.hints()
    after = stream.state("after")
    for number in range(0, SMALL.num_batches, 7):
        for place in np.ndindex(rows.shape[1:]):
            row = rows[(number, *place)]
            later = np.flatnonzero((rows[number + 1 :] == row).any(axis=(1, 2)))
            distance = (
                later[0] + 1 if len(later) else int(SMALL.num_batches + float(after[row])) - number
            )
            [code] = encode_distance(np.array([max(1, distance)]))
            assert hints[(number, *place)] == code


def test_a_program_that_fails_says_why(programs: tier_programs.Programs, tmp_path: Path) -> None:
    with pytest.raises(tier_programs.BenchError, match=r"tier_policies.*shape\.txt"):
        tier_programs.run([str(programs.policies), str(tmp_path), "out", "lru:5:0"])
    with pytest.raises(tier_programs.BenchError, match="tier_device"):
        tier_programs.run([str(programs.device), "0.1", "8", str(tmp_path / "none")])


def test_a_delay_lasts_as_long_as_asked(programs: tier_programs.Programs) -> None:
    spin = ctypes.CDLL(str(programs.delay)).spin
    spin.argtypes = [ctypes.c_int64]
    start = time.perf_counter()
    spin(20_000_000)
    assert time.perf_counter() - start >= 0.02


def test_lines_of_a_row() -> None:
    for dim, lines in ((16, 2), (64, 5), (17, 3)):
        assert count_lines(Table("C", dim, rows=9, optimizer=RowWiseAdagrad(lr=0.02))) == lines


def test_moves_are_delayed_by_their_lines(
    programs: tier_programs.Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = [Table("C", 16, rows=400, optimizer=RowWiseAdagrad(lr=0.02))]
    logs = tiers_store.open_backings(tmp_path, tables, None)
    store = open_dram_store(
        tables, [60], seed=1, backings=logs, mapped=MappedTier(tmp_path, cache_rows=[200])
    )
    delays: list[int] = []

    class Library:
        def __init__(self, path: str) -> None:
            assert path == str(programs.delay)
            self.spin = Spin()

    class Spin:
        def __call__(self, nanoseconds: int) -> None:
            delays.append(nanoseconds)

    monkeypatch.setattr("workers.tier_delay.ctypes.CDLL", Library)
    delay_moves(store, programs.delay, 300)
    for first in (0, 60, 0):
        ids, offsets = torch.arange(first, first + 60), torch.tensor([0, 60])
        slots, job = store.acquire(ids, offsets)
        store.wait(job)
        for slot in slots.tolist():  # trained rows, which move down when others come
            record = torch.zeros(1, tables[0].record_bytes, dtype=torch.uint8)
            record[0, -8] = 1
            store.native.unpack(0, torch.tensor([slot], dtype=torch.int32), record)
        store.release(slots, offsets, dirty=True)
    assert delays == [0, 60 * 2 * 300, 2 * 60 * 2 * 300]  # none; down; down and up
    for log in logs:
        log.close()


# ---- the loop


def test_a_gate_lets_through_what_blocks_allow() -> None:
    gate, drawn = Gate(20, ahead=2), []
    thread = threading.Thread(target=lambda: drawn.extend(gate), daemon=True)
    gate.allow(3)
    thread.start()
    gate.settle()
    time.sleep(0.02)
    assert gate.drawn == 5
    gate.allow(15)
    thread.join(timeout=5)
    assert drawn == list(range(20))


def test_peers_train_as_a_dense_table_would() -> None:
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(30, 5, generator=generator)
    table[:, 4] = 0.1
    lookups = torch.randint(30, (64,), generator=generator)
    gradient = torch.randn(64, 4, generator=generator)
    rows, inverse = torch.unique(lookups, return_inverse=True)
    records = table[rows]
    assert torch.equal(look_up(records, inverse), table[lookups, :4])
    update(records, inverse, gradient, lr=0.5)
    for i, row in enumerate(rows.tolist()):
        summed = gradient[lookups == row].sum(0)
        state = table[row, 4] + summed.square().mean()
        torch.testing.assert_close(records[i, 4], state)
        torch.testing.assert_close(records[i, :4], table[row, :4] - 0.5 * summed / state.sqrt())


class SharedStore:
    """Dense table in shared memory, as a store of rows."""

    def __init__(self, table: np.ndarray) -> None:
        self.table = table

    def get(self, rows: np.ndarray) -> np.ndarray:
        return self.table[rows]

    def put(self, rows: np.ndarray, records: np.ndarray) -> None:
        self.table[rows] = records

    def counts(self) -> dict[str, float]:
        return {}


@pytest.mark.skipif(sys.platform != "linux", reason="shards are forked, and counted in /proc")
def test_shards_that_read_ahead_train_as_one_store_does(stream: Stream) -> None:
    case = Case(
        str(stream.folder), "", dim=4, dram_bytes=None, lookahead=0, hints=False, starts_empty=False,
        bottom=[], top=[], embedding_lr=0.5, num_threads=1,
    )  # fmt: skip
    start = np.random.default_rng(0).random((SMALL.num_rows, 5), np.float32)
    plain = SharedStore(start.copy())
    shared = np.memmap(stream.folder / "table.f32", np.float32, "w+", shape=start.shape)
    shared[:] = start
    shards = Shards(3, SMALL.lookups, 5)
    shards.open(lambda number: SharedStore(shared))
    systems = PeerTraining(case, plain), ShardedTraining(case, shards)
    for steps in (1, 7, 2):
        for system in systems:
            system.gate.allow(steps)
            for _ in range(steps):
                system.step(False)
            system.settle()
    assert not np.array_equal(shared, start)
    np.testing.assert_allclose(shared, plain.table, rtol=1e-6)
    assert systems[1].counts()["cpu_seconds"] > 0
    shards.close()
    assert [process.exitcode for process in shards.processes] == [0, 0, 0]


def test_rows_go_to_all_shards_alike() -> None:
    shards = np.bincount(shard_of(np.arange(100_000), 8), minlength=8)
    assert shards.min() > 0.95 * shards.max()


def test_records_that_were_updated_meanwhile_are_replaced() -> None:
    records = np.zeros((4, 1), np.float32)
    newer = np.array([[9.0], [3.0], [7.0]], np.float32)
    apply_newer(np.array([2, 3, 5, 7]), records, np.array([9, 3, 7]), newer)
    assert records[:, 0].tolist() == [0, 3, 0, 7]


def test_a_memory_group_limits_or_says_why() -> None:
    try:
        group = open_group("test", 64 << 20)
    except NoMemoryGroup as reason:
        pytest.skip(str(reason))
    try:
        import subprocess

        code = "import sys; sys.stdin.readline(); print(len(bytearray(200 << 20)))"
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        group.add(process.pid)
        process.communicate(b"\n", timeout=60)
        assert process.returncode == -9
    finally:
        group.close()
    assert not group.folder.exists()


# ---- ratios


def test_ratios_are_of_the_cases_they_name() -> None:
    def rate(case: str, system: str, value: float) -> Measured:
        return Measured(case, system, "samples/s", [value])

    case = "D=16 skew 1.1"
    sparse = case + tiers.SPARSE
    measured = [
        rate(case, tiers.ALL, 100_000), rate(case, "colonnade 1/8", 92_000),
        rate(case, "colonnade 1/16", 80_000), rate(sparse, tiers.ALL, 1e6),
        rate(sparse, "colonnade 1/8", 200_000), rate(sparse, "rocksdict 1/8", 20_000),
        rate(sparse, "mapped 1/8", 50_000), rate(case + tiers.BESIDE, "colonnade 1/8", 180_000),
        Measured(sparse, "colonnade 1/8", "reads/sample", [0.4]),
        Measured(sparse, "colonnade 1/8", "rows read/sample", [0.35]),
        Measured(sparse, "colonnade hints 1/8", "rows read/sample", [0.25]),
        *(
            Measured(case, f"{policy} 1/8", "rows missed/sample", [value])
            for policy, value in {"lru": 0.42, "lfu": 0.34, "static": 0.343, "lookahead": 0.338,
                                  "oracle": 0.298, "belady": 0.22}.items()
        ),
    ]  # fmt: skip
    result = tiers.OtherFigures(raw=[tier_programs.Reads(88_000, 0.2)])
    result.reader.append(tier_programs.Reads(80_000, 0.32))
    result.add_commits(case, {tiers.PLAIN: [1.0, 2.0, 1.0], tiers.COMMITS: [1.02, 2.2, 1.03]})
    ratios = tiers.ratios_of(measured, result, 2, 1.1)
    assert ratios["throughput_of_all_dram_at_1_8"] == pytest.approx(0.92)
    assert ratios["throughput_of_all_dram_at_1_16_d16_skew_1_1"] == pytest.approx(0.8)
    # Device: 88,000 / 0.4 = 220,000; processor: 1 us + 0.4 * 4 us / 2 cores = 1.8 us: 556,000.
    assert ratios["of_bound"] == pytest.approx(200 / 220)
    assert ratios["of_best_online_policy"] == pytest.approx(0.338 / 0.35)
    assert ratios["gap_to_belady_closed"] == pytest.approx(0.17 / 0.2)
    assert ratios["vs_rocksdb"] == pytest.approx(9) and ratios["vs_mmap"] == pytest.approx(3.6)
    assert ratios["ssd_reads_of_raw_iops"] == pytest.approx(80 / 88)
    assert ratios["ssd_reads_cores"] == pytest.approx(0.32)
    assert ratios["commit_slowdown"] == pytest.approx(1.03)


def test_what_ratios_need_is_found_in_a_files_rows() -> None:
    case = "D=16 skew 1.1"
    reads = [tier_programs.Reads(80_000, 0.3), tier_programs.Reads(90_000, 0.4)]
    device = [tier_programs.Reads(100_000, 0.2)] * 2
    counts = [{"device_reads": r.per_second, "cpu_seconds": r.cores} for r in reads]
    measured = tiers.reader_cases_of(case, device, [1.0, 1.0], counts)
    measured += [
        Measured(case + tiers.PLAIN, "colonnade 1/8", "samples/s", [100.0, 50.0]),
        Measured(case + tiers.COMMITS, "colonnade 1/8", "samples/s", [80.0, 40.0]),
        Measured(case + tiers.WRITES, "colonnade", "of_bytes", [1.5]),
    ]
    result = tiers.OtherFigures.of_measured(measured, {case: 1000})
    assert result.reader == reads and result.raw == device
    assert result.commit_slowdowns == pytest.approx([1.25])
    assert result.writes == [{"of_bytes": 1.5}] and result.model_bytes == {case: 1000}


def test_reads_writes_and_commits_of_our_store_are_counted(tmp_path: Path) -> None:
    collection = EmbeddingCollection([Table("item", 8, rows=4000)], [Feature("item", "item")])
    config = PlanConfig(memory={"dram": 60_000})
    collection.open(build_plan(collection.tables, config=config), folder=tmp_path)
    rows, commits = RowOptimizer(collection), Commits(collection)
    for first in (0, 800, 1600, 2400, 3200, 0):
        batch = Batch(800, torch.zeros(800, 0), {"item": Ids(torch.arange(first, first + 800))})
        collection(batch)["item"].sum().backward()
        rows.step()
        commits.begin()
    commits.wait()
    counts = store_counts(collection)
    assert counts["rows_born"] == 4000 and counts["rows_read"] > 0
    assert counts["device_reads"] > 0 and counts["bytes_written"] > 0
