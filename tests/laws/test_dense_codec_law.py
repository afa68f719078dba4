"""Dense gradients that are rounded on their way: the same bits on every rank, nothing lost for longer than a step, the
ranks' word exact, and residuals that outlive a run in whatever world it goes on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from ranks import console_of, run_ranks
from small_run import CONFIG
from torch import nn

from colonnade import Mesh, World
from colonnade.checkpoint.fingerprint import dense_weights
from colonnade.comm.collectives import (
    choose_sum_algorithm,
    estimate_sum_traffic,
    sum_algorithm_of_layout,
)
from colonnade.comm.traffic import Traffic
from colonnade.config.run import build_config, override_settings
from colonnade.plan.names import Thresholding
from colonnade.run.run import open_run
from colonnade.train import dense as buckets
from colonnade.train.dense import DenseGradients
from colonnade.train.setup import apply_directions, apply_late_directions, choose_messages
from colonnade.wire.codec import CODECS
from colonnade.wire.dense_sums import coded_buffer_bytes, sum_residuals_by_parameter

ROUNDED = ("bf16", "fp16", "int8")
RULE = Thresholding(keep=0.1, keep_steps=5)
NAMES = (*ROUNDED, "thresholded")
RULES = {"thresholded": RULE, "directions": replace(RULE, adam_weight_decay=0.01)}
ALL = (*NAMES, "directions")
"""Codecs whose messages have gradients, and directions of Adam."""
STEPS, BUCKET = 12, 6000
SIZES = {"first": 1300, "second": 37, "wide": 600, "half": 5}
DTYPES = {"wide": torch.float64, "half": torch.bfloat16}


def network():
    return [nn.Parameter(torch.zeros(n, dtype=DTYPES.get(k))) for k, n in SIZES.items()]


def gradients_of(rank, step):
    """Return gradients. A few elements are hundreds of times as large as their neighbours, which int8 then rounds to
    nothing; nearly the same in every step."""
    random = torch.Generator().manual_seed(7)
    steady = [torch.randn(n, generator=random, dtype=torch.float64) for n in SIZES.values()]
    for part in steady:
        part[::97] *= 300
    random.manual_seed(1000 * step + rank)
    noise = [torch.randn(n, generator=random, dtype=torch.float64) for n in SIZES.values()]
    return [(1 + rank) * a + 1e-4 * b for a, b in zip(steady, noise, strict=True)]


def unit_of(step):
    """Return the divisor of a step's gradients, as if it had several batches."""
    return 1.0 if step % 3 else 64.0


def step_of(dense, rank, step, *, gradients=None, finite=True, loss=0.0):
    """Return the applied gradients by parameter, and the result of `reduce`."""
    gradient_scale = unit_of(step)
    dense.zero_gradients()
    dense.begin_last_backward(gradient_scale=gradient_scale)
    gradients_given = gradients or gradients_of(rank, step)
    sum(
        (p * (g * gradient_scale).to(p.dtype)).double().sum()
        for p, g in zip(dense.parameters, gradients_given, strict=True)
    ).backward()
    reduced = dense.reduce(finite=finite, stop=False, loss=loss)
    dense.scale(1 / gradient_scale)
    return [p.grad.clone() for p in dense.parameters], reduced


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch):
    """Restore the size of buckets after each test."""
    monkeypatch.setattr(buckets, "BUCKET_BYTES", buckets.BUCKET_BYTES)


def opened(mesh, name, states=()):
    buckets.BUCKET_BYTES = BUCKET
    dense = DenseGradients(network(), mesh, RULES.get(name, name))
    dense.set_checkpoint_residuals(states)
    dense.build_buckets()
    return dense


