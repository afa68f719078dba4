"""Codistillation: without a teacher two runs never met; with one, it is the peer of exactly the right step."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ranks import console_of, run_ranks
from small_run import digest, opened
from torch.nn.functional import binary_cross_entropy_with_logits, embedding, linear

from colonnade import Batch, Mesh, Predictor
from colonnade.config.run import CodistillConfig, RunConfig, build_config, override_settings
from colonnade.data import Splits
from colonnade.errors import CheckpointError, ConfigError, CorruptionError, WorldError
from colonnade.publish import deltas
from colonnade.run.codistill import (
    Codistilled,
    build_group_configs,
    is_running,
    name_group,
    wrap_objective,
)
from colonnade.run.fit import MeanLoss
from colonnade.run.run import TrainingRun, open_run
from colonnade.train.objective import Probability
from colonnade.train.setup import RunSetup

T, BURN_IN, STEPS = 3, 4, 15
CONFIG = {
    "data": {
        "name": "synthetic",
        "options": {"num_train": 1500, "num_test": 200, "cardinalities": [50, 900, 7]},
    },
    "model": {"dim": 4, "bottom": [8], "top": [8]},
    "train": {
        "batch_size": 100, "epochs": 2, "threads": 1, "timeout": 1,
        "codistill": {"groups": 2, "every_steps": T, "burn_in_steps": BURN_IN, "weight": 2.0},
    },
}  # fmt: skip
OPEN_TABLES = {
    "embedding.admission.updates": 2,
    "embedding.admission.expected_ids": 2000,
    "embedding.admission.halve_steps": 9,
    "embedding.eviction.max_rows": 150,
    "embedding.eviction.by": "frequency",
    "embedding.eviction.halve_steps": 7,
}


def open_group(folder: Path, group: int, max_steps: int, mesh: Mesh, **settings) -> TrainingRun:
    """Open a group of CONFIG with other settings, to train it to a step. settings: `__` for dots in names."""
    by_name = {name.replace("__", "."): value for name, value in settings.items()}
    config = override_settings(build_config(CONFIG), by_name)
    config = override_settings(build_group_configs(config)[group], {"train.max_steps": max_steps})
    path = folder / name_group(group)
    return open_run(config, mesh, path, data=opened(config), console=console_of(mesh))


def train_to(folder: Path, group: int, step: int, mesh: Mesh, **settings) -> None:
    run = open_group(folder, group, step, mesh, **settings)
    try:
        run.train()
    finally:
        run.close()


def train_pair(
    folder: Path, stops=tuple(range(T, STEPS + T, T)), mesh: Mesh | None = None, **settings
):
    """Train both groups in turns, from stop to stop, so that no one waits."""
    for step in stops:
        for group in (0, 1):
            train_to(folder, group, step, mesh or Mesh(), **settings)


def digest_groups(folder: Path) -> list[str]:
    return [digest(folder / name_group(group)) for group in (0, 1)]


def train_apart(folder: Path, group: int, step: int, **settings) -> None:
    """Train a group's seed as a run without a peer."""
    config = override_settings(
        build_config(CONFIG), {"train.codistill": {}, "train.max_steps": step}
    )
    by_name = {name.replace("__", "."): value for name, value in settings.items()}
    config = override_settings(config, {**by_name, "train.seed": group})
    run = open_run(config, Mesh(), folder / name_group(group), data=opened(config))
    run.train()
    run.close()


@pytest.mark.parametrize(
    ("step", "settings"),
    [
        (STEPS, {"train__codistill__weight": 0.0}),
        (2 * T, {}),  # the first teacher is for the step after these
        (STEPS, {"train__codistill__burn_in_steps": STEPS}),
        # float32 cannot hold such a weight, so lookups in the teacher alone could make a difference.
        (STEPS, {"train__codistill__weight": 1e-300}),
        (STEPS, {"train__codistill__weight": 1e-300, **OPEN_TABLES}),
    ],
    ids=["weight 0", "no teacher yet", "burn-in", "lookups", "lookups in open tables"],
)
def test_groups_that_learn_nothing_of_each_other_have_the_bits_of_two_runs(
    step, settings, tmp_path
):
    """Rows with optimizer state and clocks, admission and eviction, and dense weights."""
    by_name = {name.replace(".", "__"): value for name, value in settings.items()}
    train_pair(tmp_path / "pair", tuple(range(T, step + 1, T)), **by_name)
    by_name.pop("train__codistill__weight", None)
    by_name.pop("train__codistill__burn_in_steps", None)
    for group in (0, 1):
        train_apart(tmp_path / "apart", group, step, **by_name)
    assert digest_groups(tmp_path / "pair") == digest_groups(tmp_path / "apart")
    assert digest_groups(tmp_path / "pair")[0] != digest_groups(tmp_path / "pair")[1]


