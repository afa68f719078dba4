"""`bench towers-quality` must compare like with like, and pair what it compares."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))  # benches are scripts, not part of the package

import towers_quality as quality  # noqa: E402
from towers_quality import GROUPS, NAMES, STREAM, System  # noqa: E402

from colonnade.data import open_source  # noqa: E402


def test_planted_towers_are_whole_groups() -> None:
    assert tuple(name for group in GROUPS for name in group) == NAMES
    for towers in (2, 4, 8):
        planted = quality.partition("planted", towers)
        assert len(planted.towers) == towers and planted.features == NAMES
        assert all(len({planted.tower_of(name) for name in group}) == 1 for group in GROUPS)
        striped = quality.partition("striped", towers)
        assert any(len({striped.tower_of(name) for name in group}) > 1 for group in GROUPS)
    assert quality.partition("random", 2, 0) != quality.partition("random", 2, 1)


def test_systems_differ_by_their_towers_alone() -> None:
    splits = open_source("synthetic", num_train=10, num_test=0, **STREAM)
    flat, same, half = (
        quality.build(system, splits, 8, 3)
        for system in (System("dlrm"), System("dlrm", 2, 1, "planted"), System("dlrm", 2, 2, "planted"))
    )  # fmt: skip
    assert torch.equal(flat.bottom[0].weight, same.bottom[0].weight)
    assert torch.equal(flat.top[0].weight, same.top[0].weight)
    ids = torch.arange(20)
    assert torch.equal(flat.embeddings.rows("C5", ids), half.embeddings.rows("C5", ids))
    assert half.dim == 4 and half.embeddings.declaration.consumers["tower0"].interaction.ratio == 2
    assert same.embeddings.declaration.consumers["tower1"].interaction.ratio == 1


def test_losses_are_paired_by_seed() -> None:
    found = {
        "dlrm / flat": {"0": 0.8, "1": 0.7, "2": 0.75},
        "dlrm / 2 planted towers CR 2": {"0": 0.799, "1": 0.697},
        "dcnv2 / 2 planted towers CR 2": {"0": 0.1},
    }
    losses = quality.losses_of(found)
    assert list(losses) == ["dlrm / 2 planted towers CR 2"]
    assert losses["dlrm / 2 planted towers CR 2"] == pytest.approx([0.001, 0.003])
    mean, half = quality.interval([0.001, 0.003])
    assert mean == pytest.approx(0.002) and half == pytest.approx(12.71 * 0.001, rel=1e-6)
    assert quality.ratios_of(found)["worst_loss_with_interval_at_cr_2"] == pytest.approx(
        0.01471, rel=1e-3
    )


def test_a_run_goes_on_with_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    def fake(system: System, splits: object, *, seed: int, **_: object) -> float:
        asked.append((system.name, seed))
        return 0.7 + 0.01 * seed - 0.001 * system.towers

    monkeypatch.setattr(quality, "auc", fake)
    file = tmp_path / "quality.json"
    given = [
        *("--json", str(file), "--samples", "100", "--test-samples", "50", "--models", "dlrm"),
        *("--towers", "2", "--ratios", "2", "--partitions", "planted", "random"),
    ]
    quality.main([*given, "--seeds", "1"])
    assert asked == [("flat", 0), ("2 planted towers CR 2", 0), ("2 random towers CR 2", 0)]
    quality.main([*given, "--seeds", "2"])
    assert [seed for _, seed in asked] == [0, 0, 0, 1, 1, 1]
    kept = json.loads(file.read_text())
    assert kept["together"]["2 planted towers"] == {"0": 1.0, "1": 1.0}
    assert set(kept["together"]["2 random towers"]) == {"0", "1"}
    assert kept["ratios"]["loss dlrm / 2 planted towers CR 2"] == pytest.approx(0.002)
    assert [len(case["values"]) for case in kept["cases"]] == [2, 2, 2]
    with pytest.raises(SystemExit):
        quality.main([*given, "--dim", "32"])


@pytest.fixture
def no_flat_run():
    quality.flat_run.cache_clear()
    yield
    quality.flat_run.cache_clear()


def test_learned_towers_are_those_of_the_partitioner(
    monkeypatch: pytest.MonkeyPatch, no_flat_run: None
) -> None:
    monkeypatch.setattr(quality, "LEARNED", 3 * quality.LEARNED_BATCH)
    affinity, loads = quality.flat_run(0)
    alike = affinity.matrix()
    assert alike.shape == (26, 26) and tuple(each.name for each in loads) == NAMES
    assert quality.flat_run(0)[0] is affinity  # one run of a seed for all its systems
    learned = quality.partition("learned", 4)
    assert sorted(learned.features) == sorted(NAMES) and learned == quality.partition("learned", 4)
    # Fields that are alike stand together.
    planted = quality.partition("planted", 2)
    group = np.array([planted.tower_of(name) for name in NAMES])
    monkeypatch.setattr(affinity, "matrix", lambda: np.where(group[:, None] == group, 0.8, 0.1))
    assert quality.partition("learned", 2) == planted
    kept = [quality.kept_pairs(quality.partition(kind, 4)) for kind in ("planted", "striped")]
    assert kept == [1, 0]


@pytest.mark.slow
def test_planted_groups_are_learned(monkeypatch: pytest.MonkeyPatch, no_flat_run: None) -> None:
    kept = {kind: quality.kept_pairs(quality.partition(kind, 4)) for kind in ("learned", "random")}
    assert kept["learned"] > 0.5 > kept["random"]
