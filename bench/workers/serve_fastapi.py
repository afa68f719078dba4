"""The peer's server: the same model in plain torch behind FastAPI, in one process, with the same bodies.

    python -m workers.serve_fastapi EXPORT [stacked]

The model runs in the event loop: with one core, a thread pool only adds switches. stacked: one nn.EmbeddingBag has the
rows of all fields, which saves 25 calls.
"""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvicorn
from fastapi import FastAPI, Request, Response

from workers.serve_network import PlainModel, load_model
from workers.serve_requests import HEADER_LENGTH

DTYPES = {"FP32": np.float32, "INT64": np.int64}


def parse_inputs(body: bytes, header_length: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a binary body: views of it."""
    begin = header_length
    tensors = {}
    for entry in json.loads(body[:header_length])["inputs"]:
        size = entry["parameters"]["binary_data_size"]
        dtype: Any = DTYPES[entry["datatype"]]
        values = np.frombuffer(body, dtype, size // np.dtype(dtype).itemsize, begin)
        tensors[entry["name"]] = torch.from_numpy(values.reshape(entry["shape"]))
        begin += size
    return tensors


def build_app(model: PlainModel) -> FastAPI:
    app = FastAPI()

    @app.get("/v2/health/ready")
    async def ready() -> dict[str, bool]:
        return {"ready": True}

    @app.post("/v2/models/model/infer")
    async def infer(request: Request) -> Response:
        body = bytearray(await request.body())
        inputs = parse_inputs(body, int(request.headers[HEADER_LENGTH]))
        dense = inputs.pop("dense")
        with torch.inference_mode():
            scores = model(dense, list(inputs.values())).numpy()
        content = scores.tobytes()
        output = {
            "name": "score", "datatype": "FP64", "shape": list(scores.shape),
            "parameters": {"binary_data_size": len(content)},
        }  # fmt: skip
        fields = {"model_name": "model", "model_version": "1", "outputs": [output]}
        header = json.dumps(fields).encode()
        return Response(
            header + content,
            headers={HEADER_LENGTH: str(len(header))},
            media_type="application/octet-stream",
        )

    return app


def main() -> None:
    torch.set_num_threads(1)
    app = build_app(load_model(Path(sys.argv[1]), is_stacked="stacked" in sys.argv[2:]))
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    print(f"serving on http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    config = uvicorn.Config(app, loop="uvloop", http="httptools", access_log=False)
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