def foretold(dense):
    """Bytes of a step by link."""
    world, results = dense.mesh.world, {"local": 0.0, "remote": 0.0}
    for bucket in dense.buckets:
        size = bucket.send_buffer.nbytes
        if bucket.coded is None:
            expected = estimate_sum_traffic(choose_sum_algorithm(world, size), world, size)
        else:
            sizes = [dense.parameters[index].numel() for index in bucket.indices]
            coded = coded_buffer_bytes(dense.codec, sizes, world.num_ranks, bucket.coded.step)
            expected = estimate_sum_traffic(sum_algorithm_of_layout(world), world, size, coded)
        results = {link: results[link] + getattr(expected, f"{link}_bytes") for link in results}
    return results


def train(mesh, name, *, feeds_back=True):
    """Sums over STEPS steps: of what was applied, and of this rank's gradients."""
    mesh = replace(mesh, traffic=Traffic())
    dense = opened(mesh, name)
    applied, own, bits = [0.0] * len(SIZES), [0.0] * len(SIZES), []
    for step in range(STEPS):
        before, reported = dict(mesh.traffic.sent_bytes), foretold(dense)
        result, _ = step_of(dense, mesh.rank, step)
        after = mesh.traffic.sent_bytes
        for link, size in reported.items():
            assert after.get(("dense", link), 0) - before.get(("dense", link), 0) == size
        applied = [a + f.double() for a, f in zip(applied, result, strict=True)]
        own = [a + g for a, g in zip(own, gradients_of(mesh.rank, step), strict=True)]
        bits.append(result)
        if not feeds_back:
            for bucket in dense.buckets:
                if bucket.coded is not None:
                    bucket.coded.sent.residual.zero_()
                    bucket.coded.summed.residual.zero_()
    return {
        "applied": applied,
        "mine": own,
        "bits": bits,
        "state": dense.export_residuals(),
        "sent": reported,
        "noise_steps": dense.noise.steps,
    }


def goes_on(mesh, name):
    """A world that goes on where another ended does its next step with the same bits; one that would not restore what
    was kept does not."""
    dense = opened(mesh, name)
    for step in range(2):
        step_of(dense, mesh.rank, step)
    states = [dense.export_residuals()] * mesh.num_ranks  # of others it takes none
    again, anew = opened(mesh, name, states), opened(mesh, name)
    wanted, result, other = (step_of(dense_, mesh.rank, 3)[0] for dense_ in (dense, again, anew))
    assert all(map(torch.equal, result, wanted)) and not all(map(torch.equal, other, wanted))
    assert same(again.export_residuals(), dense.export_residuals())


def same(one, other):
    return all(
        torch.equal(a[leg], b[leg])
        for a, b in zip(one["buckets"], other["buckets"], strict=True)
        for leg in ("sent", "summed")
        if a[leg] is not None
    ) and all(
        torch.equal(a["thresholds"][leg], b["thresholds"][leg])
        and (a["step"], a["moments_step"]) == (b["step"], b["moments_step"])
        and (a["moments"] is None or torch.equal(a["moments"], b["moments"]))
        for a, b in zip(one["buckets"], other["buckets"], strict=True)
        for leg in a.get("thresholds", ())
    )


def refuses(mesh, name):
    """One bad number anywhere is seen by all, and a step that is not applied leaves no trace."""
    dense = opened(mesh, name)
    for step in range(2):
        step_of(dense, mesh.rank, step)
    retained = dense.export_residuals()
    for bad in (float("nan"), float("inf"), float("-inf")):
        gradients = gradients_of(mesh.rank, 3)
        if mesh.rank == 1:
            gradients[0][1299] = bad
        assert not step_of(dense, mesh.rank, 3, gradients=gradients)[1][0]
        assert same(dense.export_residuals(), retained)
    assert not step_of(dense, mesh.rank, 3, finite=mesh.rank != 1)[1][0]
    assert same(dense.export_residuals(), retained)
    _, text = step_of(dense, mesh.rank, 3, loss=2.0**-40 + (mesh.rank == 0))
    assert text == (True, False, 1 + mesh.num_ranks * 2.0**-40)  # to the last bit
    assert not same(dense.export_residuals(), retained)
    dense.restore_residuals()  # as where clipping finds that norms are no numbers
    assert same(dense.export_residuals(), retained)


