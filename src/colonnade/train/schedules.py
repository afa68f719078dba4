"""Learning rate schedules: a pure function of the step, passed to torch's LambdaLR."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from colonnade.config.run import ScheduleConfig
from colonnade.errors import ConfigError


def compute_learning_rate_factor(settings: ScheduleConfig, total_steps: int, step: int) -> float:
    """Return the factor of the learning rate at `step` (from 0); `final` from `total_steps` on."""
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    if settings.name == "constant":
        return 1.0
    progress = min(
        1.0, (step - settings.warmup_steps) / max(1, total_steps - settings.warmup_steps)
    )
    if settings.name == "linear":
        return 1.0 + (settings.final - 1.0) * progress
    if settings.name == "exponential":
        return settings.final**progress
    return settings.final + (1.0 - settings.final) * (1.0 + math.cos(math.pi * progress)) / 2


def build_schedule(
    optimizer: Optimizer, settings: ScheduleConfig, run_steps: int | None
) -> LRScheduler | None:
    """Build the schedule of an optimizer; None if the learning rate is constant.

    run_steps: steps of the whole run, None if unknown. Raises ConfigError if the schedule needs them.
    """
    if settings.name == "constant" and not settings.warmup_steps:
        return None
    total_steps = settings.total_steps or run_steps
    if total_steps is None and settings.name != "constant":
        raise ConfigError(
            f"got the {settings.name} schedule for a run of unknown length; set its total_steps, or train.max_steps"
        )
    return LambdaLR(optimizer, partial(compute_learning_rate_factor, settings, total_steps or 0))


def restore_schedule(
    schedule: LRScheduler, state: dict[str, Any], groups: list[dict[str, Any]], step: int
) -> None:
    """Set a schedule to `step`.

    A schedule that is a function of the step uses this run's learning rates. Any other is restored from its `state`
    and the saved settings of the param groups (`groups`, without their parameters).
    """
    if isinstance(schedule, LambdaLR):
        schedule.last_epoch = step
        rates = [
            base * function(step)
            for base, function in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
        ]
        schedule._last_lr = rates
        for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        return
    schedule.load_state_dict(state)
    for group, settings in zip(schedule.optimizer.param_groups, groups, strict=True):
        group.update({name: value for name, value in settings.items() if name != "params"})
