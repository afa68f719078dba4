"""Weights that the ranks of one tower alone use: summed, clipped and checked as on one process, and handed to all."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from torch import nn

from colonnade import EmbeddingCollection, Feature, Mesh, Table
from colonnade.comm.traffic import Traffic
from colonnade.errors import ConfigError
from colonnade.interaction import TowerModule
from colonnade.lookup.contract import TowerConsumers
from colonnade.train.dense import DenseGradients
from colonnade.train.tower_weights import TowerWeights, find_tower_weights
from colonnade.wire.dense_sums import sum_residuals_by_parameter

NUM_RANKS, STEPS, SAMPLES = 4, 4, 24
INPUTS = torch.randn(STEPS, SAMPLES, 3, generator=torch.Generator().manual_seed(5)).double()


class Model(nn.Module):
    """A module for each of two towers, `top` on every rank."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.towers = nn.ModuleList(nn.Linear(3, 2) for _ in range(2))
        self.top = nn.Linear(3, 1)
        self.double()
        for number, tower in enumerate(self.towers):
            tower.register_buffer("visits", torch.full((2,), float(number)))


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)


def step_of(mesh, model, dense, step, size, spoils=-1):
    """Take a trainer's step: what passes through a module's tower are samples of peers. `spoils`: a rank with a
    gradient of NaN in its tower."""
    inputs = INPUTS[step]
    own = inputs[mesh.rank :: mesh.num_ranks]
    dense.zero_gradients()
    dense.begin_last_backward()
    (model.top(own) ** 2).sum().backward()
    # What `push` does: each sample once, by one rank of the tower.
    tower, number = divmod(mesh.rank, size)
    for t, module in enumerate(model.towers):
        if mesh.num_ranks > 1 and t != tower:
            continue
        part = inputs[number::size] if mesh.num_ranks > 1 else inputs
        loss = (module(part) ** 2).sum()
        for parameter, item in zip(
            module.parameters(), torch.autograd.grad(loss, list(module.parameters())), strict=True
        ):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad += item
            if mesh.rank == spoils:
                parameter.grad += float("nan")
    for parameter in model.towers.parameters():
        if parameter.grad is None:  # as `push` leaves them
            parameter.grad = torch.zeros_like(parameter)
    return dense.reduce(finite=True, stop=False, loss=1.0)