def loss_after(mesh, name):
    """A small network that learns another one, each rank from samples of its own."""
    torch.manual_seed(3)
    teacher, model = (nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 1)) for _ in "12")
    dense = DenseGradients(list(model.parameters()), mesh, name)
    dense.build_buckets()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    inputs = torch.randn(90, 8)[mesh.rank :: mesh.num_ranks]
    for _ in range(60):
        dense.zero_gradients()
        dense.begin_last_backward()
        loss = ((model(inputs) - teacher(inputs).detach()) ** 2).sum() / 90
        loss.backward()
        whole = dense.reduce(finite=True, stop=False, loss=loss.detach())[2]
        optimizer.step()
    return whole


def everything(mesh):
    results = {}
    for name in ("exact", *ALL):
        results[name] = train(mesh, name)
    for name in ("exact", "int8"):
        results[name, "loss"] = loss_after(mesh, name)
    for name in NAMES:
        results[name, "alone"] = train(mesh, name, feeds_back=False)
    return results


WORLDS = [
    pytest.param((3, 3), id="3 ranks", marks=pytest.mark.slow),
    pytest.param((4, 2), id="2 x 2"),
]
"""Numbers of ranks, in all and of each host: sums are inside a host first, or none are."""


@pytest.fixture(scope="module", params=WORLDS)
def everyone(request):
    num_ranks, per_host = request.param
    return run_ranks(num_ranks, everything, ranks_per_host=per_host)


def goes_on_and_refuses(mesh):
    for name in ALL:
        goes_on(mesh, name)
        refuses(mesh, name)


@pytest.mark.parametrize("world", WORLDS)
def test_a_world_goes_on_and_refuses_what_is_not_finite(world):
    num_ranks, per_host = world
    run_ranks(num_ranks, goes_on_and_refuses, ranks_per_host=per_host)


@pytest.mark.parametrize("name", ALL)
def test_every_rank_has_the_same_bits(everyone, name):
    for results in everyone[1:]:
        for step, result in enumerate(results[name]["bits"]):
            assert all(map(torch.equal, result, everyone[0][name]["bits"][step]))
    # Parameters of 16 bits travel as they are.
    exact, coded = (everyone[0][which]["bits"][0] for which in ("exact", name))
    assert torch.equal(exact[3], coded[3]) and not torch.equal(exact[0], coded[0])


def test_noise_is_not_measured_where_sums_have_late_elements(everyone):
    steps = {name: everyone[0][name]["noise_steps"] for name in ("exact", *ALL)}
    assert steps == dict.fromkeys(("exact", *ROUNDED), STEPS) | dict.fromkeys(ALL[-2:], 0)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_applied_is_what_was_computed_less_the_last_residuals(everyone, name):
    lost = sum_residuals_by_parameter([results[name]["state"] for results in everyone])
    alone = everyone[0][name, "alone"]["applied"]
    assert set(lost) == ({0} if name == "thresholded" else {0, 1, 2})
    for number in lost:
        wanted = sum(results[name]["mine"][number] for results in everyone)
        off = wanted - everyone[0][name]["applied"][number]
        largest = float(wanted.abs().max()) / STEPS  # of a step's sum
        # But for the rounding of float32, nothing else was lost;
        rounded = (torch.float64 == DTYPES.get(list(SIZES)[number])) * 1e-12 or 3e-6
        assert float((off - lost[number]).abs().max()) <= rounded * largest * STEPS
        # and of codecs that is one rounding of what each rank sent and one of the sum.
        if name in ROUNDED:
            assert float(off.abs().max()) <= 2.2 * CODECS[name].nearest_error * largest
            # Without feedback it adds up over steps, for small elements beside large ones to all they are.
            assert float((wanted - alone[number]).abs().mean()) > 1.7 * float(off.abs().mean())


