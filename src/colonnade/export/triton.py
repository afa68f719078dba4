"""Model folder of NVIDIA Triton's Python backend: config.pbtxt, and an export with a model.py that scores it.

MODEL/config.pbtxt     inputs and output, as Triton declares them
MODEL/1/model.py       opens the export that it is in; Triton's Python needs `pip install colonnade`
MODEL/1/model.json, .. the export

MODEL's parent is Triton's model repository.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from colonnade.export.tensors import ProgramInput

CONFIG = "config.pbtxt"
VERSION = "1"
MODEL_FILE = "model.py"
TYPES = {"float32": "TYPE_FP32", "int64": "TYPE_INT64"}

MODEL_PY = '''\
"""Model of Triton's Python backend that scores with the Colonnade export in its folder."""

from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

from colonnade import ColonnadeError, DataError, Predictor
from colonnade.export import score_tensors


class TritonPythonModel:
    """Scores each request as one batch; rows are mapped, so instances share their memory."""

    def initialize(self, args):
        folder = Path(args["model_repository"]) / args["model_version"]
        self.predictor = Predictor.open(folder)

    def execute(self, requests):
        return [self.respond(request) for request in requests]

    def respond(self, request):
        arrays = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        try:
            scores = score_tensors(self.predictor, arrays)
        except DataError as error:
            return failed(error, pb_utils.TritonError.INVALID_ARG)
        except (ColonnadeError, IndexError, OSError) as error:
            return failed(error, pb_utils.TritonError.INTERNAL)
        output = pb_utils.Tensor("score", np.ascontiguousarray(scores))
        return pb_utils.InferenceResponse(output_tensors=[output])

    def finalize(self):
        self.predictor.close()


def failed(error, code):
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), code))
'''


def format_model_config(name: str, inputs: Sequence[ProgramInput], labels: Sequence[str]) -> str:
    """Return the text of config.pbtxt, a ModelConfig in protobuf's text form."""
    tensors = "\n".join(_format_tensor("input", known) for known in inputs)
    dims = "[ -1 ]" if len(labels) == 1 else f"[ -1, {len(labels)} ]"
    return (
        f"name: {json.dumps(name, ensure_ascii=False)}\n"
        'backend: "python"\n'
        "max_batch_size: 0\n"  # the first dimension of `dims` is the batch
        f"{tensors}\n"
        f'output {{\n  name: "score"\n  data_type: TYPE_FP64\n  dims: {dims}\n}}\n'
        "instance_group {\n  kind: KIND_CPU\n  count: 1\n}\n"
    )


def _format_tensor(kind: str, program_input: ProgramInput) -> str:
    dims = ", ".join(str(n if isinstance(n, int) else -1) for n in program_input.shape)
    name = json.dumps(program_input.name, ensure_ascii=False)
    return (
        f"{kind} {{\n  name: {name}\n  data_type: {TYPES[program_input.dtype]}\n"
        f"  dims: [ {dims} ]\n}}"
    )


def write_model(folder: Path, config: str) -> None:
    """Write config.pbtxt to `folder`, and model.py to its version, where the export is."""
    (folder / CONFIG).write_text(config, encoding="utf-8")
    (folder / VERSION / MODEL_FILE).write_text(MODEL_PY, encoding="utf-8")
