"""What a state_dict says of rows, which it does not hold: the commit that does, by run and step, as a tensor."""

from __future__ import annotations

import json

import torch
from torch import Tensor


def to_tensor(run: str, step: int) -> Tensor:
    """JSON as bytes, uint8."""
    token = json.dumps({"run": run, "step": step}).encode()
    return torch.frombuffer(bytearray(token), dtype=torch.uint8).clone()


def from_tensor(state: Tensor) -> tuple[str, int]:
    """(run, step)."""
    token = json.loads(bytes(state.cpu().numpy()))
    return token["run"], token["step"]


def other_rows(said: tuple[str, int] | None, here: tuple[str, int]) -> str:
    """Where a state_dict is of other rows than those here; both (run, step), run "" where there is none."""
    run, step = said or ("", 0)
    rows = f"step {here[1]} of run {here[0]}" if here[0] else f"no commit (step {here[1]})"
    return (
        f"got a state_dict whose rows are the commit of step {step} of run {run}, the rows here are {rows}; "
        f"open that run at step {step}, or leave the keys ending in _extra_state out to load the dense weights alone"
    )