@pytest.mark.parametrize("name", ROUNDED)
def test_bytes_are_those_of_the_codec_where_links_are_slow(everyone, name):
    exact, coded = everyone[0]["exact"]["sent"], everyone[0][name]["sent"]
    link = "remote" if exact["remote"] else "local"
    halves = 2 if name != "int8" else 1
    codes, elements = halves * (1300 + 37 + 600), 4 * (1300 + 37) + 8 * 600
    assert coded[link] / exact[link] < 1.15 * codes / elements  # as counted: `train` asserts it


def test_a_network_learns_nearly_as_well(everyone):
    assert everyone[0]["int8", "loss"] == pytest.approx(everyone[0]["exact", "loss"], rel=0.05)


@pytest.mark.parametrize("name", NAMES)
def test_another_world_is_given_what_was_kept(everyone, name):
    """One rank alone, with other buckets: what was applied is then all that was computed."""
    states = [results[name]["state"] for results in everyone]
    lost = sum_residuals_by_parameter(states)
    dense = opened(Mesh(), name, states)
    nothing = [torch.zeros(n, dtype=torch.float64) for n in SIZES.values()]
    assert not step_of(dense, 0, 0, gradients=[torch.full_like(g, float("nan")) for g in nothing])[1][0]  # fmt: skip
    retained = dense.export_residuals()  # still: nothing was applied
    result, _ = step_of(dense, 0, 0, gradients=nothing)
    for number, part in lost.items():
        torch.testing.assert_close(result[number].double(), part.double(), rtol=1e-6, atol=0)
    assert not bool(result[3].any())
    assert dense.export_residuals() is None
    assert not any(bool(part.any()) for part in step_of(dense, 0, 1, gradients=nothing)[0])
    again, _ = step_of(opened(Mesh(), "exact", [retained]), 0, 0, gradients=nothing)
    assert all(map(torch.equal, again, result))
    # Of weights that are no longer trained nothing is kept.
    other = DenseGradients(network()[:3], Mesh())
    other.set_checkpoint_residuals(states)
    other.build_buckets()
    assert other.export_residuals() is None


def given_on_two(mesh, states, name):
    """Two ranks, where there were others: rank 0 alone adds what was kept."""
    dense = opened(mesh, name, states)
    zeros = [torch.zeros(n, dtype=torch.float64) for n in SIZES.values()]
    result, _ = step_of(dense, mesh.rank, 0, gradients=zeros)
    return result, dense.export_residuals()


def test_a_coded_world_of_another_size_is_given_what_was_kept(everyone):
    states = [results["int8"]["state"] for results in everyone]
    (result, _), (same_found, _) = constraints = run_ranks(2, given_on_two, states, "int8")
    residuals = sum_residuals_by_parameter([state for _, state in constraints])
    for number, part in sum_residuals_by_parameter(states).items():
        assert torch.equal(result[number], same_found[number])
        total = result[number].double() + residuals[number].double()
        torch.testing.assert_close(total, part.double(), rtol=1e-5, atol=1e-6)


def test_a_coded_world_of_another_size_is_given_what_was_kept_of_directions(everyone):
    """Directions are added to directions: as gradients, Adam would take them for a hundredfold gradient."""
    states = [results["directions"]["state"] for results in everyone]
    owed = sum_residuals_by_parameter(states, of_directions=True)
    assert set(owed) == {0} and bool(owed[0].any()) and not sum_residuals_by_parameter(states)
    results = run_ranks(2, given_on_two, states, "directions")
    late = sum_residuals_by_parameter([state for _, state in results], of_directions=True)
    for result, state in results:
        torch.testing.assert_close(result[0] + late[0], owed[0], rtol=1e-5, atol=1e-4)
        coded = [bucket for bucket in state["buckets"] if bucket["sent"] is not None]
        assert not any(bool(bucket["moments"].any()) for bucket in coded)