def test_the_teacher_is_the_peer_of_exactly_one_interval_before(tmp_path, monkeypatch):
    """Teachers have the bits of what the peer predicted after that update."""
    run = open_group(tmp_path, 0, 1, Mesh())
    batch = next(iter(run.trainer.data.test.batches(50)))
    run.close()
    predicted: dict[tuple[int, int], torch.Tensor] = {}
    taught: dict[tuple[int, int], torch.Tensor | None] = {}
    prepare = Codistilled.prepare_step

    def record(self, trainer):
        random_state = torch.get_rng_state()
        can_go_on = prepare(self, trainer)
        assert torch.equal(torch.get_rng_state(), random_state)
        key = self.config.train.seed, trainer.collection.step
        taught[key] = None if self.teacher is None else self.teacher(batch)
        trainer.model.eval()
        with trainer.rows.synchronized_view(), torch.no_grad():
            predicted[key] = torch.sigmoid(trainer.model(batch).double())
        trainer.model.train()
        return can_go_on

    monkeypatch.setattr(Codistilled, "prepare_step", record)
    train_pair(tmp_path / "pair", (2, 5, 8, 11, 14, 16))
    for (seed, step), teacher in taught.items():
        wanted = T * (step // T - 1)
        if wanted < 1 or step < BURN_IN:
            assert teacher is None, step
        else:
            assert torch.equal(teacher, predicted[1 - seed, wanted]), step
            assert not torch.equal(teacher, predicted[1 - seed, step])
    assert sum(teacher is not None for teacher in taught.values()) == 2 * (STEPS + 1 - 2 * T)


def test_pair_is_that_of_the_definition(tmp_path, monkeypatch):
    """Logistic regression in plain PyTorch, trained on the same batches with a late copy of the other one."""
    batches: dict[int, list[Batch]] = {0: [], 1: []}
    loss = Codistilled.loss

    def record(self, model, batch, mesh):
        batches[self.config.train.seed].append(
            Batch(batch.size, batch.dense, batch.ids, batch.label)
        )
        return loss(self, model, batch, mesh)

    monkeypatch.setattr(Codistilled, "loss", record)
    settings = {
        "model": {"name": "lr"}, "embedding": {"optimizer": "sgd", "lr": 0.5},
        "dense": {"optimizer": "sgd", "lr": 0.1},
    }  # fmt: skip
    train_pair(tmp_path, **settings)
    names = ["C1", "C2", "C3"]

    def compute_logits(weights, batch):
        rows = [embedding(batch.ids[n].values, weights[n]) for n in names]
        return sum(rows) + linear(batch.dense.double(), weights["weight"], weights["bias"])

    shapes = {"C1": (50, 1), "C2": (900, 1), "C3": (7, 1), "weight": (1, 13), "bias": (1,)}
    twins = [{n: torch.zeros(*s, dtype=torch.float64) for n, s in shapes.items()} for _ in (0, 1)]
    history = []
    for step in range(STEPS):
        history.append([{n: w.clone() for n, w in twin.items()} for twin in twins])
        teacher_step = T * (step // T - 1)
        for group, twin in enumerate(twins):
            batch = batches[group][step]
            weights = {n: w.clone().requires_grad_() for n, w in twin.items()}
            logits = compute_logits(weights, batch)
            total = binary_cross_entropy_with_logits(logits, batch.label.double())
            if teacher_step > 0 and step >= 6:  # the burn-in, rounded up
                weight = 2.0 * min(1.0, (step - BURN_IN + 1) / BURN_IN)
                peer = torch.sigmoid(compute_logits(history[teacher_step][1 - group], batch))
                psi = binary_cross_entropy_with_logits(logits, peer)
                total = (total + weight * psi) / (1 + weight)
            total.backward()
            for name, value in twin.items():
                value -= (0.5 if name in names else 0.1) * weights[name].grad
    for group, twin in enumerate(twins):
        run = tmp_path / name_group(group)
        with Predictor.open(run, at="last") as predictor:
            test = batches[group][0]
            expected = torch.sigmoid(compute_logits(twin, test))
            torch.testing.assert_close(predictor(test), expected, rtol=1e-5, atol=1e-6)


def test_loss_of_labels_and_peer_has_the_gradient_of_the_paper(tmp_path):
    """Weights of samples count for both terms; where a label is unknown, the peer teaches alone."""
    config = override_settings(build_group_configs(build_config(CONFIG))[0], {})
    objective = Codistilled(config, tmp_path)
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 2, generator=draw, dtype=torch.float64, requires_grad=True)
    taught = torch.rand(5, 2, generator=draw, dtype=torch.float64)
    label = torch.tensor([[0.0, 1], [1, 1], [0, 0], [float("nan"), 1], [1, float("nan")]])
    weight = torch.tensor([1.0, 2, 0.5, 1, 3])
    batch = Batch(5, torch.empty(5, 0), {}, label, weight, world_weight=7.5)

    class Teacher:
        step = 3

        def __call__(self, batch):
            with torch.inference_mode():
                return taught * 1

    objective.teacher, objective.weight = Teacher(), 2.0
    objective.loss(lambda batch: logits, batch, Mesh()).backward()
    p = torch.sigmoid(logits.detach())
    labels = torch.where(label.isnan(), 0, p - label)
    expected = (labels + 2 * (p - taught)) / 3 * weight[:, None] / (7.5 * 2)
    torch.testing.assert_close(logits.grad, expected)
    assert objective.step_metrics["teacher"] == 3
    assert float(objective.step_metrics["peer_difference"]) == pytest.approx(
        float((p - taught).abs().mean())
    )


def test_a_pair_that_stops_anywhere_resumes_to_the_same_bits(tmp_path):
    train_pair(tmp_path / "plain")
    train_pair(tmp_path / "stopped", (2, 4, 7, 10, 12, STEPS))
    assert digest_groups(tmp_path / "plain") == digest_groups(tmp_path / "stopped")


@pytest.mark.parametrize("first", [0, 1])
def test_a_group_waits_for_its_peer_and_the_order_makes_no_difference(first, tmp_path):
    """Groups run at the same time, one of them later; large deltas make every publication a full one."""
    train_pair(tmp_path / "turns")
    errors = []
    # Opened one after the other: they draw initial weights from torch's generator, which threads share.
    runs = [
        open_group(tmp_path / "free", group, STEPS, Mesh(), train__timeout=60) for group in (0, 1)
    ]

    def train(run):
        try:
            run.train()
        except BaseException as error:
            errors.append(error)
        finally:
            run.close()

    threads = [threading.Thread(target=train, args=(runs[g],)) for g in (first, 1 - first)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert digest_groups(tmp_path / "turns") == digest_groups(tmp_path / "free")


def test_what_a_killed_group_needs_is_still_published(tmp_path, monkeypatch):
    """The peer is as far ahead as it can be, and every publication is a full export, of which old ones are deleted."""

    def refuse(*_):
        raise CheckpointError("unknown difference")

    train_pair(tmp_path / "plain")
    monkeypatch.setattr(deltas, "build_delta", refuse)
    pair = tmp_path / "pair"
    train_pair(pair, (3, 6, 9))
    # Step 15 needs step 9 of group 1, which is killed, and still at its checkpoint of 9.
    train_to(pair, 0, 15, Mesh())
    bases = [path.name for path in (pair / "group-0" / "teacher").glob("base-*")]
    assert len(bases) == 4
    train_to(pair, 1, 11, Mesh())
    train_to(pair, 1, STEPS, Mesh())
    train_to(pair, 0, STEPS, Mesh())
    assert digest_groups(tmp_path / "plain") == digest_groups(pair)


def train_pair_on_ranks(mesh: Mesh, folder: Path) -> None:
    train_pair(folder, mesh=mesh)


def test_groups_of_two_ranks_train_what_groups_of_one_do(tmp_path):
    run_ranks(2, train_pair_on_ranks, tmp_path / "two")
    train_pair(tmp_path / "one")
    for group in (0, 1):
        scores = []
        for name in ("one", "two"):
            with Predictor.open(tmp_path / name / name_group(group), at="last") as predictor:
                run = open_group(tmp_path / "data", group, 1, Mesh())
                scores.append(predictor(next(iter(run.trainer.data.test.batches(200)))))
                run.close()
        torch.testing.assert_close(*scores, rtol=0, atol=1e-5)


@pytest.mark.parametrize("on_lost", ["stop", "alone"])
def test_a_peer_that_vanishes_stops_the_group_or_leaves_it_alone(on_lost, tmp_path, capsys):
    settings = {"train__codistill__on_lost": on_lost}
    train_pair(tmp_path, (3, 6), **settings)
    assert not is_running(tmp_path / "group-1" / "teacher")
    run = open_group(tmp_path, 0, STEPS, Mesh(), **settings)
    try:
        if on_lost == "stop":
            with pytest.raises(
                WorldError, match=r"published step 6 last, wanted step 9.*same command"
            ):
                run.train()
            return
        run.train()
    finally:
        run.close()
    assert capsys.readouterr().out.count("Training continues on the labels alone") == 1
    train_to(tmp_path, 1, STEPS, Mesh(), **settings)  # the same command goes on


def test_a_peer_that_stopped_early_teaches_on(tmp_path):
    train_pair(tmp_path, (3, 6))
    path = tmp_path / "group-1" / "summary.json"
    path.write_text(path.read_text().replace('"stopped_early": false', '"stopped_early": true'))
    run = open_group(tmp_path, 0, STEPS, Mesh())
    run.train()
    assert run.trainer.objective.step_metrics["teacher"] == 6
    run.close()


def test_a_request_to_stop_ends_the_wait_at_a_checkpoint(tmp_path):
    train_pair(tmp_path, (3, 6))
    run = open_group(tmp_path, 0, STEPS, Mesh(), train__timeout=60)
    threading.Timer(1.5, lambda: setattr(run.trainer, "stop_requested", True)).start()
    outcome = run.train()
    run.close()
    assert outcome.stopped and run.trainer.collection.step == 12
    train_to(tmp_path, 1, STEPS, Mesh())
    train_to(tmp_path, 0, STEPS, Mesh())
    train_pair(tmp_path / "plain")
    assert digest_groups(tmp_path / "plain") == digest_groups(tmp_path)


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("got the seed 0 of this run, wanted another", {"train.seed": 0}),
        (r"every_steps \(50, 3\), wanted \(100, 3\)", {"train.batch_size": 50}),
        (r"every_steps \(100, 1\), wanted \(100, 3\)", {"train.codistill.every_steps": 1}),
        ("got columns or encodings that are not those of this run", {}),
    ],
)
def test_a_run_that_is_no_peer_is_refused_by_name(text, settings, tmp_path):
    train_pair(tmp_path, (3, 6))
    run = open_group(tmp_path, 0, 9, Mesh())
    peer = override_settings(build_group_configs(build_config(CONFIG))[1], settings)
    schema = replace(run.trainer.data.train.schema, labels=("clicked",))
    teacher = SimpleNamespace(config=peer, schema=schema)
    with pytest.raises(ConfigError, match=text):
        run.trainer.objective._check_peer(teacher, run.trainer)
    run.close()


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("without colonnade train", {"train.codistill": {"groups": 2}}),
        ("on_lost", {"train.codistill.on_lost": "wait"}),
        ("groups", {"train.codistill.groups": 3}),
        ("every_steps", {"train.codistill.every_steps": 0}),
    ],
)
def test_bad_settings_are_refused(text, settings, tmp_path):
    config = build_group_configs(build_config(CONFIG))[0]
    with pytest.raises(ConfigError, match=text):
        open_run(override_settings(config, settings), Mesh(), tmp_path / "group-0")
    assert not (tmp_path / "group-0" / "config.yaml").exists()


