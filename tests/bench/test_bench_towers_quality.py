"""`bench towers-quality` must compare like with like, and pair what it compares."""

import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))  # benches are scripts, not part of the package

import towers_quality as quality  # noqa: E402
from tables import tower_losses as tables  # noqa: E402
from towers_quality import GROUPS, NAMES, STREAM, System  # noqa: E402
from workers import scored_blocks  # noqa: E402

from colonnade import Mesh  # noqa: E402
from colonnade.data import open_source  # noqa: E402
from colonnade.train.metrics import auc  # noqa: E402


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
    ids = torch.arange(12)
    assert torch.equal(flat.embeddings.rows("C5", ids), half.embeddings.rows("C5", ids))
    assert half.dim == 4 and half.embeddings.declaration.consumers["tower0"].interaction.ratio == 2
    assert same.embeddings.declaration.consumers["tower1"].interaction.ratio == 1


def test_losses_are_paired_by_seed_and_block() -> None:
    runs = {
        "dlrm / flat": {"0": [0.8, 0.9], "1": [0.7, 0.8], "2": [0.75, 0.85]},
        "dlrm / 2 planted towers CR 2": {"1": [0.697, 0.797], "0": [0.799, 0.899]},
        "dcnv2 / 2 planted towers CR 2": {"0": [0.1, 0.2]},
    }
    losses = tables.losses_of(runs)
    assert list(losses) == ["dlrm / 2 planted towers CR 2"]
    assert np.allclose(losses["dlrm / 2 planted towers CR 2"], [[0.001] * 2, [0.003] * 2])
    result = tables.ratios_of(runs)
    assert result["loss dlrm / 2 planted towers CR 2"] == pytest.approx(0.002)
    assert result["loss dlrm / 2 planted towers CR 2 +-"] == pytest.approx(12.71 * 0.001, rel=1e-6)
    cases = [vars(item) for item in tables.measured_of(runs)]
    assert tables.runs_of(cases) == runs


def test_a_loss_is_shown_or_missed_by_its_whole_interval() -> None:
    results = [tables.verdict(*item) for item in ((4e-4, 1e-4), (4e-4, 2e-4), (7e-4, 1e-4))]
    assert results == ["shown", "open", "missed"] and tables.verdict(-1e-3, float("nan")) == "open"


def test_blocks_of_scores_are_those_of_all_samples() -> None:
    """Model scores by the first number alone."""

    class First(torch.nn.Module):
        def forward(self, batch: object) -> torch.Tensor:
            assert not self.training
            return batch.dense[:, :1]

    test = open_source("synthetic", num_train=10, num_test=10_049, **STREAM).test
    model = First()
    result = scored_blocks.block_aucs(model, test, Mesh())
    whole = test.read(0, 10_000)
    wanted = [
        auc(whole.dense[200 * k : 200 * (k + 1), 0], whole.label[200 * k : 200 * (k + 1)])
        for k in range(50)
    ]
    assert result == pytest.approx(wanted, abs=1e-6) and model.training
    assert scored_blocks.block_ceiling(test) > np.mean(result)


def test_a_run_goes_on_with_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    requests: list[tuple[str, int]] = []

    def fake(system: System, splits: object, *, seed: int, **_: object) -> list[float]:
        requests.append((system.name, seed))
        return [0.7 + 0.01 * seed - 0.001 * system.towers] * 2

    monkeypatch.setattr(quality, "trained", fake)
    file = tmp_path / "quality.json"
    options = [
        *("--json", str(file), "--samples", "100", "--test-samples", "5000", "--models", "dlrm"),
        *("--towers", "2", "--ratios", "2", "--partitions", "planted", "random"),
    ]
    quality.main([*options, "--seeds", "1"])
    assert requests == [("flat", 0), ("2 planted towers CR 2", 0), ("2 random towers CR 2", 0)]
    quality.main([*options, "--seeds", "2"])
    assert [seed for _, seed in requests] == [0, 0, 0, 1, 1, 1]
    retained = json.loads(file.read_text())
    assert retained["together"]["2 planted towers"] == {"0": 1.0, "1": 1.0}
    assert set(retained["together"]["2 random towers"]) == {"0", "1"}
    assert retained["ratios"]["loss dlrm / 2 planted towers CR 2"] == pytest.approx(0.002)
    assert [len(case["values"]) for case in retained["cases"]] == [2] * 6
    capsys.readouterr()
    quality.main([*options, "--seeds", "0"])
    assert "+0.00200" in capsys.readouterr().out and len(requests) == 6
    with pytest.raises(SystemExit):
        quality.main([*options, "--dim", "32"])


def test_a_run_that_was_stopped_is_not_kept() -> None:
    """fit returns after a signal, with a model that has seen a part of the samples."""
    splits = open_source("synthetic", num_train=200_000, num_test=1_000, **STREAM)
    read = type(splits.train).read
    requests = []

    def interrupted(source: object, begin: int, end: int) -> object:
        requests.append(begin)
        if len(requests) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return read(source, begin, end)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(splits.train), "read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            quality.trained(System("dlrm"), splits, dim=4, batch_size=1024, seed=0)
    assert len(requests) < 100


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
    assert alike.shape == (26, 26) and tuple(load.name for load in loads) == NAMES
    assert quality.flat_run(0)[0] is affinity  # one run of a seed for all its systems
    learned = quality.partition("learned", 4)
    assert sorted(learned.features) == sorted(NAMES) and learned == quality.partition("learned", 4)
    # Fields that are alike stand together.
    planted = quality.partition("planted", 2)
    group = np.array([planted.tower_of(name) for name in NAMES])
    monkeypatch.setattr(affinity, "matrix", lambda: np.where(group[:, None] == group, 0.8, 0.1))
    assert quality.partition("learned", 2) == planted
    retained = [quality.kept_pairs(quality.partition(kind, 4)) for kind in ("planted", "striped")]
    assert retained == [1, 0]


@pytest.mark.slow
def test_planted_groups_are_learned(monkeypatch: pytest.MonkeyPatch, no_flat_run: None) -> None:
    retained = {
        kind: quality.kept_pairs(quality.partition(kind, 4)) for kind in ("learned", "random")
    }
    assert retained["learned"] > 0.5 > retained["random"]