@pytest.mark.parametrize("name", ["exact", "int8", "thresholded"])
def test_directions_are_never_added_to_gradients(everyone, name):
    states = [results["directions"]["state"] for results in everyone]
    for result, _ in run_ranks(2, given_on_two, states, name):
        assert not any(bool(part.any()) for part in result)


@pytest.mark.parametrize("optimizer_class", [torch.optim.Adam, torch.optim.SGD])
def test_directions_are_applied_once_where_adam_gets_gradients(everyone, optimizer_class):
    """The first step of one rank also subtracts what two ranks owe, times the learning rate; SGD, whose learning rate
    has another size, does not."""
    states = [results["directions"]["state"] for results in everyone]
    owed = sum_residuals_by_parameter(states, of_directions=True)
    dense = opened(Mesh(), "exact", states)
    before = [parameter.detach().clone() for parameter in dense.parameters]
    optimizer = optimizer_class(dense.parameters, lr=0.5)
    apply_late_directions(optimizer, dense.late_directions)
    for _ in range(2):  # gradients are zero
        optimizer.step()
    factor = 0.5 if optimizer_class is torch.optim.Adam else 0.0
    for index, (parameter, old) in enumerate(zip(dense.parameters, before, strict=True)):
        late = owed.get(index, torch.zeros(parameter.numel())).view_as(parameter).to(parameter)
        torch.testing.assert_close(parameter.detach(), old - factor * late)


def trains_with_another_optimizer(mesh, before, after):
    """Steps that go on with messages of the other kind, on as many ranks."""
    dense = opened(mesh, before)
    for step in range(2):
        step_of(dense, mesh.rank, step)
    return given_on_two(mesh, [dense.export_residuals()] * mesh.num_ranks, after)[0]


def test_a_run_goes_on_with_another_optimizer():
    for before, after in (("thresholded", "directions"), ("directions", "thresholded")):
        (one, other) = run_ranks(2, trains_with_another_optimizer, before, after)
        assert all(map(torch.equal, one, other))


def test_a_warm_up_begins_where_codecs_change(everyone):
    """Sums that were rounded had none."""
    states = [results["int8"]["state"] for results in everyone]
    for _, state in run_ranks(2, given_on_two, states, "thresholded"):
        assert [bucket["step"] for bucket in state["buckets"] if bucket["sent"] is not None] == [1]


def trains_by_directions(mesh, weight_decay):
    """Weights after some steps whose messages have all elements, and those of each rank's own Adam, which all ranks
    follow by the mean."""
    random = torch.Generator().manual_seed(mesh.rank)
    weights, bias = (nn.Parameter(torch.ones(size)) for size in (800, 20))
    optimizer = torch.optim.Adam([weights, bias], lr=0.1, weight_decay=weight_decay)
    codec = choose_messages(Thresholding(keep=0.999, keep_steps=0), optimizer)
    dense = DenseGradients([weights, bias], mesh, codec)
    dense.build_buckets()
    assert [len(parameter) for parameter in dense.directed_parameters] == [800]
    apply_directions(optimizer, dense.directed_parameters)
    own = nn.Parameter(torch.ones(800))
    adam = torch.optim.Adam([own], lr=1.0, weight_decay=weight_decay / mesh.num_ranks)
    twin = torch.ones(800)
    for step in range(8):
        own.grad = torch.randn(800, generator=random) + step
        dense.zero_gradients()
        dense.begin_last_backward(gradient_scale=4.0)
        (4.0 * (weights @ own.grad + bias.sum())).backward()
        dense.reduce(finite=True, stop=False)
        dense.scale(1 / 4.0)
        optimizer.step()
        with torch.no_grad():
            own.copy_(twin)
            adam.step()
            mean = mesh.all_reduce("dense", twin - own.detach()) / mesh.num_ranks
            twin -= 0.1 * mean
    return weights.detach(), twin, bias.detach()


