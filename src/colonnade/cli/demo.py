"""`colonnade demo`: train a model for about a minute on a stream with a known best AUC."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer

EVALUATION_BATCH = 16384
EXAMPLES = "[bold]Examples[/bold]\n\n  colonnade demo\n\n  colonnade demo --samples 500000 --ranks 2 --run runs/two"


def demo(
    run: Annotated[Path | None, typer.Option(help="Run folder; default: runs/demo-<time>.")] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Processes on this machine.")] = 1,
    samples: Annotated[
        int,
        typer.Option(
            min=1000, help="Training samples; the default takes about 40 seconds on two cores."
        ),
    ] = 3_000_000,
) -> None:
    """Train a DLRM on a generated stream shaped like Criteo's: no download, no GPU."""
    from colonnade.cli.report import report
    from colonnade.cli.train import choose_run_folder, train_run
    from colonnade.config.run import override
    from colonnade.data import open_source
    from colonnade.run.defaults import preset
    from colonnade.terminal import Terminal
    from colonnade.train.metrics import ceiling

    console = Terminal(quiet=os.environ.get("RANK", "0") != "0")
    settings = {"data.options.num_train": samples}
    config = override(preset("synthetic"), settings)
    folder = choose_run_folder(run, "demo")
    console.print("A click stream shaped like Criteo's: 13 numbers and 26 categories per sample.")
    started = time.perf_counter()
    summary = train_run(config, folder, ranks)
    if not summary or summary["stopped"] or "test_auc" not in summary["metrics"]:
        return  # another rank under torchrun, or a stopped run
    data = open_source("synthetic", **config.data.options)
    assert data.test is not None
    best_auc = ceiling(data.test.batches(EVALUATION_BATCH))["auc"]
    console.print(
        f"test AUC {summary['metrics']['test_auc']:.4f}, the best any model could reach on "
        f"this stream is {best_auc:.4f}; {time.perf_counter() - started:.0f} s in all",
        style="bold",
    )
    report(folder)
