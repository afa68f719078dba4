"""Runs that have nothing left to train: what they recorded is their result, and nothing is written again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from colonnade.config import TrainConfig
from colonnade.errors import ColonnadeError
from colonnade.formats import read_stamped
from colonnade.topology.mesh import Mesh
from colonnade.train.commit_header import committed_steps, read_header, state_folder
from colonnade.train.states import load_state
from colonnade.train.trainer import Outcome, Trainer


def read_final_summary(
    folder: Path, config: TrainConfig, num_epochs: int, mesh: Mesh
) -> dict[str, Any] | None:
    """Collective: the summary that rank 0 reads in a run folder, if it is that of the newest commit and these settings
    leave nothing to train; None where there is something to do, or to mend."""
    text = b""
    if mesh.rank == 0:
        try:
            summary = _final_summary(folder, config, num_epochs)
            text = b"" if summary is None else json.dumps(summary).encode()
        except (ColonnadeError, OSError):
            pass  # opening the run says what is wrong
    text = mesh.all_gather_bytes("control", text)[0]
    return json.loads(text) if text else None


def outcome_of(summary: Mapping[str, Any]) -> Outcome:
    """Return the outcome that a summary recorded."""
    return Outcome(**{each.name: summary[each.name] for each in fields(Outcome)})


def complete_outcome(trainer: Trainer, outcome: Outcome, samples: int) -> int:
    """Fill in the outcome of a run that was killed between its last commit and its summary, from the counts that the
    commit holds. Returns the samples of all ranks: `samples` as it is for any other run."""
    work = trainer.earlier_work
    if outcome.steps or not work:
        return samples
    for name in ("steps", "samples", "skipped", "seconds"):
        setattr(outcome, name, work[0][name])
    trainer.phases.seconds.update(work[0]["phases"])
    return sum(of_rank["samples"] for of_rank in work)


def describe_end(folder: Path, step: int) -> str:
    """Say that a run is finished, and how to go on."""
    return (
        f"{folder} is finished at step {step:,}: nothing is left to train, and nothing was changed. To go on, give "
        "more epochs (--set train.epochs=N, train.max_steps or train.patience, whichever ended it); to train anew, "
        "give another folder (--run)"
    )


def _final_summary(folder: Path, config: TrainConfig, num_epochs: int) -> dict[str, Any] | None:
    steps, path = committed_steps(folder), folder / "summary.json"
    if not steps or not path.is_file():
        return None
    summary = read_stamped(path, path.read_bytes(), "colonnade summary")
    is_newest = summary.get("step") == steps[-1] and not summary.get("stopped")
    if not is_newest or not {each.name for each in fields(Outcome)} <= set(summary):
        return None
    place = state_folder(folder, steps[-1]) / "dense"
    state = load_state(place, read_header(folder, steps[-1])["run"])
    is_over = (
        state["position"][0] >= num_epochs
        or (config.max_steps is not None and steps[-1] >= config.max_steps)
        or 0 < (config.patience or 0) <= state["best"]["num_since"]
    )
    return summary if is_over else None
