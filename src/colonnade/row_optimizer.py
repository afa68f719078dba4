"""Optimizer of embedding rows: a torch.optim.Optimizer with one param group per table, or per part of a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import NoneType
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from colonnade.embedding import EmbeddingCollection
from colonnade.errors import ConfigError, NonFiniteError
from colonnade.exchange.cached_state import SavedRows, flush_pending_temporarily
from colonnade.pipeline.gradients import StepGradients

# Columns of the settings of `_native.update`: named single numbers first, then betas, limits and the scale.
SETTING_COLUMNS = ("lr", "weight_decay", "eps", "", "", "nesterov", "l1", "l2", "beta")
BETAS_COLUMN = 3
LIMIT_COLUMNS = ((9, "max_norm"), (10, "clip_value"), (11, "weight_bound"))
GRADIENT_SCALE_COLUMN = 12
NUM_SETTINGS = 16
IMMUTABLE_TYPES = (int, float, str, bool, NoneType)


class RowOptimizer(Optimizer):
    """Optimizer that applies the gradients recorded on `collection`: each `step()` updates a row once, by their sum.

    Has one param group per table, or per part of a table, in declared order. A group has a `name` ("item",
    "item.deep") and the settings of its optimizer (`colonnade.optimizers`), so schedulers work as on any
    optimizer. Gradients accumulate over several backwards and several batches before a step. Only touched rows
    change (lazy); if a row's parts have different optimizers, all of them run for a touched row.
    """

    def __init__(self, collection: EmbeddingCollection, *, clip_value: float | None = None) -> None:
        """Make one param group for each part. `clip_value`: each element of a row's summed gradient is
        clamped to +-clip_value before the update; each group has its own."""
        if clip_value is not None and not clip_value > 0:
            raise ConfigError(f"RowOptimizer: got clip_value={clip_value}, wanted more than 0")
        if not isinstance(collection, EmbeddingCollection):
            raise ConfigError(
                f"RowOptimizer: got a {type(collection).__name__}, wanted the model's EmbeddingCollection: "
                "RowOptimizer(model.embeddings)"
            )
        self.collection = collection
        declaration = collection.declaration
        groups = []
        for t, part in declaration.parts:
            table = declaration.tables[t]
            groups.append(
                {
                    "params": [torch.empty(0, part.dim)],  # placeholder: rows are not a tensor
                    "name": f"{table.name}.{part.name}" if part.name else table.name,
                    **part.optimizer.settings(),
                    "max_norm": table.max_norm,
                    "clip_value": clip_value,
                    "weight_bound": table.weight_bound,
                }
            )
        # Defaults that all groups share: torch's schedulers look up the settings that they cycle (momentum, betas).
        common = set.intersection(*(set(group) for group in groups)) - {"params", "name"}
        super().__init__(groups, {name: groups[0][name] for name in common})
        self._is_built = True
        self._kinds = torch.tensor(
            [part.optimizer.kind for _, part in declaration.parts], dtype=torch.int32
        )
        self._gradient_scale = 1.0
        self._checked_groups: list[dict] = []  # copies of the groups that `_checked` was made from
        self._checked = torch.empty(0)  # (P, 16) float64, settings that include the gradient scale
        self._checked_scale = 0.0

    @property
    def gradients(self) -> StepGradients:
        """Gradients recorded on an open collection since the last step."""
        return self.collection.pipeline.gradients

    @torch.no_grad()
    def step(self, closure: Callable | None = None, *, agreed: bool = False):
        """Apply the recorded gradients to the rows. Collective.

        Raises NonFiniteError, on every rank and without applying anything, if a gradient is NaN or inf on any rank.
        `agreed`: the ranks have already agreed that all gradients are finite."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self.collection.call_lock:
            self.collection.ensure_open()
            self.collection.warn_of_missing_optimizer_state()
            error: ConfigError | None = None
            try:
                settings = self._read_checked_settings()
            except ConfigError as own_error:
                error = own_error
                settings = torch.empty(0)
            if not agreed:
                self._check_step_on_all_ranks(error)
            if error is not None:
                raise error
            self.collection.pipeline.push_gradients(self._kinds, settings)
            self._gradient_scale = 1.0
        return loss

    @torch.no_grad()
    def scaled_step(self, scaler: torch.amp.GradScaler, *dense: Optimizer) -> bool:
        """Step rows and the `dense` optimizers together under a gradient scaler. Collective.

        Replaces `scaler.step` for each optimizer and `scaler.update`: divides all gradients by the scale, steps all
        optimizers, and may raise the scale. If a gradient is NaN or inf on any rank, no optimizer steps on any
        rank, and all ranks lower the scale; without `dense` it never rises. Returns whether the optimizers stepped.

        Gradients of `dense` must already be summed over ranks. Raises ConfigError if `step` completes any of them.
        """
        self.collection.ensure_open()
        if self.collection.exchange.pushed_parameters:
            raise ConfigError(
                "scaled_step: got exchange partials, which adds gradients of dense weights when rows are pushed,"
                " after they were divided by the scale; choose pooled, or train in bfloat16 without a scale"
            )
        scale = scaler.get_scale()
        for optimizer in dense:
            scaler.unscale_(optimizer)
        dense_gradients = [
            p.grad
            for optimizer in dense
            for group in optimizer.param_groups
            for p in group["params"]
        ]
        finite = all(
            bool(torch.isfinite(grad).all()) for grad in dense_gradients if grad is not None
        )
        if self._are_finite_on_all_ranks(finite and self.gradients.are_finite()):
            self.scale_grad_(1 / scale)
            self.step(agreed=True)
            for optimizer in dense:
                scaler.step(optimizer)
            if dense:  # from whose checks the scaler learns that it may raise the scale
                scaler.update()
            return True
        self.zero_grad()
        self.collection.discard_batches()
        if scaler.is_enabled():
            scaler.update(scale * scaler.get_backoff_factor())
        return False

    @property
    def _step_supports_amp_scaling(self) -> NoReturn:
        """Refuse `GradScaler.step(rows)`, which reads this attribute: a scaler finds no gradients to check here."""
        raise ConfigError(
            "got GradScaler.step(RowOptimizer), wanted rows.scaled_step(scaler, dense_optimizer) in place of "
            "scaler.step for every optimizer and scaler.update: rows and dense weights step together or not at all, "
            "on all ranks"
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for `copy.deepcopy` and pickle, which copy the collection with its optimizer."""
        copied = ("collection", "_is_built", "_kinds", "_gradient_scale")
        reset = {"_checked_groups": [], "_checked": torch.empty(0), "_checked_scale": 0.0}
        return super().__getstate__() | {name: self.__dict__[name] for name in copied} | reset

    def add_param_group(self, param_group: dict) -> None:
        if getattr(self, "_is_built", False):
            raise ConfigError(
                "RowOptimizer: got another param group; its groups are the collection's tables"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict:
        """Return the groups' settings and, under `state`, ids (N,) and optimizer state (N, S) of trained rows by group.

        Raises CheckpointError, as the collection's `state_dict` does, if some rows are not in this process's memory
        or all together are too large."""
        return {**super().state_dict(), "state": self.collection.optimizer_states()}

    def load_state_dict(self, state_dict: dict) -> None:
        """Load a `state_dict`; load the model's first.

        Raises ConfigError if the groups are of other tables or optimizers, and CheckpointError if the state is of
        rows that the collection does not have."""
        bounds = {group["name"]: group["weight_bound"] for group in self.param_groups}
        # A state saved before groups had a weight_bound gets this optimizer's.
        groups = [
            {"weight_bound": bounds.get(group.get("name")), **group}
            for group in state_dict["param_groups"]
        ]
        states = state_dict["state"]
        state_dict = {"state": {}, "param_groups": groups}
        wanted = [(group["name"], sorted(group)) for group in self.param_groups]
        got = [(group.get("name"), sorted(group)) for group in groups]
        if got != wanted:
            first = next(
                (pair for pair in zip(got, wanted, strict=False) if pair[0] != pair[1]),
                (len(got), len(wanted)),
            )
            raise ConfigError(
                f"RowOptimizer: got groups that differ from this collection's, first {first[0]}, wanted {first[1]}"
            )
        self.collection.load_optimizer_states(states)
        super().load_state_dict(state_dict)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, *, agreed: bool = False) -> Tensor:
        """Scale the rows' gradients so that their 2-norm, over all tables and ranks, is at most `max_norm`. Return the
        norm before scaling. Collective; call it between the last backward and `step()`.

        Works like torch.nn.utils.clip_grad_norm_ on the sums of each row's gradients. Raises as `step` does.
        """
        if not max_norm > 0:
            raise ConfigError(f"clip_grad_norm_: got max_norm={max_norm}, wanted more than 0")
        self.collection.ensure_open()
        if not agreed and self.gradients.pushed is None:
            self._check_step_on_all_ranks()
        norm = (
            math.sqrt(self.gradients.compute_squared_norm(self.collection.step))
            * self._gradient_scale
        )
        if not math.isfinite(norm):
            self._raise_non_finite_error("the norm of the summed gradients")
        self._gradient_scale *= min(1.0, max_norm / (norm + 1e-6))  # same formula as torch
        return torch.tensor(norm)

    def scale_grad_(self, factor: float) -> None:
        """Multiply the rows' gradients by a factor. Call it on every rank with the same factor, between the last
        backward and `step()`."""
        if not 0 <= factor < math.inf:
            raise ConfigError(
                f"scale_grad_: got factor={factor}, wanted a finite number, 0 or more"
            )
        if self.collection.cached is not None and self.gradients.pushed is None:
            if self.collection.exchange.pushed_parameters:
                raise ConfigError(
                    "scale_grad_: got tables with exchange partials beside tables with a cache; their gradients of "
                    "dense weights would be multiplied, too: choose rows or pooled for them, or train in bfloat16 "
                    "without a loss scale"
                )
            # Gradients of several steps are added at cached rows, so each is multiplied by its own step's factor.
            for context in self.gradients.contexts:
                context.gradients.factor *= factor
        else:
            self._gradient_scale *= factor

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard gradients recorded since the last step."""
        self._gradient_scale = 1.0
        if self.collection.is_open:
            self.gradients.clear()

    @contextmanager
    def synchronized_view(self) -> Iterator[list[SavedRows]]:
        """Apply gradients that are pending in row caches to the owners' rows, until the context exits.

        Collective, between steps. Each changed row gets one update with the current settings, and is restored at exit.
        Inside the context you can evaluate, read rows or checkpoint. Yields, by slice, the changed rows before their
        update; an empty list without a cache."""
        self.collection.ensure_open()
        self.collection.pipeline.updates.apply_pending()
        cached = self.collection.cached
        if cached is None:
            yield []
            return
        kinds_and_settings = map(
            self.collection.slices.expand_by_part, (self._kinds, self._read_checked_settings())
        )
        with flush_pending_temporarily(cached, *kinds_and_settings) as before:
            yield before

    def _check_step_on_all_ranks(self, error: ConfigError | None = None) -> None:
        """Check on all ranks, in one collective, that settings are valid and that gradients not yet pushed are finite.

        error: problem with this rank's settings. Raises ConfigError or NonFiniteError, on every rank."""
        gradients = self.collection.pipeline.gradients
        is_pushed = gradients.pushed is not None
        votes = [float(error is not None)]
        if not is_pushed:
            votes += [float(not gradients.are_finite()), *gradients.has_recorded()]
        totals = self._sum_over_ranks(votes)
        if totals[0]:
            raise error or ConfigError(
                "another rank has settings that no optimizer can use; no row was changed"
            )
        if is_pushed:
            return
        gradients.drop_unused_batches(totals[2:])
        if totals[1]:
            self._raise_non_finite_error("an embedding gradient")

    def _are_finite_on_all_ranks(self, finite: bool) -> bool:
        """Return whether `finite` is true on every rank; drop batches for which no rank has gradients. Collective."""
        totals = self._sum_over_ranks([float(not finite), *self.gradients.has_recorded()])
        self.gradients.drop_unused_batches(totals[1:])
        return not totals[0]

    def _sum_over_ranks(self, votes: list[float]) -> list[float]:
        """Return the sums of votes over all ranks. Collective."""
        mesh = self.collection.mesh
        if mesh.num_ranks == 1:
            return votes
        return mesh.all_reduce("push", torch.tensor(votes), traffic_tag="control").tolist()

    def _raise_non_finite_error(self, gradient_label: str) -> NoReturn:
        self.zero_grad()
        self.collection.discard_batches()
        raise NonFiniteError(
            f"step {self.collection.step}: got NaN or inf in {gradient_label}, wanted finite "
            "numbers; no row was changed on any rank. Lower the learning rate or clip the loss"
        )

    def _read_checked_settings(self) -> Tensor:
        """Return this rank's settings, (P, 16) float64, valid until the next call.

        Reads and checks the groups again only if one has changed since the last step: reading 26 groups in Python takes
        a noticeable part of a step. Raises ConfigError for a number that no optimizer can use."""
        if not self._are_groups_unchanged():
            self._checked = self._read_group_settings()
            self._checked_groups = []
            self._checked_scale = 0.0
            groups = [dict(group) for group in self.param_groups]
            # Other values, such as tensors and lists, may change in place, so their groups are read again.
            if all(
                _is_immutable(v)
                for group in groups
                for name, v in group.items()
                if name != "params"
            ):
                self._checked_groups = groups
        if self._checked_scale != self._gradient_scale:
            self._checked[:, GRADIENT_SCALE_COLUMN] = self._checked_scale = self._gradient_scale
        return self._checked

    def _are_groups_unchanged(self) -> bool:
        """Return whether the groups equal those read last, which held only values that cannot change in place."""
        try:
            return bool(self._checked_groups) and self.param_groups == self._checked_groups
        except (RuntimeError, TypeError, ValueError):  # a tensor or an array in place of a number
            return False

    def _read_group_settings(self) -> Tensor:
        settings: list[list[float]] = []
        slices = self.collection.slices
        for group in self.param_groups:
            row = [0.0] * NUM_SETTINGS
            for column, name in enumerate(SETTING_COLUMNS):
                row[column] = _read_setting_number(group, name, group.get(name, 0.0))
            betas = group.get("betas") or (group.get("momentum", 0.0), 0.0)
            row[BETAS_COLUMN : BETAS_COLUMN + 2] = [
                _read_setting_number(group, "betas", value) for value in betas
            ]
            for column, name in LIMIT_COLUMNS:
                value = math.inf if group[name] is None else group[name]
                row[column] = _read_setting_number(group, name, value)
            limits = row[LIMIT_COLUMNS[0][0] : LIMIT_COLUMNS[-1][0] + 1]
            if not (
                all(number >= 0 for number in row)
                and all(number < math.inf for number in row[: LIMIT_COLUMNS[0][0]])
                and all(number < 1 for number in row[BETAS_COLUMN : BETAS_COLUMN + 2])
                and all(number > 0 for number in limits)
            ):
                raise ConfigError(
                    f"param group {group['name']!r}: got a setting below 0, NaN or too large in "
                    f"{_without_params(group)}; no row changed"
                )
            if group.get("momentum") and not self._kinds[len(settings)]:
                raise ConfigError(
                    f"param group {group['name']!r}: got momentum={group['momentum']} for rows without momentum state; "
                    "declare the table with SGD(momentum=...)"
                )
            if group["max_norm"] is not None and slices.is_cut_part(len(settings)):
                raise ConfigError(
                    f"param group {group['name']!r}: got max_norm={group['max_norm']} for rows cut by columns; "
                    "leave it None, or choose a sharding that keeps rows whole"
                )
            if "l1" in group and not group["lr"] > 0:
                raise ConfigError(
                    f"param group {group['name']!r}: got lr={group['lr']}, wanted more than 0: FTRL divides by it"
                )
            settings.append(row)
        return torch.tensor(settings, dtype=torch.float64)


def _read_setting_number(group: dict, name: str, value: Any) -> float:
    """Return a setting as a float. Raises ConfigError for anything that is not a number, such as None or text."""
    if isinstance(value, int | float | Tensor | np.number):
        try:
            return float(value)
        except OverflowError:
            return math.inf  # rejected later, like every number that no optimizer can use
    raise ConfigError(
        f"param group {group['name']!r}: got {name}={value!r}, wanted a number; no row changed"
    )


def _is_immutable(value: object) -> bool:
    """Return whether a value is immutable, so that it changes only when the group gets another value."""
    if type(value) is tuple:
        return all(map(_is_immutable, value))
    return type(value) in IMMUTABLE_TYPES


def _without_params(group: dict) -> dict:
    return {name: value for name, value in group.items() if name != "params"}