@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
def test_directions_are_those_of_each_ranks_own_adam(weight_decay):
    for weights, twin, bias in run_ranks(2, trains_by_directions, weight_decay):
        torch.testing.assert_close(weights, twin, rtol=0.01, atol=0.003)
        assert float((bias - bias[0]).abs().max()) == 0 and float(bias[0]) < 0.3


def test_other_optimizers_get_gradients():
    weights = [nn.Parameter(torch.ones(800))]
    others = [
        torch.optim.SGD(weights, lr=0.1),
        torch.optim.AdamW(weights),
        torch.optim.Adam(weights, betas=(0.5, 0.9)),
        torch.optim.Adam(weights, weight_decay=0.1, decoupled_weight_decay=True),
    ]
    assert all(choose_messages(RULE, optimizer) == RULE for optimizer in others)
    assert choose_messages("int8", torch.optim.Adam(weights)) == "int8"


def test_on_one_rank_nothing_is_coded():
    dense = opened(Mesh(World()), "int8")
    result, _ = step_of(dense, 0, 1)
    for own, wanted in zip(result, gradients_of(0, 1), strict=True):
        assert torch.equal(own, wanted.to(own.dtype))
    assert dense.export_residuals() is None


def runs(mesh, folder):
    """Dense weights after 7 steps at once; after 4, and 3 more once that run was closed; what was then kept, and bytes
    of dense gradients. The same of steps in two parts."""
    results = []
    for name, stops, parts in (
        ("once", [7], 1), ("twice", [4, 7], 1), ("parts", [7], 2), ("parts twice", [4, 7], 2),
    ):  # fmt: skip
        for stop in stops:
            mesh.traffic.sent_bytes.clear()
            settings = {
                "plan.codec.dense": "int8",
                "train.max_steps": stop,
                "train.accumulate": parts,
            }
            run = open_run(
                override_settings(build_config(CONFIG), settings),
                mesh,
                folder / name,
                console=console_of(mesh),
            )
            run.train()
            dense = dense_weights(run.trainer.model)
            weights = {n: v.clone() for n, v in dense.items()}
            results.append(
                (weights, run.trainer.dense.export_residuals(), mesh.traffic.bytes_of("dense"))
            )
            run.close()
    return results


def test_a_run_that_goes_on_has_the_bits_of_one_that_never_stopped(tmp_path):
    """And one that goes on on one rank is given what the others had kept. A step in parts is coded once, as a sum."""
    all_found = run_ranks(2, runs, tmp_path)
    for result in all_found:
        for (once, retained, _), (earlier, _, _), (twice, kept_again, _) in (
            result[:3],
            result[3:],
        ):
            assert all(torch.equal(once[name], twice[name]) for name in once)
            assert not all(torch.equal(once[name], earlier[name]) for name in once)
            assert same(retained, kept_again)
        (whole, _, sent), (parts, _, sent_in_parts) = result[0], result[3]
        assert sent == sent_in_parts > 0
        for name in whole:
            torch.testing.assert_close(parts[name], whole[name], rtol=0.05, atol=0.005)
            assert torch.equal(parts[name], all_found[0][3][0][name])
    config = override_settings(
        build_config(CONFIG), {"plan.codec.dense": "int8", "train.max_steps": 8}
    )
    run = open_run(config, Mesh(), tmp_path / "twice")
    lost = sum_residuals_by_parameter([result[2][1] for result in all_found])
    owed = run.trainer.dense.export_residuals()["buckets"][0]
    parts = [lost[number] for number in owed["numbers"]]
    assert torch.equal(owed["owed"], torch.cat(parts)) and bool(owed["owed"].any())
    run.train()
    assert run.trainer.dense.export_residuals() is None
    run.close()
