"""TorchRec as its user runs it: DistributedModelParallel on one gloo rank, table-wise, fused row-wise Adagrad."""

from __future__ import annotations

import os
from functools import partial
from importlib.metadata import version

import torch
import torch.distributed as dist
import torchrec
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torchrec.distributed.model_parallel import DistributedModelParallel, get_default_sharders
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from workers.loop import Case, Laps, Step, serve


class Model(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        scale = case.dim**-0.5
        self.embeddings = torchrec.EmbeddingBagCollection(
            device=torch.device("meta"),
            tables=[
                torchrec.EmbeddingBagConfig(
                    name=name,
                    feature_names=[name],
                    num_embeddings=rows,
                    embedding_dim=case.dim,
                    init_fn=partial(nn.init.uniform_, a=-scale, b=scale),
                )
                for name, rows in zip(case.names, case.rows, strict=True)
            ],
        )
        self.names = case.names
        self.network = None if case.sparse_only else case.network()

    def forward(self, dense: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        """Logits, or the fields (B, F * D) where there is no network."""
        fields = self.embeddings(ids)
        if list(fields.keys()) != self.names:
            raise AssertionError(f"the plan reordered the features to {fields.keys()}")
        return fields.values() if self.network is None else self.network(dense, fields.values())


def build(case: Case) -> tuple[Step, dict[str, str]]:
    open_world()
    model = Model(case)
    apply_optimizer_in_backward(
        RowWiseAdagrad, model.embeddings.parameters(), {"lr": case.embedding_lr}
    )
    model = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=plan_table_wise(model, case)
    )
    optimizers = [model.fused_optimizer]
    if not case.sparse_only:
        dense = KeyedOptimizerWrapper(
            dict(in_backward_optimizer_filter(model.named_parameters())),
            lambda parameters: torch.optim.Adam(parameters, lr=case.dense_lr, fused=True),
        )
        optimizers.append(dense)
    optimizer = CombinedOptimizer(optimizers)
    inputs, ids, label = case.load()
    keyed = [keyed_ids(case, batch) for batch in ids]
    batches = iter(range(len(ids)))
    gradient = case.gradient(ids.shape[2])

    def sparse_step(laps: Laps) -> Tensor:
        i = next(batches)
        optimizer.zero_grad()
        laps("dense")
        fields = model(inputs[i], keyed[i])
        laps("forward")
        fields.backward(gradient)  # the embeddings' update is fused into it
        laps("backward")
        optimizer.step()
        laps("rows")
        return torch.zeros(())

    def step(laps: Laps) -> Tensor:
        i = next(batches)
        laps("wait")
        optimizer.zero_grad()
        laps("dense")
        loss = bce(model(inputs[i], keyed[i]), label[i])
        laps("forward")
        loss.backward()  # the embeddings' update is fused into it
        laps("backward")
        optimizer.step()
        laps("dense")
        return loss

    shardings = {
        f"{p.sharding_type}/{p.compute_kernel}"
        for module in model.plan.plan.values()
        for p in module.values()
    }
    return sparse_step if case.sparse_only else step, {
        "torchrec": version("torchrec"),
        "fbgemm-gpu-cpu": version("fbgemm-gpu-cpu"),
        "torchrec plan": ", ".join(sorted(shardings)),
    }


def plan_table_wise(model: Model, case: Case) -> ShardingPlan:
    """Left alone, the planner makes small tables data-parallel with dense gradients, and reorders the features."""
    constraints = {
        name: ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"])
        for name in case.names
    }
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=1, compute_device="cpu"), constraints=constraints
    )
    return planner.collective_plan(model, get_default_sharders(), dist.GroupMember.WORLD)


def keyed_ids(case: Case, ids: Tensor) -> KeyedJaggedTensor:
    """ids (F, B), one per sample and feature; lengths and offsets are given, as TorchRec's Criteo reader does."""
    return KeyedJaggedTensor(
        keys=case.names,
        values=ids.reshape(-1),
        lengths=torch.ones(ids.numel(), dtype=torch.int64),
        offsets=torch.arange(ids.numel() + 1),
        stride=ids.shape[1],
    )


def open_world() -> None:
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


if __name__ == "__main__":
    serve(build)
