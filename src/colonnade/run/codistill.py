"""Codistillation: two groups of ranks train the same model, each also on the other's predictions (Anil et al. 2018).

Each group is a run of its own, and knows the other one by a folder. It publishes its checkpoints of steps T, 2 T, ..
(`publish/`). In the step after t updates it learns from what its peer's checkpoint of step T (floor(t / T) - 1)
predicts for the batch: one interval late, so that no group waits for files that are being written. A group that is
ahead waits for its peer, so that the same seeds give the same bits on machines of any speed.

RUN/teacher/           publication for the other group (publish/deltas.py)
RUN/teacher/running    locked while the run is open

Legend: B samples, T train.codistill.every_steps.
"""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from colonnade.batch import Batch
from colonnade.checkpoint.contract import TrainerState
from colonnade.checkpoint.header import list_checkpoints
from colonnade.comm.mesh import Mesh
from colonnade.config.run import OWN, RunConfig, load_config, override_settings
from colonnade.errors import ConfigError, WorldError
from colonnade.formats import parse_stamped_json
from colonnade.planning.placement import count_run_steps
from colonnade.predict.predictor import Predictor
from colonnade.publish.delivery import TEACHER_FOLDER, list_published_steps
from colonnade.publish.deltas import read_current
from colonnade.train.objective import Probability, weighted_loss
from colonnade.train.setup import RunSetup

NUM_GROUPS = 2
POLL_SECONDS = 0.05
"""Seconds between two looks for the peer's publication."""
BURN_IN_SHARE = 0.1
"""Share of a run's steps before the first teacher."""


class Codistilled(Probability):
    """Cross entropy of the labels (phi) and of the peer's predictions (psi): (phi + weight psi) / (1 + weight).

    No gradient reaches the teacher. Its rows are read from files, so no clock, statistic or admission of the trained
    rows changes. Without a teacher, loss and bits are those of `Probability`.
    """

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self.config = config
        self.settings = config.train.codistill
        self.folder = folder
        self.peer = (folder / str(self.settings.peer)).resolve()
        self.teacher: Predictor | None = None
        self.weight = 0.0
        self.step_metrics: Mapping[str, Any] = {"teacher": 0}
        self.is_alone = False
        """True after the peer was lost: the group does not wait for it any more."""
        self._taught_by = 0  # step that the current teacher should have
        self._idle_since: float | None = None  # when the peer was first found not running
        self._lock: IO[bytes] | None = None

    def mark_running(self) -> None:
        """Let the peer know that this group runs, until `close` or the end of the process; rank 0 calls it."""
        folder = self.folder / TEACHER_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = (folder / "running").open("ab")
        fcntl.flock(self._lock, fcntl.LOCK_SH)  # shared, so that a peer's look never refuses it

    def close(self) -> None:
        """Close the teacher, and let the peer know that this group runs no more."""
        self._close_teacher()
        if self._lock is not None:
            self._lock.close()

    def loss(self, model: nn.Module, batch: Batch, mesh: Mesh) -> Tensor:
        """Compute this rank's part of the loss's mean over the global batch."""
        if self.teacher is None or not batch.size:
            return super().loss(model, batch, mesh)
        logits = model(batch)
        # A copy, because autograd does not save tensors of inference mode.
        taught = self.teacher(Batch(batch.size, batch.dense, batch.ids)).clone()
        label_loss = weighted_loss(logits, batch)
        peer_loss = weighted_loss(logits, replace(batch, label=taught))
        difference = (torch.sigmoid(logits.detach()) - taught.to(logits)).abs().mean()
        self.step_metrics = {
            "teacher": self.teacher.step,
            "label_loss": label_loss.detach() * mesh.num_ranks,
            "peer_loss": peer_loss.detach() * mesh.num_ranks,
            "peer_difference": difference,
        }
        return (label_loss + self.weight * peer_loss) / (1 + self.weight)

    def prepare_step(self, trainer: TrainerState) -> bool:
        """Open the teacher of the next step, and wait for it if the peer is behind. Collective.

        Returns False if a rank requested to stop meanwhile. Raises WorldError if the peer is lost and `on_lost` is
        stop, ConfigError if it is no peer of this run, CheckpointError or StorageError for a publication that cannot
        be read.
        """
        step = trainer.collection.step
        self.weight = self.settings.compute_weight(step)
        teacher_step = self.settings.choose_teacher_step(step)
        if teacher_step == self._taught_by:
            return True
        with trainer.phases("teacher", include_waits=True):
            self._close_teacher()
            answer = self._wait_for_teacher(teacher_step, trainer)
            if answer is None:
                return False
            self._taught_by = teacher_step
            if "lost" in answer:
                self._go_on_alone(answer["lost"], trainer)
            elif not trainer.mesh.is_server:
                # Building a network draws random numbers, which a run that resumes here would draw once more.
                with torch.random.fork_rng(devices=[]):
                    self.teacher = Predictor.open(self.peer / TEACHER_FOLDER, at=answer["step"])
                self._check_peer(self.teacher, trainer)
        return True

    def _wait_for_teacher(self, step: int, trainer: Any) -> dict[str, Any] | None:
        """Wait until the peer has published a step or is lost; None if a rank requested to stop. Collective."""
        mesh = trainer.mesh
        self._idle_since = None
        while True:
            own = self._look_for(step) if mesh.rank == 0 else {}
            own["stop"] = trainer.stop_requested
            answers = mesh.all_gather_bytes("control", json.dumps(own).encode())
            first, *others = map(json.loads, answers)
            if "step" in first or "lost" in first:
                return first
            if any(answer["stop"] for answer in (first, *others)):
                return None
            time.sleep(POLL_SECONDS)

    def _look_for(self, step: int) -> dict[str, Any]:
        """Return the published step to open, or why the peer is lost; {} to wait.

        A peer that has stopped early teaches on with its last publication.
        """
        folder = self.peer / TEACHER_FOLDER
        has_ended = not is_running(folder)  # before the pointer is read, which may then be the last
        current = read_current(folder)
        if current is not None and current.step >= step:
            if step in list_published_steps(folder, current):
                return {"step": step}
            return {"lost": f"it does not have step {step:,} any more, only newer ones"}
        if not has_ended:
            self._idle_since = None
            return {}
        path = self.peer / "summary.json"
        if current is not None and path.exists():
            summary = parse_stamped_json(path, path.read_bytes(), "colonnade summary")
            if summary.get("stopped_early"):
                return {"step": current.step}
        now = time.monotonic()
        self._idle_since = self._idle_since or now
        seconds = self.config.train.timeout
        if self.is_alone or now - self._idle_since > seconds:
            last = "nothing" if current is None else f"step {current.step:,} last"
            reason = f"it published {last}, wanted step {step:,}, and has not run for {seconds:g} s"
            return {"lost": reason}
        return {}

    def _go_on_alone(self, reason: str, trainer: Any) -> None:
        """Go on without a teacher, and say so once. Raises WorldError if `on_lost` is stop."""
        text = f"the peer group {self.peer} is lost: {reason}"
        if self.settings.on_lost == "stop":
            raise WorldError(
                f"{text}. Start it again and go on with the same command, or go on with the labels alone: "
                "train.codistill.on_lost=alone"
            )
        if not self.is_alone:
            trainer.progress.print_line(f"{text}. Training continues on the labels alone")
        self.is_alone = True

    def _check_peer(self, teacher: Predictor, trainer: Any) -> None:
        """Raise ConfigError if a teacher is of this run's seed, or of a run with other steps or another schema."""
        assert teacher.config is not None, "its network was built from it"
        own, other = self.config.train, teacher.config.train
        if own.seed == other.seed:
            raise ConfigError(
                f"{self.peer}: got the seed {own.seed} of this run, wanted another one: groups of one seed teach each "
                "other nothing. Start one of them anew with another train.seed"
            )
        steps = [(train.batch_size, train.codistill.every_steps) for train in (own, other)]
        if steps[0] != steps[1]:
            raise ConfigError(
                f"{self.peer}: got train.batch_size and train.codistill.every_steps {steps[1]}, wanted {steps[0]} as "
                "in this run; start both groups with the same"
            )
        if teacher.schema != trainer.data.train.schema:
            raise ConfigError(
                f"{self.peer}: got columns or encodings that are not those of this run, so that it misreads these "
                "samples; give both groups the same data.options.schema (config.yaml has it) and labels"
            )

    def _close_teacher(self) -> None:
        if self.teacher is not None:
            self.teacher.close()
        self.teacher = None
        self.step_metrics = {"teacher": 0}


