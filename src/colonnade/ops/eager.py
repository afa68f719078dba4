"""Methods that `torch.compile` leaves as they are."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

T = TypeVar("T", bound=Callable[..., Any])


def run_eagerly(method: T) -> T:
    """Make a compiled model call this method outside its graphs: one clean break before it, one after.

    `torch.compiler.disable`, but the compiler, which takes longer to import than torch, is imported by programs that
    use it alone.
    """
    disabled: list[Callable[..., Any]] = []

    @wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return method(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(method))
        return disabled[0](*args, **kwargs)

    # Read by the compiler, which then breaks its graph here and does not look inside.
    marks: Any = run
    marks._torchdynamo_disable = True
    marks._torchdynamo_disable_msg = "rows are looked up outside of compiled graphs"
    result: Any = run
    return result
