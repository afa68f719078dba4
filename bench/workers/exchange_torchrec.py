"""TorchRec on gloo: EmbeddingBagCollection or EmbeddingCollection, sharded, fused row-wise Adagrad.

A choice is {"sharding": "table_wise", "row_wise" or "planner", "ahead": bool, "codec": "fp16" or "int8"}:

    table_wise   by its planner, told to; so it balances the tables as it does
    row_wise     forced: its planner never enumerates it on CPU
    planner      left alone, told the links' rates
    ahead        ids of the next batch travel while this one computes, as TrainPipelineSparseDist lets them
    codec        FBGEMM's, of values and of gradients; without it, they travel as they are
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
import torchrec
from torch import Tensor, nn
from torchrec.distributed import comm_ops
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from workers.exchange_loop import EPS, ROWS_LR, Case, Iterations, digest_of, serve

CPU = torch.device("cpu")


class Sharded:
    """One sharded collection and its batches."""

    optimizer_type: Any = RowWiseAdagrad
    settings: Mapping[str, float] = {"lr": ROWS_LR, "eps": EPS}

    def __init__(
        self, case: Case, choice: Mapping[str, Any], keyed: list[KeyedJaggedTensor]
    ) -> None:
        self.case, self.keyed, self.ahead = case, keyed, choice.get("ahead", False)
        self.module, self.plan = shard(case, choice, self.optimizer_type, self.settings)
        self.gradient = case.gradient()
        self.next = 0
        # Small tables that the planner replicates: torch's own gradients, and an optimizer beside the fused one.
        replicated = dict(in_backward_optimizer_filter(self.module.named_parameters()))
        self.optimizer = None
        if replicated:
            self.optimizer = self.optimizer_type(replicated.values(), **self.settings)

    def batches(self, count: int) -> Iterator[KeyedJaggedTensor]:
        for _ in range(count):
            yield self.keyed[self.next % len(self.keyed)]
            self.next += 1

    def run(self, warm_up: int, steps: int, start: Callable[[], None]) -> Iterations:
        seconds, outputs, module = [], [], self.module
        batches = self.batches(warm_up + steps)
        ctx = module.create_context()
        coming = module.input_dist(ctx, next(batches))
        for step in range(warm_up + steps):
            if step == warm_up:
                start()
            began = time.perf_counter()
            ids = coming.wait().wait()
            outputs = self.outputs_of(module.compute_and_output_dist(ctx, ids))
            following = next(batches, None)
            if self.ahead and following is not None:
                ctx = module.create_context()
                coming = module.input_dist(ctx, following)
            torch.autograd.backward(outputs, self.gradients(outputs))  # updates what is fused
            if self.optimizer is not None:
                self.optimizer.step()
                self.optimizer.zero_grad()
            if not self.ahead and following is not None:
                ctx = module.create_context()
                coming = module.input_dist(ctx, following)
            if step >= warm_up:
                seconds.append(time.perf_counter() - began)
        return Iterations(seconds, digest_of(outputs))

    def gradients(self, outputs: list[Tensor]) -> list[Tensor]:
        return [self.gradient] * len(outputs)

    def outputs_of(self, result: Any) -> list[Tensor]:
        """Return outputs in the order of the features: (B, F * D) as one, or each sequence's (B * L, D)."""
        result = result.wait() if hasattr(result, "wait") else result
        if self.case.pooled:
            if list(result.keys()) == self.case.names:
                return [result.values()]
            return [torch.cat([result[name] for name in self.case.names], dim=1)]
        return [result[name].values() for name in self.case.names]


def shard(
    case: Case, choice: Mapping[str, Any], optimizer: Any, optimizer_settings: Mapping[str, float]
) -> tuple[nn.Module, str]:
    """The sharded module, and how its tables lie, in words."""
    settings: dict[str, Any] = {
        "device": torch.device("meta"),
        "tables": [
            (torchrec.EmbeddingBagConfig if case.pooled else torchrec.EmbeddingConfig)(
                name=name, feature_names=[name], num_embeddings=rows, embedding_dim=case.dim,
                init_fn=partial(nn.init.constant_, val=0.0),
            )
            for name, rows in zip(case.names, case.rows, strict=True)
        ],
    }  # fmt: skip
    module = (torchrec.EmbeddingBagCollection if case.pooled else torchrec.EmbeddingCollection)(
        **settings
    )
    codecs = None
    if codec := choice.get("codec"):
        kind = CommType[codec.upper()]
        codecs = get_qcomm_codecs_registry(QCommsConfig(kind, kind), device=CPU)
    sharder_type: Any = EmbeddingBagCollectionSharder if case.pooled else EmbeddingCollectionSharder
    sharder = sharder_type(qcomm_codecs_registry=codecs)
    apply_optimizer_in_backward(optimizer, module.parameters(), dict(optimizer_settings))
    num_ranks, on_host = dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    if choice["sharding"] == "row_wise":
        plan = construct_module_sharding_plan(
            module, {name: row_wise() for name in case.names}, sharder=sharder, local_size=on_host,
            world_size=num_ranks, device_type="cpu",
        )  # fmt: skip
    else:
        constraints = None
        if choice["sharding"] == "table_wise":
            only = ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"])
            constraints = {name: only for name in case.names}
        planner = EmbeddingShardingPlanner(
            topology=Topology(
                world_size=num_ranks, local_world_size=on_host, compute_device="cpu",
                inter_host_bw=choice["link_bytes_per_second"] / 1000,
            ),
            batch_size=case.batch_size, constraints=constraints,
        )  # fmt: skip
        plan = planner.collective_plan(Only(module), [sharder], dist.GroupMember.WORLD).plan["only"]
    words = {f"{sharding.sharding_type}/{sharding.compute_kernel}" for sharding in plan.values()}
    sharded = sharder.shard(
        module, plan, ShardingEnv.from_process_group(dist.GroupMember.WORLD), CPU
    )
    return sharded, ", ".join(sorted(words))


class Only(nn.Module):
    """Planners look for what they shard inside a model."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.only = module


def keyed_ids(case: Case, ids: Tensor) -> KeyedJaggedTensor:
    """ids (F, B * L); lengths and offsets are given, as TorchRec's readers do."""
    count = len(case.rows) * case.batch_size
    return KeyedJaggedTensor(
        keys=case.names,
        values=ids.reshape(-1).contiguous(),
        lengths=torch.full((count,), case.lookups, dtype=torch.int64),
        offsets=torch.arange(count + 1) * case.lookups,
        stride=case.batch_size,
    )


def build(
    case: Case, choices: Mapping[str, Any], system: type[Sharded] = Sharded
) -> tuple[dict[str, Any], dict[str, str], dict, Any]:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    comm_ops.set_gradient_division(False)
    keyed = [keyed_ids(case, batch) for batch in case.load(dist.get_rank())]
    systems: dict[str, Any] = {}
    left_out, facts = {}, {n: version(n) for n in ("torchrec", "fbgemm-gpu-cpu", "torch")}
    for name, choice in choices.items():
        try:
            systems[name] = system(case, choice, keyed)
            facts[f"{name} plan"] = systems[name].plan
        except Exception as error:  # whatever its planner or sharders raise, on all ranks alike
            left_out[name] = f"{type(error).__name__}: {error}"[:300]
    return systems, left_out, facts, None


if __name__ == "__main__":
    serve(build)
