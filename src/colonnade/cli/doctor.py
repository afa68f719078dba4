"""`colonnade doctor`: list what this machine has and what it means for training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer


def doctor(
    folder: Annotated[
        Path,
        typer.Option("--place", help="Folder for run folders; the disk shown is the one it is on."),
    ] = Path("runs"),
) -> None:
    """List processor, memory, huge pages, io_uring, disk, GPU, libraries, and what each means for training."""
    from rich.text import Text

    from colonnade.machine import collect_machine_facts
    from colonnade.terminal import PLAIN_GRID, Terminal, build_grid

    columns = ("item", "this machine", "what it means")
    lines = describe_machine(collect_machine_facts(folder))
    rows = [(Text(item, style="bold"), *texts) for item, *texts in lines]
    Terminal().print(build_grid(columns, rows, text_columns=range(3), **PLAIN_GRID))


def describe_machine(facts: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return a line (item, this machine's value, what it means) for each of the `collect_machine_facts`."""
    versions = facts["versions"]
    gpus = facts["gpus"]
    pages = facts["huge_pages"]
    usable = f"{facts['usable_processors']} of {facts['processors']} usable"
    pages_meaning = _HUGE_PAGES.get(pages, "random reads of rows may be slower")
    return [
        ("colonnade", str(versions["colonnade"]), ""),
        ("torch", str(versions["torch"]), f"{facts['threads']} threads; fewer with train.threads"),
        ("python", facts["python"], ""),
        ("processor", f"{facts['processor']}, {usable}", _explain_threads(facts)),
        ("features", ", ".join(facts["features"]) or "none of those used", ""),
        ("native path", facts["isa"], _NATIVE_PATHS.get(facts["isa"], "")),
        ("memory", _describe_memory(facts), _explain_memory(facts)),
        ("huge pages", pages or "cannot tell", pages_meaning),
        (
            "disk",
            _describe_disk(facts),
            "rows beyond memory and checkpoints are stored here" + _warn_of_rotation(facts),
        ),
        ("io_uring", facts["io_uring"], _IO_URING[facts["io_uring"] == "yes"]),
        ("GPU", ", ".join(gpus) or "none", _GPU[bool(gpus)]),
        ("ranks", "gloo", _RANKS),
    ]


_NATIVE_PATHS = {
    "avx512": "vectors of 512 bits",
    "avx2": "vectors of 256 bits; results equal those of any other path bit for bit",
    "portable": "no vector instructions of this processor are used: slower, the same results bit for bit",
}
_GPU = {
    True: "can run the dense network; stores rows with plan.memory.hbm, cached rows with plan.cache.tier=hbm",
    False: "the dense network trains on the processor",
}
_IO_URING = {
    True: "rows beyond memory are read with it",
    False: "rows beyond memory are read by a few threads instead",
}
_RANKS = (
    "--ranks listens on 127.0.0.1, where other users of this machine can connect. torchrun's ranks and store listen on "
    "the network, and its c10d rendezvous (also --standalone) lets anyone who connects run commands as you: "
    "docs/howto/failures.md"
)
_HUGE_PAGES = {
    "always": "tables use them",
    "madvise": "tables use them",
    "never": "random reads of rows take about twice as long; "
    "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
}


def _explain_threads(facts: Mapping[str, Any]) -> str:
    usable = facts["usable_processors"] or 1
    if usable < 2:
        return "only one: preparing batches and training alternate"
    return "batches are prepared during training"


def _warn_of_rotation(facts: Mapping[str, Any]) -> str:
    return (
        "; the system reports a rotating disk: slow at random reads"
        if facts["disk_rotates"]
        else ""
    )


def _describe_memory(facts: Mapping[str, Any]) -> str:
    total = facts["memory_bytes"]
    free = facts["available_memory_bytes"]
    if total is None or free is None:
        return "cannot tell"
    limit = facts["memory_limit_bytes"]
    text = f"{total / 2**30:.1f} GiB, {free / 2**30:.1f} free"
    return f"{text}, limit {limit / 2**30:.1f} GiB here" if limit and limit < total else text


def _explain_memory(facts: Mapping[str, Any]) -> str:
    memory_limits = [v for v in (facts["available_memory_bytes"], facts["memory_limit_bytes"]) if v]
    if not memory_limits:
        return ""
    rows = int(min(memory_limits) * 0.6 / (16 * 4 + 12 + 16))
    return f"room for about {rows / 1e6:,.0f} million rows of 16 floats; beyond it set plan.memory.dram"


def _describe_disk(facts: Mapping[str, Any]) -> str:
    free = facts["disk_free_bytes"]
    return facts["disk"] if free is None else f"{free / 2**30:,.0f} GiB free at {facts['disk']}"
