"""Export of a trained model for other programs: torch.export and AOTInductor, NVIDIA Triton, the Hugging Face Hub.

Importing this module registers the operator `colonnade::lookup` and those of the dense part, so that
`torch.export.load("exported/model.pt2")` works.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from torch import nn

from colonnade.embedding import find_collection
from colonnade.export import hub as hub_files
from colonnade.export import triton as triton_files
from colonnade.export.program import export_dense_program, export_program, get_schema
from colonnade.export.tensors import ProgramInput, build_input_batch, list_inputs, to_tensors
from colonnade.export.torch_files import load_program, write_programs
from colonnade.predict.predictor import Predictor
from colonnade.publish.model_files import read_export
from colonnade.publish.model_writer import export_run, stage_folder

__all__ = [
    "ProgramInput",
    "export_dense_program",
    "export_model",
    "export_program",
    "list_model_inputs",
    "load_program",
    "score_tensors",
    "to_tensors",
]


def export_model(
    run: Path | str,
    destination: Path | str,
    *,
    at: int | str | None = None,
    torch: bool = False,
    aoti: bool = False,
    triton: bool = False,
    hub: bool = False,
    model: nn.Module | None = None,
) -> Path:
    """Export a checkpoint of a run to a new folder, for other programs; return the folder of the weights.

    torch     add model.pt2 and dense.pt2, programs of torch.export
    aoti      also add both compiled by AOTInductor, for Python and C++ on this kind of processor
    triton    make the folder a model of Triton: config.pbtxt, and the export with a model.py in its subfolder 1
    hub       add README.md, a model card with the run's metrics, and config.json
    model     your own network, not yet used, for a run of `colonnade.fit`; default: built from the configuration

    `Predictor.open` opens the folder of the weights. The destination appears when it is complete. Raises as
    `export_run`, and ConfigError for a model that cannot be exported in this way.
    """
    run = Path(run)
    destination = Path(destination)
    if not (torch or aoti or triton or hub):
        export_run(run, destination, at=at)
        return destination
    with stage_folder(destination) as staged:
        weights = staged / triton_files.VERSION if triton else staged
        export_run(run, weights, at=at)
        with Predictor.open(weights, model=model) as predictor:
            if torch or aoti:
                write_programs(weights, predictor, aoti=aoti)
            if triton:
                _write_triton(staged, destination.name, predictor)
            if hub:
                _write_hub(weights, destination.name, run, predictor)
    return destination / triton_files.VERSION if triton else destination


def list_model_inputs(predictor: Predictor) -> list[ProgramInput]:
    """List the inputs of a predictor's model by name, as programs and Triton take them."""
    return list_inputs(get_schema(predictor), find_collection(predictor.model).declaration)


def score_tensors(predictor: Predictor, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Score arrays of the model's inputs, in a batch of their own: (B,) float64, or (B, labels) for several labels.

    Raises DataError for wrong names, types, shapes or ids, and as `Predictor`.
    """
    scores = predictor(build_input_batch(list_model_inputs(predictor), arrays)).numpy()
    return scores[:, 0] if scores.ndim == 2 and scores.shape[1] == 1 else scores


def _write_triton(folder: Path, name: str, predictor: Predictor) -> None:
    inputs = list_model_inputs(predictor)
    triton_files.write_model(
        folder, triton_files.format_model_config(name, inputs, predictor.labels)
    )


def _write_hub(folder: Path, name: str, run: Path, predictor: Predictor) -> None:
    export = read_export(folder)
    inputs = list_model_inputs(predictor)
    metrics = hub_files.read_metrics(run, export.step)
    card = hub_files.format_card(name, export, inputs, metrics)
    hub_files.write_card(folder, card, hub_files.format_config(export, inputs))
