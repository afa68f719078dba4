"""How learning rates change with the steps: a pure function of numbers, given to torch's LambdaLR."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from colonnade.config.run import ScheduleConfig
from colonnade.errors import ConfigError


def factor(settings: ScheduleConfig, total_steps: int, step: int) -> float:
    """What the learning rate of step `step` (from 0) is multiplied with; `final` from `total_steps` on."""
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    if settings.name == "constant":
        return 1.0
    done = min(1.0, (step - settings.warmup_steps) / max(1, total_steps - settings.warmup_steps))
    if settings.name == "linear":
        return 1.0 + (settings.final - 1.0) * done
    if settings.name == "exponential":
        return settings.final**done
    return settings.final + (1.0 - settings.final) * (1.0 + math.cos(math.pi * done)) / 2


def build_schedule(
    optimizer: Optimizer, settings: ScheduleConfig, run_steps: int | None
) -> LRScheduler | None:
    """None: the learning rate stays. `run_steps` of the whole run, None where nobody knows."""
    if settings.name == "constant" and not settings.warmup_steps:
        return None
    total_steps = settings.total_steps or run_steps
    if total_steps is None and settings.name != "constant":
        raise ConfigError(
            f"got the {settings.name} schedule for a run of unknown length; set its total_steps, or train.max_steps"
        )
    return LambdaLR(optimizer, partial(factor, settings, total_steps or 0))


def restore_schedule(
    schedule: LRScheduler, state: dict[str, Any], groups: list[dict[str, Any]], step: int
) -> None:
    """Go on at `step`. A schedule that is a function of the step starts from this run's learning rates; any other
    from its `state` and the param groups' settings as they were saved (`groups`, without their parameters)."""
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
