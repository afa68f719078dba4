"""Placement of a run's rows before its first step, from a profile of its first batches or of the run folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from colonnade.batch import Batch
from colonnade.comm.mesh import Mesh
from colonnade.config.run import RunConfig
from colonnade.data.batches import BatchSource
from colonnade.data.contract import Source, Splits, num_steps
from colonnade.data.processes import ProcessSource
from colonnade.errors import BudgetExceeded, ColonnadeError, ConfigError
from colonnade.lookup.stacking import hash_ids
from colonnade.plan.measure.device import Device
from colonnade.plan.measure.profile import Profile, profile_batches
from colonnade.plan.placement import forecast_batches, place_rows
from colonnade.plan.plan import Plan
from colonnade.table import Table
from colonnade.train.setup import RunSetup

PROFILE_FILE = "profile.json"
"""Name of the profile in a run folder."""
SAMPLE_LOOKUPS = 1 << 20
MIN_BATCHES = 8
MAX_BATCHES = 256
SAMPLES_OF_UNKNOWN_LENGTH = 16
"""Assumed length of a run of unknown length, as a multiple of the sample."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Plan of a run with its rows placed."""

    plan: Plan
    profile: Profile | None = None
    """Profile that the plan was made from, to be stored; None: there is none."""
    device: Device | None = None
    """Device that was measured for a prediction, to be stored; None: nothing was measured."""
    runners_up: tuple[Plan, ...] = ()
    """Plans of other kinds, which may be timed beside the plan, in the order in which they are."""
    note: str = ""
    """Remark for the user: a reason for an even division, or a stored profile that is ignored."""


def place_on_rank_0(setup: RunSetup, plan: Plan, first_step: int) -> Placement:
    """Place rows by a profile, on rank 0 for all ranks. Collective. Times nothing; reads at most the sample.

    plan: with memory divided evenly. The profile of the run folder is used if it is of these tables. Raises
    BudgetExceeded if a batch of the sample cannot fit.
    """

    def make_message() -> dict[str, str]:
        placed = _place_rows_of_run(setup, plan, first_step)
        profile = "" if placed.profile is None else placed.profile.to_json()
        return {"plan": placed.plan.to_json(), "profile": profile, "note": placed.note}

    received = broadcast_plan_message(setup.mesh, make_message)
    return Placement(
        Plan.from_json(received["plan"]),
        Profile.from_json(received["profile"]) if received["profile"] else None,
        note=received["note"],
    )


def broadcast_plan_message(
    mesh: Mesh, make_message: Callable[[], Mapping[str, Any]]
) -> dict[str, Any]:
    """Call `make_message` on rank 0, which plans, and return its message on all ranks. Collective.

    The message consists of JSON values. Raises ConfigError on all ranks if the call raises a ColonnadeError; with one
    rank, the error itself.
    """
    outcome: dict[str, Any] = {}
    if mesh.rank == 0:
        try:
            outcome = {"message": make_message()}
        except ColonnadeError as error:
            if mesh.num_ranks == 1:
                raise
            outcome = {"error": str(error)}
    received = json.loads(mesh.all_gather_bytes("control", json.dumps(outcome).encode())[0])
    if "error" in received:
        raise ConfigError(f"rank 0 could not plan: {received['error']}")
    return received["message"]


def _place_rows_of_run(setup: RunSetup, plan: Plan, first_step: int) -> Placement:
    collection = setup.collection
    config = setup.config
    source = setup.data.train
    inputs = (
        [(table.name, table.dim, table.rows, table.dtype) for table in collection.tables],
        [(feature.name, feature.table) for feature in collection.declaration.features],
        *(source.schema, source.num_samples, config.data),
    )
    digest = hashlib.blake2b(repr(inputs).encode(), digest_size=8).hexdigest()
    profile, note = read_profile(setup.folder, collection.tables, digest)
    if profile is None:
        if not can_read_twice(source):
            return _divide_evenly(
                plan, "a data set of your own may not be read twice, so no sample of it is profiled"
            )
        sample = read_sample_batches(
            source,
            config.train.samples_per_step,
            max_batches=min(count_run_steps(config, setup.data) or MAX_BATCHES, MAX_BATCHES),
        )
        stacked = [hash_ids(batch, collection.declaration) for batch in sample]
        if not any(batch.size for batch in stacked):
            return _divide_evenly(plan, "there is no sample")
        profile = profile_batches(
            collection.tables, collection.declaration.features, stacked, is_brief=True
        )
        profile = replace(profile, digest=digest)
    try:
        placed = place_rows(
            plan,
            collection.tables,
            profile,
            forecast_batches(
                plan,
                batch_size=min(config.train.samples_per_step, profile.samples),
                num_samples=source.num_samples,
                first_batch=first_step,
                last_batch=predict_last_step(config, setup.data, first_step, profile.batches),
            ),
            config.plan.memory.tables,
        )
    except BudgetExceeded as error:
        # Counts of one rank's batches are exact; those of several ranks or batches are estimates from above.
        if plan.num_ranks == 1 and plan.max_staleness_steps == 0:
            raise
        return _divide_evenly(plan, str(error))
    return Placement(placed, profile, note=note)


