"""Exact top-k over the vectors of all items, on one thread: ours, faiss's flat index, and implicit's.

    python -m workers.serve_topk SYSTEM        colonnade, faiss or implicit

    parent                                          worker
    {"items": FILE, "queries": FILE, "k": K}        {"ready": versions}
    {"batch": B, "seconds": S}                      {"rate": queries per second, B at a time}
    {"check": N}                                    {"items": (N, K) of the first N queries}

Legend: Q queries, I items, D dim.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from workers.loop import open_channel

Search = Callable[[NDArray[np.float32]], NDArray[Any]]
"""Queries (B, D) to the numbers of their best items (B, K)."""


def open_colonnade(items: NDArray[np.float32], k: int) -> Search:
    from colonnade.batch import Ids
    from colonnade.models.retriever import rank_items, to_column_major

    vectors = to_column_major(torch.from_numpy(items))

    @torch.inference_mode()
    def search(queries: NDArray[np.float32]) -> NDArray[Any]:
        offsets = torch.zeros(len(queries) + 1, dtype=torch.int64)
        masked = Ids(torch.empty(0, dtype=torch.int64), offsets)
        return rank_items(torch.from_numpy(queries), vectors, masked, k)[0].numpy()

    return search


def open_faiss(items: NDArray[np.float32], k: int) -> Search:
    import faiss

    faiss.omp_set_num_threads(1)
    index = faiss.IndexFlatIP(items.shape[1])
    index.add(items)
    return lambda queries: index.search(queries, k)[1]


def open_implicit(items: NDArray[np.float32], k: int) -> Search:
    from implicit.cpu.topk import topk

    return lambda queries: topk(items, queries, k, num_threads=1)[0]


SYSTEMS = {"colonnade": open_colonnade, "faiss": open_faiss, "implicit": open_implicit}
PACKAGES = {"faiss": "faiss-cpu"}


def search_for(
    search: Search, queries: NDArray[np.float32], batch_size: int, seconds: float
) -> float:
    """Search for some time, after one call as a warm-up; return the queries per second."""
    search(queries[:batch_size])
    begin, count = time.perf_counter(), 0
    while (now := time.perf_counter()) - begin < seconds:
        first = count % (len(queries) - batch_size + 1)
        search(queries[first : first + batch_size])
        count += batch_size
    return count / (now - begin)


def main() -> None:
    channel = open_channel()
    system = sys.argv[1]
    torch.set_num_threads(1)
    start = json.loads(sys.stdin.readline())
    queries = np.load(start["queries"])
    search = SYSTEMS[system](np.load(start["items"]), start["k"])
    package = PACKAGES.get(system, system)
    print(json.dumps({"ready": {package: version(package)}}), file=channel)
    for line in sys.stdin:
        message = json.loads(line)
        if "check" in message:
            answer: dict[str, Any] = {"items": search(queries[: message["check"]]).tolist()}
        else:
            answer = {"rate": search_for(search, queries, message["batch"], message["seconds"])}
        print(json.dumps(answer), file=channel)


if __name__ == "__main__":
    main()