def is_running(folder: Path) -> bool:
    """Return whether the run of a publication for a peer is open in any process of any machine."""
    if not (folder / "running").exists():
        return False
    with (folder / "running").open("r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def wrap_objective(setup: RunSetup) -> RunSetup:
    """Return the setup of a run with the objective and the burn-in of `train.codistill`, if the run has a peer.

    Raises ConfigError for runs that cannot have one.
    """
    settings = setup.config.train.codistill
    if setup.read_only or (settings.peer is None and settings.groups == 1):
        return setup
    if settings.peer is None:
        raise ConfigError(
            f"got train.codistill.groups={settings.groups} without colonnade train, which starts the groups; start "
            "each one by itself, and set train.codistill.peer"
        )
    if setup.config.data.name == OWN or setup.folder is None:
        raise ConfigError(
            "got train.codistill with colonnade.fit or without a run folder, wanted a run of colonnade train: the peer "
            "builds this group's network from its settings"
        )
    if type(setup.objective) is not Probability:
        raise ConfigError(
            f"got train.codistill with model.name={setup.config.model.name}, whose objective is "
            f"{type(setup.objective).__name__}; wanted a model of probabilities, or no train.codistill"
        )
    burn_in_steps = settings.burn_in_steps
    if burn_in_steps is None and list_checkpoints(setup.folder):
        burn_in_steps = load_config(setup.folder / "config.yaml").train.codistill.burn_in_steps
    if burn_in_steps is None:
        num_steps = count_run_steps(setup.config, setup.data)
        if num_steps is None:
            raise ConfigError(
                "got train.codistill for data of unknown length, of which a tenth cannot be computed; set "
                "train.codistill.burn_in_steps"
            )
        burn_in_steps = int(BURN_IN_SHARE * num_steps)
    config = override_settings(setup.config, {"train.codistill.burn_in_steps": burn_in_steps})
    return replace(setup, config=config, objective=Codistilled(config, setup.folder))


def build_group_configs(config: RunConfig) -> list[RunConfig]:
    """Return the settings of each group that one command starts, in folders group-0, group-1 side by side."""
    return [
        override_settings(
            config,
            {
                "train.seed": config.train.seed + group,
                "train.codistill.groups": 1,
                "train.codistill.peer": f"../{name_group(NUM_GROUPS - 1 - group)}",
            },
        )
        for group in range(NUM_GROUPS)
    ]


def name_group(group: int) -> str:
    """Return the folder name of a group inside the folder of its command."""
    return f"group-{group}"
