"""Bare `Predictor` calls in one process: what a server's answers contain at least.

parent                                       worker
{"export": FOLDER}                           {"ready": versions}
{"requests": FILE, "seconds": S}             {"rate": calls per second}
{"requests": FILE, "calls": N}               {"best", "median", "p99"}: ms of a call with the first sample
{"requests": FILE, "index": I}               {"scores": of that request}
"""

from __future__ import annotations

import json
import sys
import time
from itertools import cycle

import torch

import colonnade
from colonnade import Batch, Predictor
from colonnade.serve.protocol import parse_infer_request
from colonnade.serve.tensors import build_batch, build_signature
from workers.loop import open_channel
from workers.predictor_calls import fixed_cost_ms
from workers.serve_requests import load_requests

MAX_BATCHES = 512


def read_batches(predictor: Predictor, path: str) -> list[Batch]:
    """Return the batches of a file of requests."""
    assert predictor.schema is not None, "an export has its schema"
    signature = build_signature(predictor.schema, max_candidates=10_000)
    pool = load_requests(path)
    return [
        build_batch(signature, parse_infer_request(bytearray(body), str(pool.header_length)).inputs)
        for body in pool.bodies[:MAX_BATCHES]
    ]


def call_for(predictor: Predictor, batches: list[Batch], seconds: float) -> float:
    """Call for some time, after a tenth of it as a warm-up; return the calls per second."""
    batch = cycle(batches)
    end = time.perf_counter() + seconds / 10
    while time.perf_counter() < end:
        predictor(next(batch))
    begin, count = time.perf_counter(), 0
    while (now := time.perf_counter()) - begin < seconds:
        predictor(next(batch))
        count += 1
    return count / (now - begin)


def main() -> None:
    channel = open_channel()
    torch.set_num_threads(1)
    predictor = Predictor.open(json.loads(sys.stdin.readline())["export"])
    versions = {"torch": torch.__version__, "colonnade": colonnade.__version__}
    print(json.dumps({"ready": versions}), file=channel)
    batches: dict[str, list[Batch]] = {}
    for line in sys.stdin:
        message = json.loads(line)
        path = message["requests"]
        if path not in batches:
            batches[path] = read_batches(predictor, path)
        if "seconds" in message:
            answer = {"rate": call_for(predictor, batches[path], message["seconds"])}
        elif "calls" in message:
            answer = dict(fixed_cost_ms(predictor, batches[path][0], message["calls"]))
        else:
            scores = predictor(batches[path][message["index"]])[:, 0]
            answer = {"scores": scores.tolist()}
        print(json.dumps(answer), file=channel)


if __name__ == "__main__":
    main()