def _divide_evenly(plan: Plan, reason: str) -> Placement:
    """Keep an even division of memory, until the traffic moves it at a checkpoint."""
    note = f"memory is divided evenly among tables until the first checkpoint: {reason}"
    return Placement(replace(plan, placement="profiled"), note=note)


def read_profile(
    folder: Path | None, tables: Sequence[Table], data_digest: str
) -> tuple[Profile | None, str]:
    """Read the profile of a run folder. Returns None, and a remark, for one that is damaged or of other tables or
    data.

    data_digest: of the run's tables and data."""
    if folder is None or not (folder / PROFILE_FILE).is_file():
        return None, ""
    try:
        profile = Profile.from_json((folder / PROFILE_FILE).read_text(encoding="utf-8"))
        names = [table.name for table in profile.tables]
        fits = all(
            table.rows is None or stats.rows <= table.rows
            for table, stats in zip(tables, profile.tables, strict=False)
        )
        is_counted = profile.samples > 0 and profile.batches > 0
    except (ColonnadeError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return None, f"{PROFILE_FILE} is ignored, and the data profiled anew: {error}"
    wanted = [table.name for table in tables]
    if names != wanted or not fits or not is_counted:
        return None, (
            f"{PROFILE_FILE} is ignored, and the data profiled anew: it is of another model, with tables "
            f"{', '.join(names)}; this one has {', '.join(wanted)}"
        )
    if profile.digest != data_digest:
        return None, (
            f"{PROFILE_FILE} is ignored, and the data profiled anew: it is of tables of the same names with other "
            "rows, dimensions or features, or of other data"
        )
    return profile, ""


def can_read_twice(source: Source) -> bool:
    """Return whether reading a sample leaves the source as it was; a user's iterable may count what it yields."""
    if isinstance(source, ProcessSource):
        source = source.source
    return not isinstance(source, BatchSource)


def read_sample_batches(
    source: Source,
    batch_size: int,
    min_lookups: int = SAMPLE_LOOKUPS,
    *,
    rank: int = 0,
    num_ranks: int = 1,
    max_batches: int = MAX_BATCHES,
) -> list[Batch]:
    """Read a rank's first batches of the first epoch until they have `min_lookups` lookups."""
    sample: list[Batch] = []
    count = 0
    batches = source.batches(batch_size, rank=rank, num_ranks=num_ranks)
    try:
        for batch in islice(batches, max_batches):
            sample.append(batch)
            count += sum(len(ids.values) for ids in batch.ids.values())
            if count >= min_lookups and len(sample) >= MIN_BATCHES:
                break
    finally:
        if hasattr(batches, "close"):
            batches.close()
    return sample


def list_row_folders(plan: Plan, run_folder: Path) -> list[str]:
    """Return the directories for rows of this plan; [] if all rows fit in memory."""
    if not plan.needs_backing:
        return []
    return [directory.path for directory in plan.ssd] or [str(run_folder)]


def count_epoch_steps(config: RunConfig, num_samples: int) -> int:
    """Count the steps of an epoch. The last batch is one of those that the model gets: a micro-batch."""
    parts = config.train.accumulate
    size = config.train.samples_per_step // parts
    return -(-num_steps(num_samples, size, config.data.last_batch) // parts)


def count_run_steps(config: RunConfig, data: Splits) -> int | None:
    """Count the steps of the whole run; None if the length of the data is unknown."""
    train = config.train
    parts = data.days if train.progressive else (data.train,) * train.num_epochs
    steps = 0
    for part in parts:
        if part.num_samples is None:
            return train.max_steps
        steps += count_epoch_steps(config, part.num_samples)
    return steps if train.max_steps is None else min(steps, train.max_steps)


def predict_last_step(
    config: RunConfig, data: Splits, first_step: int, sampled_batches: int
) -> int:
    """Return the last step of the run: at least one after the first, and a guess if the data's length is unknown."""
    steps = count_run_steps(config, data)
    if steps is None:
        steps = first_step + SAMPLES_OF_UNKNOWN_LENGTH * sampled_batches
    return max(steps, first_step + 1)