def test_models_without_probabilities_and_data_of_unknown_length_are_refused(tmp_path):
    config = override_settings(
        build_group_configs(build_config(CONFIG))[0], {"train.codistill.burn_in_steps": None}
    )
    unknown = Splits(train=SimpleNamespace(num_samples=None))
    setup = RunSetup(
        model=None, data=unknown, config=config, mesh=Mesh(), folder=tmp_path, objective=Probability()
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"unknown length.*burn_in_steps"):
        wrap_objective(setup)
    with pytest.raises(ConfigError, match=r"model.name=dlrm, whose objective is MeanLoss"):
        wrap_objective(replace(setup, objective=MeanLoss(lambda output, batch: output)))
    with pytest.raises(ConfigError, match=r"colonnade.fit"):
        wrap_objective(replace(setup, config=override_settings(config, {"data.name": "own"})))


def test_teacher_steps_and_weights():
    settings = CodistillConfig(every_steps=10, burn_in_steps=25, weight=2.0)
    steps = {step: settings.choose_teacher_step(step) for step in (0, 19, 29, 30, 39, 40, 45)}
    assert steps == {0: 0, 19: 0, 29: 0, 30: 20, 39: 20, 40: 30, 45: 30}
    assert [settings.compute_weight(step) for step in (34, 49, 1000)] == [0.8, 2.0, 2.0]
    assert CodistillConfig(burn_in_steps=0).compute_weight(0) == 1.0


def test_a_damaged_publication_is_an_error(tmp_path):
    train_pair(tmp_path, (3, 6))
    (tmp_path / "group-1" / "teacher" / "published.json").write_text("{")
    run = open_group(tmp_path, 0, STEPS, Mesh())
    with pytest.raises(CorruptionError, match=r"published.json"):
        run.train()
    run.close()


def test_a_default_burn_in_is_a_tenth_of_the_steps_and_stays(tmp_path):
    settings = {"train__codistill__burn_in_steps": None}
    run = open_group(tmp_path, 0, 30, Mesh(), **settings)
    assert run.config.train.codistill.burn_in_steps == 3
    run.close()
    train_to(tmp_path, 0, 5, Mesh(), **settings)
    run = open_group(tmp_path, 0, 20, Mesh(), **settings)
    assert isinstance(run.config, RunConfig) and run.config.train.codistill.burn_in_steps == 0
    run.close()
