"""Dense gradients in buckets: laid out once, summed while backward runs, with the ranks' signals at the end."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from colonnade import Mesh, World
from colonnade.comm.collectives import (
    SUM_ALGORITHMS,
    choose_sum_algorithm,
    estimate_sum_traffic,
    sum_blocks_in_order,
    sum_over_ranks,
)
from colonnade.comm.traffic import Traffic
from colonnade.errors import PeerLost
from colonnade.plan.advice import GradientNoise
from colonnade.train import dense as dense_module
from colonnade.train.dense import DenseGradients, assign_parameters_to_buckets
from colonnade.wire import dense_sums

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SINGLE, DOUBLE, HALF = torch.float32, torch.float64, torch.bfloat16


class Mixed(nn.Module):
    """Parameters of two dtypes; `device` for some of them."""

    def __init__(self, device="cpu"):
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.Linear(3, 2, device=device)
        self.two = nn.Linear(2, 2, dtype=torch.float64)
        self.three = nn.Linear(2, 1, device=device)

    def forward(self, inputs):
        hidden = self.one(inputs.to(self.one.weight.device)).cpu().double()
        return self.three(self.two(hidden).float().to(self.three.weight.device)).sum()


class Odd(nn.Module):
    """Parameters used twice, in some steps only, never, and frozen; of three dtypes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.twice = nn.Linear(3, 3)
        self.sometimes = nn.Linear(3, 3)
        self.never = nn.Linear(5, 5)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.rounded = nn.Parameter(torch.ones(3, dtype=HALF))
        self.top = nn.Linear(3, 1, dtype=DOUBLE)

    def forward(self, inputs, uses_all=True, reenters=False):
        def layers(hidden):
            return self.twice(hidden).tanh()

        hidden = inputs
        for _ in range(2):
            hidden = checkpoint(layers, hidden, use_reentrant=True) if reenters else layers(hidden)
        if uses_all:
            hidden = hidden + self.sometimes(hidden)
        return self.top((self.frozen(hidden) * self.rounded).double()).sum()


def attached(model, mesh):
    dense = DenseGradients([p for p in model.parameters() if p.requires_grad], mesh)
    dense.build_buckets()
    return dense


def inputs_of(rank, step, part=0):
    random = torch.Generator().manual_seed(100 * step + 10 * part + rank)
    return torch.randn(4, 3, generator=random).requires_grad_()


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch):
    """Restore the size of buckets after each test."""
    monkeypatch.setattr(dense_module, "BUCKET_BYTES", dense_module.BUCKET_BYTES)


# ---- the layout