def given_to(model, size):
    """Return the gradients given to two towers; of four, the first two have a module each."""
    modules = [(tower,) for tower in model.towers]
    return TowerWeights(size, (*modules, *[()] * (NUM_RANKS // size - 2)))


def train(mesh, size, codec="exact", states=None):
    """Clipped steps; what every rank has before and after weights are handed out."""
    model = Model()
    optimizer = optimizer_of(model)
    towers = given_to(model, size) if mesh.num_ranks > 1 else None
    late = list(model.towers.parameters())
    dense = DenseGradients(list(model.parameters()), mesh, codec, late=late, towers=towers)
    dense.set_checkpoint_residuals(states or [])
    dense.build_buckets()
    norms = []
    for step in range(STEPS):
        assert step_of(mesh, model, dense, step, size) == (True, False, mesh.num_ranks)
        dense.scale(0.5)
        norms.append(dense.clip_norm(0.7))
        optimizer.step()
    own = mesh.rank // size
    before = [tower.detach().clone() for tower in model.parameters()]
    if towers is not None:
        for t, tower in enumerate(model.towers):
            has_it = t == own
            assert (tower.weight in optimizer.state) is has_it
            assert (tower.weight.grad is not None) is has_it
    model.towers[own % 2].visits += 10.0
    dense.broadcast_tower_weights(optimizer)
    retained = optimizer.state_dict()
    weights = [tower.detach().clone() for tower in model.parameters()]
    output = [float(tower.visits[0]) for tower in model.towers]
    return {
        "norms": norms, "weights": weights, "before": before, "kept": retained, "seen": output,
        "state": dense.export_residuals(),
    }  # fmt: skip


def refused(mesh):
    """NaN in one tower is heard of by all, and nothing of it stays; gradients of the loss itself are refused."""
    model = Model()
    dense = DenseGradients(
        list(model.parameters()), mesh, late=list(model.towers.parameters()), towers=given_to(model, 2)
    )  # fmt: skip
    dense.build_buckets()
    for spoils in (3, 0, -1):
        assert step_of(mesh, model, dense, 0, 2, spoils=spoils)[0] is (spoils < 0)
    message = ""
    dense.zero_gradients()
    try:
        model.towers[1](INPUTS[0]).sum().backward()
    except ConfigError as error:
        message = str(error)
    return message


def sent(mesh, towers_of):
    """Bytes of dense gradients of a step, by link."""
    model, alone = Model(), Mesh(mesh.world, mesh.rank, mesh.groups, Traffic(), mesh.peer_monitor)
    dense = DenseGradients(
        list(model.parameters()), alone, late=list(model.towers.parameters()), towers=towers_of(model)
    )  # fmt: skip
    dense.build_buckets()
    before = dict(alone.traffic.sent_bytes)
    step_of(alone, model, dense, 0, 2)
    after = alone.traffic.sent_bytes
    return {
        link: after["dense", link] - before.get(("dense", link), 0) for link in ("local", "remote")
    }


def everything(mesh):
    results = {size: train(mesh, size) for size in (2, 1)}
    results["coded"] = train(mesh, 2, "int8")
    results["refused"] = refused(mesh)
    results["sent"] = [sent(mesh, lambda model: given_to(model, 2)), sent(mesh, lambda model: None)]

    return results


@pytest.fixture(scope="module")
def everyone():
    return run_ranks(NUM_RANKS, everything, ranks_per_host=2)


@pytest.mark.parametrize("size", [2, 1])
def test_towers_train_what_one_process_does(everyone, size):
    """Clipping by norm counts a weight once, and so does weight decay; then all ranks have all weights and states."""
    one = train(Mesh(), 1)
    for rank in everyone:
        ours = rank[size]
        assert ours["norms"] == pytest.approx(one["norms"], rel=1e-12) and max(ours["norms"]) > 0.7
        torch.testing.assert_close(ours["weights"], one["weights"], rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(
            ours["kept"]["state"], one["kept"]["state"], rtol=1e-12, atol=1e-14
        )
    assert not torch.equal(everyone[0][size]["before"][2], one["weights"][2])  # of the other tower
    bits = [rank[size]["weights"] for rank in everyone]
    assert all(
        torch.equal(a, b) for rank_bits in bits for a, b in zip(rank_bits, bits[0], strict=True)
    )


def test_buffers_of_a_tower_are_handed_out(everyone):
    assert [rank[2]["seen"] for rank in everyone] == [[10.0, 11.0]] * NUM_RANKS


def test_sums_inside_a_tower_are_exact_where_others_are_coded(everyone):
    lost = sum_residuals_by_parameter([rank["coded"]["state"] for rank in everyone])
    names = [name for name, _ in Model().named_parameters()]
    assert {names[number] for number in lost} == {"top.weight", "top.bias"}


def test_what_is_not_finite_in_a_tower_stops_all(everyone):
    for rank in everyone:
        assert "weight that is trained inside a tower" in rank["refused"]


def test_weights_of_a_tower_never_cross_the_uplink(everyone):
    """Two hosts of two ranks, a tower on each: 4 weights of `top` and 7 signals travel, of 20 and 5."""
    for rank in everyone:
        inside, over_all = rank["sent"]
        # Short buffers go whole, to the two ranks of the other host: numbers of 8 bytes, a multiple of ranks.
        assert (inside["remote"], over_all["remote"]) == (2 * 12 * 8, 2 * 28 * 8)


def test_which_weights_are_a_towers_own():
    tables = [Table(name, 2, rows=9) for name in "abcd"]
    shared = nn.Linear(4, 1)
    consumers = {
        "one": (TowerModule(nn.Linear(4, 1), [2, 2], 1, side_by_side=True), ["a", "b"]),
        "two": (TowerModule(shared, [2, 2], 1, side_by_side=True), ["c", "d"]),
        "top": (TowerModule(shared, [2, 2], 1, side_by_side=True), ["a", "c"]),
    }
    declared = EmbeddingCollection(
        tables, [Feature(name, name) for name in "abcd"], consumers=consumers
    ).declaration
    inside = TowerConsumers(2, {"one": 0, "two": 1})
    adam = torch.optim.Adam([torch.zeros(1)])
    result = find_tower_weights(declared, inside, 4, adam)
    assert result is not None and result.modules == ((declared.consumers["one"].interaction,), ())
    assert len(result.parameters(0)) == 2 and result.parameters(1) == []
    for refused_by in (
        find_tower_weights(declared, None, 4, adam),
        find_tower_weights(declared, inside, 2, adam),  # one tower of all ranks
        find_tower_weights(declared, TowerConsumers(2, {"two": 1}), 4, adam),
        find_tower_weights(declared, inside, 4, torch.optim.LBFGS([torch.zeros(1)])),
    ):
        assert refused_by is None
