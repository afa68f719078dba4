"""Model card and config.json of an export, as the Hugging Face Hub shows them.

EXPORT/README.md      card: front matter, metrics, data, how to load it
EXPORT/config.json    model and its settings, inputs, versions
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from colonnade.export.tensors import ProgramInput
from colonnade.publish.model_files import Export
from colonnade.train.metrics_file import FILE_NAME, read_metrics_lines

CARD = "README.md"
CONFIG = "config.json"
METRICS = {
    "auc": "AUC",
    "log_loss": "log loss",
    "normalized_entropy": "normalized entropy",
    "expected_calibration_error": "expected calibration error",
    "group_auc": "AUC within groups",
}
NOT_METRICS = ("step", "time", "epoch", "num_samples", "positive_rate")


def read_metrics(run_folder: Path, step: int) -> dict[str, float]:
    """Return the metrics that a run recorded of a checkpoint, by name such as test_auc; {} if it has none."""
    metrics: dict[str, float] = {}
    for line in read_metrics_lines(run_folder / FILE_NAME):
        if line["kind"] == "evaluate" and line["step"] == step:
            metrics |= {
                name: value
                for name, value in line.items()
                if isinstance(value, int | float) and not name.endswith(NOT_METRICS)
            }
    return metrics


def format_config(export: Export, inputs: Sequence[ProgramInput]) -> str:
    """Return the content of config.json."""
    config = export.config or {}
    model = {k: v for k, v in config.get("model", {}).items() if v is not None}
    fields = {
        "library_name": "colonnade",
        "model_type": model.pop("name", None),
        "colonnade_version": export.colonnade,
        "run": export.run,
        "step": export.step,
        "model": model,
        "inputs": [{"name": i.name, "dtype": i.dtype, "shape": list(i.shape)} for i in inputs],
        "labels": list(export.schema.labels),
        "tables": [
            {"name": t.name, "dim": t.dim, "rows": t.rows, "trained_rows": t.count}
            for t in export.tables
        ],
    }
    return json.dumps(fields, indent=2) + "\n"


def format_card(
    model_name: str, export: Export, inputs: Sequence[ProgramInput], metrics: Mapping[str, float]
) -> str:
    """Return the content of README.md."""
    config = export.config or {}
    model = config.get("model", {}).get("name") or "own model"
    data = config.get("data", {}).get("name") or "own data"
    front = yaml.safe_dump(
        _build_front_matter(model_name, model, data, metrics), sort_keys=False, allow_unicode=True
    )
    trained = sum(table.count for table in export.tables)
    weights = sum(table.count * table.dim for table in export.tables)
    sections = [
        f"---\n{front}---\n\n# {_escape(model_name)}",
        f"A `{model}` trained by Colonnade {export.colonnade} on `{data}` data: step {export.step:,} of run "
        f"`{export.run}`, {len(export.tables)} embedding tables with {trained:,} trained rows ({weights:,} weights).",
        "## Metrics\n\n" + _format_metrics(metrics),
        "## Inputs\n\n" + _format_inputs(inputs),
        "## Use\n\n```python\nfrom colonnade import Predictor\n\n"
        'predictor = Predictor.open("path/to/this/folder")\n'
        f"probabilities = predictor(batch)  # (samples, {len(export.schema.labels)}), for "
        f"{', '.join(export.schema.labels)}\n```\n\n"
        "`colonnade predict FOLDER --path FILES --output scores.parquet` scores files, and `colonnade verify FOLDER` "
        "checks every byte. All weights are safetensors; nothing is unpickled.",
        "## Files\n\n" + _format_files(export),
    ]
    return "\n\n".join(sections) + "\n"


def _build_front_matter(
    name: str, model: str, data: str, metrics: Mapping[str, float]
) -> dict[str, Any]:
    front: dict[str, Any] = {
        "library_name": "colonnade",
        "pipeline_tag": "tabular-classification",
        "tags": ["recommendation", "click-through-rate", "embeddings", model],
    }
    if metrics:
        results = [
            {"type": metric, "value": value, "name": _describe_metric(metric)}
            for metric, value in metrics.items()
        ]
        front["model-index"] = [
            {
                "name": name,
                "results": [
                    {
                        "task": {"type": "tabular-classification"},
                        "dataset": {"type": data, "name": data},
                        "metrics": results,
                    }
                ],
            }
        ]
    return front


def _describe_metric(name: str) -> str:
    part, _, metric = name.partition("_")
    return f"{METRICS.get(metric, metric.replace('_', ' '))} ({part})"


def _format_metrics(metrics: Mapping[str, float]) -> str:
    if not metrics:
        return "The run recorded none for this step."
    rows = [f"| {_describe_metric(name)} | {value:.6g} |" for name, value in metrics.items()]
    return "\n".join(["| metric | value |", "|---|---|", *rows])


def _format_inputs(inputs: Sequence[ProgramInput]) -> str:
    rows = [
        f"| `{_escape(i.name)}` | {i.dtype} | ({', '.join(map(str, i.shape))}{',' * (len(i.shape) == 1)}) |"
        for i in inputs
    ]
    return "\n".join(["| name | type | shape |", "|---|---|---|", *rows])


def _format_files(export: Export) -> str:
    rows = [
        f"| `{table.file}` | table `{_escape(table.name)}`: ids and {table.count:,} rows of {table.dim} {table.dtype} |"
        for table in export.tables
    ]
    head = ["| file | content |", "|---|---|", "| `dense.safetensors` | the dense network |"]
    return "\n".join([*head, *rows, "| `model.json` | description and checksums of all weights |"])


def _escape(text: str) -> str:
    """Escape what would end a cell or a line of a table."""
    return " ".join(text.replace("|", "\\|").replace("`", "'").split())


def write_card(folder: Path, card: str, config: str) -> None:
    """Write README.md and config.json to an export."""
    (folder / CARD).write_text(card, encoding="utf-8")
    (folder / CONFIG).write_text(config, encoding="utf-8")
