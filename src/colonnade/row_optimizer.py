"""Optimizer of rows: an ordinary torch.optim.Optimizer with one param group per table, or per part of one."""

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
from colonnade.exchange.cached_state import Before, settled
from colonnade.pipeline.gradients import StepGradients

# Columns of `_native.update`'s settings: single numbers by name, then the others.
SETTINGS = ("lr", "weight_decay", "eps", "", "", "nesterov", "l1", "l2", "beta")
BETAS = 3
LIMITS = ((9, "max_norm"), (10, "clip_value"), (11, "weight_bound"))
GRADIENT_SCALE = 12
NUM_SETTINGS = 16
PLAIN = (int, float, str, bool, NoneType)


class RowOptimizer(Optimizer):
    """Optimizer that applies the gradients recorded on `collection`: per row, their sum, once per `step()`.

    One param group per table, or per part of a table, in declared order. Each carries `name` ("item",
    "item.deep") and the settings of its optimizer (`colonnade.optimizers`), so schedulers work as on any
    optimizer. Several backwards before a step accumulate, and so do several batches. Only touched rows
    change (lazy); where a row's parts have several optimizers, all of them run for a touched row.
    """

    def __init__(self, collection: EmbeddingCollection, *, clip_value: float | None = None) -> None:
        """Make one param group for each part. `clip_value`: every element of a row's summed gradient is first clamped
        to +-this (per group)."""
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
                    "params": [torch.empty(0, part.dim)],  # a placeholder: rows are no tensor
                    "name": f"{table.name}.{part.name}" if part.name else table.name,
                    **part.optimizer.settings(),
                    "max_norm": table.max_norm,
                    "clip_value": clip_value,
                    "weight_bound": table.weight_bound,
                }
            )
        # Defaults that all groups have: torch's schedulers look here for settings they may cycle (momentum, betas).
        common = set.intersection(*(set(group) for group in groups)) - {"params", "name"}
        super().__init__(groups, {name: groups[0][name] for name in common})
        self._is_built = True
        self._kinds = torch.tensor(
            [part.optimizer.kind for _, part in declaration.parts], dtype=torch.int32
        )
        self._gradient_scale = 1.0
        self._checked_groups: list[dict] = []  # copies of the groups that `_checked` was made from
        self._checked = torch.empty(0)  # (P, 16) float64, with the gradients' scale:
        self._checked_scale = 0.0

    @property
    def gradients(self) -> StepGradients:
        """Gradients since the last step of an open collection."""
        return self.collection.pipeline.gradients

    @torch.no_grad()
    def step(self, closure: Callable | None = None, *, agreed: bool = False):
        """Apply the recorded gradients. Collective. Raises NonFiniteError, on every rank and with nothing applied, for
        a gradient that is NaN or inf on any of them. `agreed`: the ranks have already agreed that all are finite."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self.collection.caller:
            self.collection.ensure_open()
            error: ConfigError | None = None
            try:
                settings = self._own_settings()
            except ConfigError as own_error:
                error, settings = own_error, torch.empty(0)
            if not agreed:
                self._agree(error)
            if error is not None:
                raise error
            self.collection.pipeline.push(self._kinds, settings)
            self._gradient_scale = 1.0
        return loss

    @torch.no_grad()
    def scaled_step(self, scaler: torch.amp.GradScaler, *dense: Optimizer) -> bool:
        """Step rows and `dense` together with a gradient scaler. Collective.

        Replaces `scaler.step` of each optimizer and `scaler.update`: all gradients are divided by the scale, all
        optimizers step, and the scale may grow. If a gradient is NaN or inf on any rank, no optimizer steps on any
        rank, and the scale is lowered on all. Returns whether they stepped.

        Gradients of `dense` must already be summed over ranks. Raises ConfigError where `step` completes some of them.
        """
        self.collection.ensure_open()
        if self.collection.exchange.pushed_parameters:
            raise ConfigError(
                "scaled_step: got exchange partials, which adds gradients of dense weights when rows are pushed,"
                " after they were divided by the scale; choose pooled, or train in bfloat16 without a scale"
            )
        if scaler.is_enabled() and self.collection.cached:
            raise ConfigError(
                "scaled_step: got a plan with plan.cache, where no batch may be skipped, and a scale that skips steps; "
                "leave plan.cache out, or train in bfloat16 without a scale"
            )
        scale = scaler.get_scale()
        for optimizer in dense:
            scaler.unscale_(optimizer)
        of_dense = [
            p.grad
            for optimizer in dense
            for group in optimizer.param_groups
            for p in group["params"]
        ]
        finite = all(bool(torch.isfinite(grad).all()) for grad in of_dense if grad is not None)
        if self._agree_finite(finite and self.gradients.are_finite()):
            self.scale_grad_(1 / scale)
            self.step(agreed=True)
            for optimizer in dense:
                scaler.step(optimizer)
            scaler.update()
            return True
        self.zero_grad()
        self.collection.forget()
        if scaler.is_enabled():
            scaler.update(scale * scaler.get_backoff_factor())
        return False

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for `copy.deepcopy` and pickle, which take the collection along with its optimizer."""
        own = ("collection", "_is_built", "_kinds", "_gradient_scale")
        anew = {"_checked_groups": [], "_checked": torch.empty(0), "_checked_scale": 0.0}
        return super().__getstate__() | {name: self.__dict__[name] for name in own} | anew

    def add_param_group(self, param_group: dict) -> None:
        if getattr(self, "_is_built", False):
            raise ConfigError(
                "RowOptimizer: got another param group; its groups are the collection's tables"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict:
        """Return the groups' settings, and `state`: by group, ids (N,) and state (N, S) of the trained rows. Raises
        CheckpointError where these are not all in this process's memory, or too large, as the collection's
        `state_dict` does."""
        return {**super().state_dict(), "state": self.collection.optimizer_states()}

    def load_state_dict(self, state_dict: dict) -> None:
        """Load a `state_dict`. Raises ConfigError unless the groups are those of the same tables and optimizers, and
        CheckpointError for state of other rows than the collection has: load the model first."""
        bounds = {group["name"]: group["weight_bound"] for group in self.param_groups}
        # A state saved before groups had a weight_bound keeps this optimizer's.
        groups = [
            {"weight_bound": bounds.get(group.get("name")), **group}
            for group in state_dict["param_groups"]
        ]
        states, state_dict = state_dict["state"], {"state": {}, "param_groups": groups}
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
        norm they had. Collective; call it between the last backward and `step()`.

        Like torch.nn.utils.clip_grad_norm_, for rows: a row's gradients are summed first. Raises as `step` does.
        """
        if not max_norm > 0:
            raise ConfigError(f"clip_grad_norm_: got max_norm={max_norm}, wanted more than 0")
        self.collection.ensure_open()
        if not agreed and self.gradients.pushed is None:
            self._agree()
        norm = math.sqrt(self.gradients.squared_norm(self.collection.step)) * self._gradient_scale
        if not math.isfinite(norm):
            self._refuse("the norm of the summed gradients")
        self._gradient_scale *= min(1.0, max_norm / (norm + 1e-6))  # as torch's
        return torch.tensor(norm)

    def scale_grad_(self, factor: float) -> None:
        """Multiply the rows' gradients, between the last backward and `step()`, by the same factor on every rank."""
        if not 0 <= factor < math.inf:
            raise ConfigError(
                f"scale_grad_: got factor={factor}, wanted a finite number, 0 or more"
            )
        self._gradient_scale *= factor

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients recorded since the last step."""
        self._gradient_scale = 1.0
        if self.collection.is_open:
            self.gradients.clear()

    @contextmanager
    def settled(self) -> Iterator[list[Before]]:
        """Apply gradients pending at copies of rows (`Plan`'s caches) to the owners' rows until exit. Collective,
        between steps.

        Each changed row gets one update with the current settings, and is restored at exit. Inside, evaluate, read rows
        or checkpoint. Yields by slice the changed rows as they were before; none where there is no cache."""
        self.collection.ensure_open()
        self.collection.pipeline.updates.settle()
        cached = self.collection.cached
        if cached is None:
            yield []
            return
        rules = map(self.collection.slices.by_part, (self._kinds, self._own_settings()))
        with settled(cached, *rules) as before:
            yield before

    def _agree(self, error: ConfigError | None = None) -> None:
        """Check on all ranks, in one collective, that settings are valid, and gradients finite unless they were pushed.

        error: of this rank's settings. Raises ConfigError or NonFiniteError, on every rank."""
        gradients = self.collection.pipeline.gradients
        is_pushed, votes = gradients.pushed is not None, [float(error is not None)]
        if not is_pushed:
            votes += [float(not gradients.are_finite()), *gradients.has_recorded()]
        totals = self._sum(votes)
        if totals[0]:
            raise error or ConfigError(
                "another rank has settings that no rule can use; no row was changed"
            )
        if is_pushed:
            return
        gradients.drop_unused(totals[2:])
        if totals[1]:
            self._refuse("an embedding gradient")

    def _agree_finite(self, finite: bool) -> bool:
        """Return whether `finite` is true on every rank, and drop batches that no rank has gradients for.
        Collective."""
        totals = self._sum([float(not finite), *self.gradients.has_recorded()])
        self.gradients.drop_unused(totals[1:])
        return not totals[0]

    def _sum(self, votes: list[float]) -> list[float]:
        """Return the sums of votes over all ranks. Collective."""
        mesh = self.collection.mesh
        if mesh.num_ranks == 1:
            return votes
        return mesh.all_reduce("push", torch.tensor(votes), traffic_tag="control").tolist()

    def _refuse(self, what: str) -> NoReturn:
        self.zero_grad()
        self.collection.forget()
        raise NonFiniteError(
            f"step {self.collection.step}: got NaN or inf in {what}, wanted finite "
            "numbers; no row was changed on any rank. Lower the learning rate or clip the loss"
        )

    def _own_settings(self) -> Tensor:
        """Return this rank's settings, (P, 16) float64, valid until the next call. Raises ConfigError for a number that
        no rule can use.

        They are read and checked again only if a group has changed since the step before: in Python, to read 26 groups
        takes a noticeable part of a step."""
        if not self._are_groups_unchanged():
            self._checked, self._checked_groups = self._read_settings(), []
            self._checked_scale = 0.0
            groups = [dict(group) for group in self.param_groups]
            # Otherwise a value, such as a tensor or a list, may change in place.
            if all(
                _is_plain(v) for group in groups for name, v in group.items() if name != "params"
            ):
                self._checked_groups = groups
        if self._checked_scale != self._gradient_scale:
            self._checked[:, GRADIENT_SCALE] = self._checked_scale = self._gradient_scale
        return self._checked

    def _are_groups_unchanged(self) -> bool:
        """Return whether the groups equal those read last, none of which can change in place."""
        try:
            return bool(self._checked_groups) and self.param_groups == self._checked_groups
        except (RuntimeError, TypeError, ValueError):  # a tensor or an array instead of a number
            return False

    def _read_settings(self) -> Tensor:
        settings: list[list[float]] = []
        slices = self.collection.slices
        for group in self.param_groups:
            row = [0.0] * NUM_SETTINGS
            for column, name in enumerate(SETTINGS):
                row[column] = _read_number(group, name, group.get(name, 0.0))
            betas = group.get("betas") or (group.get("momentum", 0.0), 0.0)
            row[BETAS : BETAS + 2] = [_read_number(group, "betas", value) for value in betas]
            for column, name in LIMITS:
                value = math.inf if group[name] is None else group[name]
                row[column] = _read_number(group, name, value)
            limits = row[LIMITS[0][0] : LIMITS[-1][0] + 1]
            if not (
                all(number >= 0 for number in row)
                and all(number < math.inf for number in row[: LIMITS[0][0]])
                and all(number < 1 for number in row[BETAS : BETAS + 2])
                and all(number > 0 for number in limits)
            ):
                raise ConfigError(
                    f"param group {group['name']!r}: got a setting below 0, NaN or too large in {_shown(group)}; "
                    "no row changed"
                )
            if group.get("momentum") and not self._kinds[len(settings)]:
                raise ConfigError(
                    f"param group {group['name']!r}: got momentum={group['momentum']} for rows that keep none; "
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


def _read_number(group: dict, name: str, value: Any) -> float:
    """Return a setting as a number. Raises ConfigError for None, text and anything else that is no number."""
    if isinstance(value, int | float | Tensor | np.number):
        try:
            return float(value)
        except OverflowError:
            return math.inf  # refused, as every number that no rule can use
    raise ConfigError(
        f"param group {group['name']!r}: got {name}={value!r}, wanted a number; no row changed"
    )


def _is_plain(value: object) -> bool:
    """Return whether a value is immutable, so that it changes only if the group is assigned another one."""
    if type(value) is tuple:
        return all(map(_is_plain, value))
    return type(value) in PLAIN


def _shown(group: dict) -> dict:
    return {name: value for name, value in group.items() if name != "params"}