def test_the_layout_is_in_reverse_order_and_has_every_parameter_once():
    whole = dense_module.BUCKET_BYTES // 4
    kinds = [(SINGLE, CPU), (SINGLE, CPU), (DOUBLE, CPU), (SINGLE, CPU), (SINGLE, GPU)]
    layout = assign_parameters_to_buckets(kinds, [10, whole, 3, whole // 2, 5])
    assert layout == [[4], [2], [3, 1], [0]]  # as they are full
    layout = assign_parameters_to_buckets(kinds, [10, whole, 3, whole // 2, 5], late_indices={2, 3})
    assert layout == [[4], [1], [0], [3], [2]]
    for dtype in (HALF, torch.float16):  # has no room for a loss
        assert assign_parameters_to_buckets([(dtype, CPU)] * 2, [3, 4]) == [[1, 0], []]
    assert assign_parameters_to_buckets([], []) == [[]]
    many = assign_parameters_to_buckets([(SINGLE, CPU)] * 1000, [whole // 3] * 1000)
    assert [number for bucket in many for number in bucket] == list(reversed(range(1000)))
    assert {len(bucket) for bucket in many[:-1]} == {4}  # 3 x a third is a little less than all


# ---- what a step gives


def check(mesh, device):
    """Gradients of all ranks are summed, in place; signals travel with them and are no gradient."""
    model = Mixed(device)
    dense = attached(model, mesh)
    dense.broadcast_parameters()
    for step in range(
        3
    ):  # `zero` starts each step anew; the last one's buckets leave during backward
        dense.zero_gradients()
        dense.begin_last_backward()
        model(torch.full((4, 3), float(mesh.rank + step))).backward()
        time.sleep(0.1)  # whatever may leave has left
        answers = dense.reduce(
            finite=True, stop=mesh.rank == 1, loss=mesh.rank + 1.0 - 5 * (step < 2)
        )
    reference = Mixed(device)
    for rank in range(mesh.num_ranks):
        reference(torch.full((4, 3), 2.0 + rank)).backward()
    for actual, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad)
    whole = sum(range(1, mesh.num_ranks + 1))  # of the ranks' parts of the loss
    assert answers == (True, mesh.num_ranks > 1, whole)
    model.one.weight.grad[0, 0] = float("nan")
    assert dense.reduce(finite=True, stop=False)[:2] == (False, False)
    dense.zero_gradients()
    assert dense.reduce(finite=mesh.rank != 1, stop=False)[0] == (mesh.num_ranks == 1)
    nothing = attached(nn.Identity(), mesh)
    nothing.zero_gradients()
    assert nothing.reduce(finite=True, stop=False, loss=2.0) == (True, False, 2.0 * mesh.num_ranks)
    return True


def step_of(model, dense, rank, step, *, parts, is_overlapped, **options):
    dense.zero_gradients()
    for part in range(parts):
        if is_overlapped and part == parts - 1:
            dense.begin_last_backward()
        model(inputs_of(rank, step, part), **options).backward()
    answer = dense.reduce(finite=True, stop=False, loss=1.0)
    return answer, [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def bits_at_any_time(mesh):
    """Sum with and without overlap, in one bucket and in many, for parameters of every kind and several backwards."""
    cases = [
        {"parts": 1},
        {"parts": 1, "uses_all": False},  # a parameter without a gradient
        {"parts": 3},
        {"parts": 1, "uses_all": True},
    ]
    results = []
    for bucket_bytes, alone_bytes in ((1 << 20, 1 << 16), (32, 8)):  # signals beside others, alone
        dense_module.BUCKET_BYTES, dense_module.ALONE_BYTES = bucket_bytes, alone_bytes
        for is_overlapped in (False, True):
            model = Odd()
            dense = attached(model, mesh)
            results.append(
                [
                    step_of(model, dense, mesh.rank, step, is_overlapped=is_overlapped, **case)
                    for step, case in enumerate(cases)
                ]
            )
    for other in results[1:]:
        for (answer, gradients), (same_answer, same) in zip(results[0], other, strict=True):
            assert answer == same_answer == (True, False, mesh.num_ranks)
            for one, another in zip(gradients, same, strict=True):
                assert (one is None and another is None) or torch.equal(one, another)
    for step, case in enumerate(cases):  # and they are the sums
        reference = Odd()
        parts, options = case["parts"], {k: v for k, v in case.items() if k != "parts"}
        for rank in range(mesh.num_ranks):
            for part in range(parts):
                reference(inputs_of(rank, step, part), **options).backward()
        for actual, expected in zip(results[0][step][1], reference.parameters(), strict=True):
            if actual is not None:
                wanted = torch.zeros_like(actual) if expected.grad is None else expected.grad
                torch.testing.assert_close(
                    actual, wanted, rtol=2e-2 if actual.dtype == HALF else 1e-5, atol=1e-5
                )
    return [[gradients for _, gradients in steps] for steps in results[:1]]


def leaves_while_backward_runs(mesh):
    """The first layer's backward waits until the last layer's bucket is the sum over ranks; and order is fixed."""
    dense_module.BUCKET_BYTES = 32
    layers = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
    dense = attached(layers, mesh)
    order, reduce = [], dense_sums.GradientBucket.sum_over_ranks

    def noted(bucket, mesh, unit):
        reduce(bucket, mesh, unit)
        order.append((bucket.indices, threading.current_thread().name))

    dense_sums.GradientBucket.sum_over_ranks = noted
    outputs = []

    def early(_):
        if dense._thread is not None:
            until = time.monotonic() + 30
            while len(order) < 3 and time.monotonic() < until:
                time.sleep(0.001)
        outputs.append(len(order))

    layers[0].weight.register_hook(early)  # before its gradient is added
    for _ in range(2):  # the first is watched
        order.clear()
        dense.zero_gradients()
        dense.begin_last_backward()
        layers(torch.ones(2, 4)).sum().backward()
        dense.reduce(finite=True, stop=False)
        assert order == [([n], "dense") for n in (3, 2, 1, 0)]
    dense_sums.GradientBucket.sum_over_ranks = reduce
    assert outputs == [0, 3]


def completed_late(mesh):
    """A parameter declared first, one in the middle and the last of them get the rest of their gradients between
    backward and `send`: their buckets are the last and wait for it, others leave before."""
    dense_module.BUCKET_BYTES = 32
    layers = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(5)))
    late = [layers[number].weight for number in (0, 2, 4)]
    dense = DenseGradients(list(layers.parameters()), mesh, late=late)
    dense.build_buckets()
    assert [bucket.indices for bucket in dense.buckets] == [[3], [1], [4], [2], [0]]
    late[1].requires_grad_(False)  # hears nothing in backward at all
    wanted = torch.autograd.grad(layers(torch.ones(2, 4)).sum(), [late[0], late[2]])
    for step in range(3):  # the first is watched
        dense.zero_gradients()
        dense.begin_last_backward()
        layers(torch.ones(2, 4)).sum().backward()
        if step:
            assert dense.buckets[0].ready.wait(30) and dense.buckets[1].ready.wait(30)
        assert not any(bucket.ready.is_set() and step for bucket in dense.buckets[2:])
        for item in late:
            item.grad += 1.0 + mesh.rank
        dense.reduce(finite=True, stop=False)
        more = sum(1.0 + rank for rank in range(mesh.num_ranks))
        for item, own in zip((late[0], late[2]), wanted, strict=True):
            torch.testing.assert_close(item.grad, mesh.num_ranks * own + more)
        assert torch.equal(late[1].grad, torch.full((4, 4), more))


def reenters(mesh):
    """Checkpointing that runs a backward inside backward adds a parameter's gradients one by one."""
    model, other = Odd(), Odd()
    dense, plain = attached(model, mesh), attached(other, mesh)
    for step in range(3):
        options = {"parts": 1, "reenters": True}
        _, own = step_of(model, dense, mesh.rank, step, is_overlapped=True, **options)
        _, same = step_of(other, plain, mesh.rank, step, is_overlapped=False, **options)
        for one, another in zip(own, same, strict=True):
            assert (one is None and another is None) or torch.equal(one, another)
    assert max(dense._num_expected) == 2


def gradients_elsewhere(mesh):
    """zero_grad and create_graph put gradients elsewhere; they come back."""
    model = nn.Linear(3, 1, bias=False)
    dense = attached(model, mesh)
    for is_graph in (False, True, True):
        dense.zero_gradients()
        dense.begin_last_backward()
        if not is_graph:
            model.zero_grad(set_to_none=True)
        (model(torch.ones(2, 3)).sum() ** 2).backward(create_graph=is_graph)
        dense.reduce(finite=True, stop=False)
        assert model.weight.grad is dense._views[0] and not model.weight.grad.requires_grad
        total = float(model.weight.detach().sum()) * 8 * mesh.num_ranks
        torch.testing.assert_close(model.weight.grad, torch.full((1, 3), total))


def noise_of_steps(mesh, num_parts):
    """Noise is that of the ranks' gradients, or of the first micro-batch's on one rank, before they are summed."""
    model = nn.Linear(3, 1, bias=False)
    dense = attached(model, mesh)
    expected = GradientNoise()
    for step in range(3):
        dense.zero_gradients()
        for part in range(num_parts):
            if part == num_parts - 1:
                dense.begin_last_backward(gradient_scale=4.0)
            model(inputs_of(mesh.rank, step, part)).sum().backward()
            if part == 0 and num_parts > 1:
                dense.measure_first_part(num_parts)
        dense.reduce(finite=step != 1, stop=False)
        if step == 1:  # dropped on all ranks
            continue
        ranks = [
            [inputs_of(rank, step, part).detach().sum(0) / 4 for part in range(num_parts)]
            for rank in range(mesh.num_ranks)
        ]
        whole = sum(part for parts in ranks for part in parts)
        squares = [float((sum(parts) ** 2).sum()) for parts in ranks]
        if mesh.num_ranks == 1:
            squares = [num_parts * float((ranks[0][0] ** 2).sum())]
        expected.add_step(sum(squares), float((whole**2).sum()), max(mesh.num_ranks, num_parts))
    noise = dense.noise
    assert noise.steps == expected.steps == 2
    assert (noise.square, noise.variance) == pytest.approx(
        (expected.square, expected.variance), rel=1e-5
    )


def on_two(mesh):
    assert check(mesh, "cpu")
    noise_of_steps(mesh, num_parts=1)
    leaves_while_backward_runs(mesh)
    completed_late(mesh)
    reenters(mesh)
    gradients_elsewhere(mesh)
    return bits_at_any_time(mesh)


def test_on_one_rank():
    assert check(Mesh(), "cpu")
    gradients_elsewhere(Mesh())
    noise_of_steps(Mesh(), num_parts=2)
    dense = attached(nn.Linear(3, 1), Mesh())
    assert not dense._hooks and dense._thread is None
    dense.reduce(finite=True, stop=False)
    assert dense.noise == GradientNoise()


def test_finite_gradients_with_infinite_squares_are_finite():
    model = nn.Linear(2, 1, bias=False)
    dense = attached(model, Mesh())
    for value, is_finite in ((1e30, True), (math.inf, False), (math.nan, False)):
        model.weight.grad.fill_(value)
        assert dense.reduce(finite=True, stop=False)[0] is is_finite


def test_on_two_ranks():
    one, other = run_ranks(2, on_two)
    for actual, expected in zip(one[0], other[0], strict=True):
        for a, b in zip(actual, expected, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)


def values_of(rank, size, dtype):
    random = torch.Generator().manual_seed(rank)
    return (torch.randn(size, generator=random) * 10 ** (rank + 1.0)).to(dtype)


def on_every_way(mesh, sizes=(4, 8, 40_000)):  # the last in pieces
    """Sum on four ranks as 2 x 2: the same bits by any way and layout of hosts; bytes are as predicted."""
    one_host = World(ranks_per_host=mesh.num_ranks)
    layouts = [*product([mesh.world], SUM_ALGORITHMS), *product([one_host], SUM_ALGORITHMS[:2])]
    for (world, way), size, dtype in product(layouts, sizes, (torch.float32, torch.bfloat16)):
        again = replace(mesh, world=world, traffic=Traffic())
        values = values_of(mesh.rank, size, dtype)
        sum_over_ranks(again, values, way)
        foretold, counted = estimate_sum_traffic(way, world, size * dtype.itemsize), again.traffic
        for link in ("local", "remote"):
            assert counted.sent_bytes["dense", link] == getattr(foretold, f"{link}_bytes")
            assert counted.messages["dense", link] == getattr(foretold, f"{link}_messages")
        parts = torch.stack([values_of(rank, size, dtype) for rank in range(mesh.num_ranks)])
        assert torch.equal(values, sum_blocks_in_order(parts.view(2, 2, -1)))


def on_links_known_otherwise(mesh):
    """Sum with other link speeds on one rank: all use rank 0's way. Collective."""
    slow = World(num_hosts=2, ranks_per_host=2, remote_bytes_per_second=1e4)
    fast = World(
        num_hosts=2, ranks_per_host=2, remote_bytes_per_second=1e12, local_bytes_per_second=1e6
    )
    size = 4 * (8 + 3)
    assert choose_sum_algorithm(slow, size) != choose_sum_algorithm(fast, size)
    model = nn.Linear(7, 1)
    dense = attached(model, replace(mesh, world=fast if mesh.rank == 2 else slow))
    dense.broadcast_parameters()
    dense.zero_gradients()
    model(torch.ones(1, 7)).sum().backward()
    assert dense.reduce(finite=True, stop=False)[0]
    assert torch.equal(model.weight.grad, torch.full((1, 7), 4.0))


def on_four(mesh):
    on_every_way(mesh)
    on_links_known_otherwise(mesh)
    bits = []
    for world in (mesh.world, World(ranks_per_host=4)):  # 2 x 2, and one host
        dense_module.choose_sum_algorithm = lambda world, size: "scattered"
        if world.num_hosts > 1:
            dense_module.choose_sum_algorithm = lambda world, size: "by host"
        again = replace(mesh, world=world)
        bits.append(bits_at_any_time(again))
    return bits


def test_on_hosts():
    """Any layout of four ranks on hosts gives the same bits, on every rank."""
    results = [bits for of_rank in run_ranks(4, on_four, ranks_per_host=2) for bits in of_rank]
    for one, other in pairwise(results):
        for actual, expected in zip(one[0], other[0], strict=True):
            for a, b in zip(actual, expected, strict=True):
                assert (a is None and b is None) or torch.equal(a, b)


# ---- errors


def raises_in_backward(mesh):
    """Rank 1's backward fails after its first bucket has left."""
    dense_module.BUCKET_BYTES = 32
    layers = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    dense = attached(layers, mesh)

    def fail(_):
        if dense._thread is not None and mesh.rank == 1:
            raise ZeroDivisionError("in backward")

    layers[1].weight.register_hook(fail)
    began = time.monotonic()
    try:
        for _ in range(2):
            dense.zero_gradients()
            dense.begin_last_backward()
            layers(torch.ones(2, 4)).sum().backward()
            dense.reduce(finite=True, stop=False)
    except ZeroDivisionError as error:
        # Its thread has a bucket on the wire, or waits for one that never comes.
        mesh.peer_monitor.announce_end(str(error))  # as a program that ends by this error does
        return "raised", 0.0
    except PeerLost:
        return "lost", time.monotonic() - began
    return "done", 0.0


def test_an_error_in_backward_leaves_nobody_waiting():
    (lost, seconds), (raised, _) = run_ranks(2, raises_in_backward, timeout=60, fresh=True)
    assert (lost, raised) == ("lost", "raised")
    assert seconds < 30


def test_a_gradient_that_comes_too_late_is_told(monkeypatch):
    """A parameter that gets a second gradient after its bucket has left: never summed wrongly."""
    monkeypatch.setattr(dense_module, "BUCKET_BYTES", 8)
    monkeypatch.setattr(dense_sums, "sum_over_ranks", lambda mesh, values, way: None)
    monkeypatch.setattr(Mesh, "broadcast", lambda mesh, channel, values, **_: values)
    model = Odd()
    dense = attached(model, Mesh(World(ranks_per_host=2)))
    step_of(model, dense, 0, 0, parts=1, is_overlapped=True)
    with pytest.raises(
        RuntimeError, match=r"got 2 gradients in one backward, 1 at most.*use_reent"
    ):
        step_of(model, dense, 0, 1, parts=1, is_overlapped=True, reenters=True)
    with pytest.raises(RuntimeError, match="in the middle of a step"):
        dense.zero_gradients()


# ---- devices, clipping


def on_two_with_a_gpu(mesh):
    return check(mesh, "cuda")


def test_parameters_on_a_gpu():
    if not torch.cuda.is_available():
        pytest.skip("no GPU here: torch.cuda.is_available() is False")
    assert check(Mesh(), "cuda")
    assert run_ranks(2, on_two_with_a_gpu) == [True, True]


def test_a_step_that_clips_and_scales():
    model = Mixed()
    dense = attached(model, Mesh())
    model(torch.ones(4, 3)).backward()
    dense.reduce(finite=True, stop=True)
    dense.scale(0.5)
    norm = nn.utils.get_total_norm([p.grad.double() for p in model.parameters()])
    assert dense.clip_norm(1e9) == pytest.approx(float(norm), rel=1e-5)
    assert dense.clip_norm(0.1) == pytest.approx(float(norm), rel=1e-5)
    after = nn.utils.get_total_norm([p.grad.double() for p in model.parameters()])
    assert float(after) == pytest.approx(0.1, rel=1e-4)
