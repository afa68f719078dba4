"""`colonnade churn`: measure how much the predictions of two runs differ."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from colonnade.cli.predict import AtOption
from colonnade.errors import ConfigError, DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from colonnade.batch import Batch
    from colonnade.config.run import DataConfig
    from colonnade.predict.churn import Estimate
    from colonnade.terminal import Terminal

EXAMPLES = (
    "Train twice with other seeds, and read how reproducible a prediction is. Compare churn at equal log loss: a model "
    "that has learned little has little churn.\n\n"
    "[bold]Examples[/bold]\n\n  colonnade churn runs/seed0 runs/seed1\n\n"
    "  colonnade churn runs/old runs/new --group user"
)


OTHER_OPTIONS = frozenset(("schema", "label", "seed", "shuffle_window", "threads", "join"))
"""Options of data that do not decide which samples are in a part."""


@dataclass(frozen=True)
class Predictions:
    """Predictions of a run for the S samples of a part, for T labels."""

    step: int
    samples: Mapping[str, Any]
    """Settings by which the run's data say which samples these are, by name."""
    label_names: tuple[str, ...]
    scores: NDArray  # (S, T) float64
    labels: NDArray  # (S, T)
    weights: NDArray | None  # (S,)
    groups: NDArray | None  # (S,) int64


def churn(
    first: Annotated[Path, typer.Argument(help="Run folder.", metavar="RUN")],
    second: Annotated[
        Path, typer.Argument(help="Run folder on the same test samples.", metavar="RUN")
    ],
    group: Annotated[
        str | None,
        typer.Option(
            help="Column of ids: the 10 best samples of each of its values are compared, too. Default: the data's "
            "column of groups, if there is one."
        ),
    ] = None,
    part: Annotated[str, typer.Option(help="train, validation or test.")] = "test",
    at: AtOption = None,
) -> None:
    """Measure how much the predictions of two runs differ for the same samples.

    Standard errors are by the jackknife over 64 blocks of samples, or of groups."""
    from colonnade.terminal import Terminal

    print_churn(Terminal(), (first, second), part, at=at, group=group)


def print_churn(
    console: Terminal,
    runs: Sequence[Path],
    part: str = "test",
    *,
    at: str | None = None,
    group: str | None = None,
) -> None:
    """Print the churn of each run after the first, beside the first."""
    from colonnade.terminal import build_grid

    first = predict_part(runs[0], part, at=at, group=group)
    for run in runs[1:]:
        second = predict_part(run, part, at=at, group=group)
        console.print(
            f"{runs[0]} (step {first.step}) and {run} (step {second.step}), {part}: {len(first.labels):,} samples",
            highlight=False,
        )
        for label, measured in compare_predictions(first, second):
            rows = [(name, *format_estimate(estimate)) for name, estimate in measured.items()]
            console.print(build_grid((label, "value", "standard error"), rows))


def predict_part(run: Path, part: str, *, at: str | None, group: str | None) -> Predictions:
    """Predict a part of the run's data. Raises ConfigError for a model without probabilities or an unknown group."""
    import numpy as np

    from colonnade.cli.score_inputs import open_inputs
    from colonnade.predict import Predictor
    from colonnade.train.objective import check_scores_samples

    with Predictor.open(run, at=at) as predictor:
        check_scores_samples(predictor.model)
        config = predictor.config
        assert config is not None  # since the model could be built
        source = open_inputs(config.data.name, config.data.path, config.data.options, part=part)
        columns: dict[str, list[NDArray]] = defaultdict(list)
        for batch, scores in predictor.scores(source.batches(config.train.samples_per_step)):
            if batch.label is None:
                raise DataError(f"{run}: got a {part} part without labels, wanted some")
            values = {
                "scores": scores,
                "labels": batch.label,
                "weights": batch.sample_weight,
                "groups": _get_groups(batch, group),
            }
            for name, column in values.items():
                if column is not None:
                    columns[name].append(column.cpu().numpy())
        if not columns:
            raise DataError(f"{run}: got no samples in the {part} part, wanted some")
        arrays = {name: np.concatenate(parts) for name, parts in columns.items()}
        return Predictions(
            predictor.step,
            list_sample_settings(config.data, part),
            predictor.labels,
            arrays["scores"],
            arrays["labels"].astype(np.float64),
            arrays.get("weights"),
            arrays.get("groups"),
        )


def list_sample_settings(data: DataConfig, part: str) -> dict[str, Any]:
    """Return the settings that decide which samples are in a part: its own file, else the path and the split."""
    options = {name: value for name, value in data.options.items() if value is not None}
    if part in options:
        return {f"data.options.{part}": options[part]}
    others = ("validation",) if part == "test" else ()
    names = [n for n in options if n not in OTHER_OPTIONS and not n.startswith(others)]
    source = {"data.name": data.name, "data.path": data.path}
    return {**source, **{f"data.options.{name}": options[name] for name in names}}


def _get_groups(batch: Batch, column: str | None) -> Tensor | None:
    """Return the ids of a column (B,), or the batch's own groups if it is None."""
    if column is None:
        return batch.group
    names = [name for name, ids in batch.ids.items() if ids.offsets is None]
    if column not in names:
        raise ConfigError(
            f"got --group {column}, wanted a column with one id a sample: {', '.join(names)}"
        )
    return batch.ids[column].values


def compare_predictions(
    first: Predictions, second: Predictions
) -> Iterator[tuple[str, dict[str, Estimate]]]:
    """Yield the name of each label with the churn of its predictions. Raises DataError for other samples or labels."""
    import numpy as np

    from colonnade.predict.churn import measure_churn

    if first.label_names != second.label_names:
        raise DataError(
            f"got runs with the labels {', '.join(first.label_names)} and {', '.join(second.label_names)}, "
            "wanted the same"
        )
    for name in {**first.samples, **second.samples}:
        one, other = (repr(p.samples.get(name)) for p in (first, second))
        if one != other:
            raise DataError(
                f"got runs with other samples: {name} is {one[:80]} and {other[:80]}, wanted the same: train both with "
                "one --set data.options.test=FILE"
            )
    columns = [
        (p.labels, np.ones(len(p.labels)) if p.weights is None else p.weights)
        for p in (first, second)
    ]
    if not all(np.array_equal(a, b, equal_nan=True) for a, b in zip(*columns, strict=True)):
        raise DataError(
            f"got runs with other samples ({len(first.labels):,} and {len(second.labels):,}, or other labels or "
            "weights), wanted the same test part: train both with one --set data.options.test=FILE"
        )
    for task, name in enumerate(first.label_names):
        yield (
            name,
            measure_churn(
                first.scores[:, task],
                second.scores[:, task],
                first.labels[:, task],
                weights=first.weights,
                groups=first.groups,
            ),
        )


def format_estimate(estimate: Estimate) -> Sequence[str]:
    """Return the texts of a value and of its standard error."""
    from math import isnan

    return tuple("-" if isnan(x) else f"{x:.5f}" for x in estimate)
