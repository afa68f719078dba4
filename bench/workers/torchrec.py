"""TorchRec as its user runs it: DistributedModelParallel on one gloo rank, table-wise, fused row-wise Adagrad.

Helped, its planner may be free in what it chooses, and its train pipeline prepares the next batch's ids ahead.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version

import torch
import torch.distributed as dist
import torchrec
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel, get_default_sharders
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

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
        self.keeps_order = "planner" not in case.options
        self.network = None if case.part == "embeddings" else case.network()
        self.loss = nn.BCEWithLogitsLoss()

    def forward(self, batch: PipelinedBatch) -> tuple[Tensor, Tensor]:
        """Return the loss, with a gradient and without, or twice the fields (B, F * D) where there is no network."""
        outputs = self.embeddings(batch.ids)
        # The planner's choice reorders the features.
        fields = (
            outputs.values() if self.keeps_order else torch.cat([outputs[n] for n in self.names], 1)
        )
        if self.network is None:
            return fields, fields
        loss = self.loss(self.network(batch.dense, fields), batch.label)
        return loss, loss.detach()


@dataclass
class PipelinedBatch(Pipelineable):
    """Batch that a train pipeline accepts. It stays where it is, in memory."""

    dense: Tensor
    ids: KeyedJaggedTensor
    label: Tensor

    def to(self, device: torch.device, non_blocking: bool) -> PipelinedBatch:
        return self

    def record_stream(self, stream: torch.Stream) -> None:
        """Do nothing: a CPU has no streams."""


def build(case: Case) -> tuple[Step, dict[str, str]]:
    open_world()
    model = Model(case)
    apply_optimizer_in_backward(
        RowWiseAdagrad, model.embeddings.parameters(), {"lr": case.embedding_lr}
    )
    model = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=plan_tables(model, case)
    )
    optimizers = [model.fused_optimizer]
    if case.part != "embeddings":
        dense = KeyedOptimizerWrapper(
            dict(in_backward_optimizer_filter(model.named_parameters())),
            lambda parameters: torch.optim.Adam(parameters, lr=case.dense_lr, fused=True),
        )
        optimizers.append(dense)
    optimizer = CombinedOptimizer(optimizers)
    inputs, ids, label = case.load()
    batches = iter(
        [PipelinedBatch(inputs[i], keyed_ids(case, batch), label[i]) for i, batch in enumerate(ids)]
    )
    gradient = case.gradient(label.shape[1])
    pipeline = TrainPipelineSparseDist(model, optimizer, torch.device("cpu"))

    def sparse_step(laps: Laps) -> Tensor:
        batch = next(batches)
        optimizer.zero_grad()
        laps("dense")
        fields, _ = model(batch)
        laps("forward")
        fields.backward(gradient)  # the embeddings' update is fused into it
        laps("backward")
        optimizer.step()
        laps("rows")
        return torch.zeros(())

    def step(laps: Laps) -> Tensor:
        batch = next(batches)
        laps("wait")
        optimizer.zero_grad()
        laps("dense")
        loss, _ = model(batch)
        laps("forward")
        loss.backward()  # the embeddings' update is fused into it
        laps("backward")
        optimizer.step()
        laps("dense")
        return loss

    def pipelined_step(laps: Laps) -> Tensor:
        loss = pipeline.progress(batches)
        laps("forward")  # all phases: the pipeline has no place to look between them
        return loss

    shardings = {
        f"{p.sharding_type}/{p.compute_kernel}"
        for module in model.plan.plan.values()
        for p in module.values()
    }
    free = " planner" if "planner" in case.options else ""
    steps = {"embeddings": sparse_step, "step": step}
    return pipelined_step if "pipeline" in case.options else steps[case.part], {
        "torchrec": version("torchrec"),
        "fbgemm-gpu-cpu": version("fbgemm-gpu-cpu"),
        f"torchrec{free} plan": ", ".join(sorted(shardings)),
    }


def plan_tables(model: Model, case: Case) -> ShardingPlan:
    """Left alone, the planner makes small tables data-parallel with dense gradients, and reorders the features."""
    constraints = (
        None
        if "planner" in case.options
        else {
            name: ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"])
            for name in case.names
        }
    )
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
