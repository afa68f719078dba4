"""`colonnade doctor`: what this machine has, and what follows."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from rich.console import Console

import colonnade
from colonnade import _native


def doctor() -> None:
    """Versions, processor features, threads, huge pages."""
    console = Console(highlight=False)
    pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    huge = pages.read_text().split("[")[1].split("]")[0] if pages.is_file() else "unknown"
    follows = {
        "always": "tables use them",
        "madvise": "tables use them",
        "never": "random reads of rows take about twice as long; set it to madvise",
    }
    facts = {
        "colonnade": colonnade.__version__,
        "torch": torch.__version__,
        "processors": str(os.cpu_count()),
        "torch threads": str(torch.get_num_threads()),
        "native path": f"{_native.isa()} (has {', '.join(_native.available_isas())})",
        "huge pages": f"{huge}: {follows.get(huge, 'cannot tell')}",
        "GPU": "none" if not torch.cuda.is_available() else torch.cuda.get_device_name(),
    }
    for name, value in facts.items():
        console.print(f"{name:>14}  {value}")
