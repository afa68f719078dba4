"""The models against plain PyTorch twins with the same weights: logits, gradients of the dense network, new rows."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from plain_models import (
    MatrixLayer,
    MixtureLayer,
    PlainDCN,
    PlainDCNv1,
    PlainDeepFM,
    PlainDLRM,
    PlainFM,
    PlainLowRankDCN,
    PlainLR,
    PlainNFM,
    PlainTowerDCN,
    PlainTowerDLRM,
    PlainWideDeep,
    VectorLayer,
)
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

from colonnade import SGD, Batch, Feature, Ids, RowOptimizer, Table, Uniform
from colonnade.errors import ConfigError
from colonnade.models.dcn import DCN, DCNv2
from colonnade.models.dlrm import DLRM
from colonnade.models.layers import mlp
from colonnade.models.linear import LR, NFM, DeepFM, FactorizationMachine, WideDeep
from colonnade.ops.linear import ONEDNN, linear
from colonnade.row_state import dense_state_dict
from colonnade.topology.towers import Partition

ROWS, DIM, LR_ROWS = 20, 4, 0.5
# "c" is a bag; "d" reads the rows of "a".
FEATURES = [
    Feature("a", "a"),
    Feature("b", "b"),
    Feature("c", "c", pooling="mean"),
    Feature("d", "a"),
]

TOWERS = Partition((("d", "b"), ("a", "c")))  # not in the features' order


def tables(kind: str, tasks: int, dtype: str = "float64") -> list[Table]:
    dims = {"vector": DIM, "weights": tasks, "both": {"deep": DIM, "wide": tasks}}
    return [
        Table(
            name, dims[kind], rows=ROWS, optimizer=SGD(lr=LR_ROWS), initializer=Uniform(scale=0.7), dtype=dtype
        )
        for name in "abc"
    ]  # fmt: skip


def batch(size=9, num_dense=3, tasks=1, dtype=torch.float64) -> Batch:
    random = torch.Generator().manual_seed(size + num_dense)
    ids = {f.name: Ids(torch.randint(0, ROWS, (size,), generator=random)) for f in FEATURES}
    lengths = torch.randint(0, 4, (size,), generator=random)  # some bags are empty
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids["c"] = Ids(torch.randint(0, ROWS, (int(offsets[-1]),), generator=random), offsets)
    dense = torch.randn(size, num_dense, generator=random, dtype=dtype)
    label = torch.randint(0, 2, (size, tasks), generator=random).to(dtype)
    return Batch(size, dense, ids, label=label)


def dcn_twin(layer, structure="parallel"):
    return lambda *weights: PlainDCN(*weights, layer, [5], structure)


def low_rank_twin(rank, structure="parallel", top=(5,), layers=2):
    return lambda *weights: PlainLowRankDCN(
        *weights, lambda width: MatrixLayer(width, rank), top, structure, cross_layers=layers
    )


def dcn_v1_twin(top, layers=2):
    return lambda *weights: PlainDCNv1(*weights, VectorLayer, top, cross_layers=layers)


def dlrm_towers(dim, c, p, keep=False):
    settings = {"tower_dim": dim, "tower_vectors": c, "tower_summaries": p, "keep_fields": keep}
    return (
        DLRM,
        "vector",
        {"bottom": [6], "top": [5], "towers": TOWERS, **settings},
        lambda *weights: PlainTowerDLRM(*weights, [6], [5], TOWERS, dim, c, p, keep),
    )


def dcn_towers(dim, layers, rank=None):
    settings = {"tower_dim": dim, "tower_layers": layers, "cross_rank": rank}
    return (
        DCNv2,
        "vector",
        {"cross_layers": 2, "top": [5], "towers": TOWERS, **settings},
        lambda *weights: PlainTowerDCN(*weights, [5], TOWERS, dim, layers, rank),
    )


def over_fields(plain, *settings):
    """The twin whose pairs are of pooled fields."""

    def make(*arguments):
        twin = plain(*arguments, *settings)
        twin.over = "fields"
        return twin

    return make


CASES = {
    "lr": (LR, "weights", {}, PlainLR),
    "fm": (FactorizationMachine, "both", {}, PlainFM),
    "nfm": (NFM, "both", {"top": [5]}, lambda *arguments: PlainNFM(*arguments, [5])),
    "wide_deep": (WideDeep, "both", {"top": [6, 5]}, lambda *arguments: PlainWideDeep(*arguments, [6, 5])),
    "deepfm": (DeepFM, "both", {"top": [5]}, lambda *arguments: PlainDeepFM(*arguments, [5])),
    "dlrm": (
        DLRM,
        "vector",
        {"bottom": [6], "top": [5], "keep_fields": False},
        lambda *arguments: PlainDLRM(*arguments, [6], [5], False),
    ),
    "dlrm, fields kept": (
        DLRM,
        "vector",
        {"bottom": [6], "top": [5], "keep_fields": True},
        lambda *arguments: PlainDLRM(*arguments, [6], [5], True),
    ),
    "deepfm, nothing deep": (DeepFM, "both", {"top": []}, lambda *arguments: PlainDeepFM(*arguments, [])),
    "fm, over fields": (
        FactorizationMachine, "both", {"over": "fields"}, over_fields(PlainFM)
    ),
    "nfm, over fields": (NFM, "both", {"top": [5], "over": "fields"}, over_fields(PlainNFM, [5])),
    "deepfm, over fields": (
        DeepFM, "both", {"top": [5], "over": "fields"}, over_fields(PlainDeepFM, [5])
    ),
    "deepfm, one bag": (
        DeepFM, "both", {"top": [5], "bags": ["c"]}, lambda *arguments: PlainDeepFM(*arguments, [5])
    ),
    "dcn": (DCN, "vector", {"cross_layers": 2, "top": [5]}, dcn_v1_twin([5])),
    "dcn, deeper": (DCN, "vector", {"cross_layers": 4, "top": [5, 3]}, dcn_v1_twin([5, 3], 4)),
    "dcn, nothing deep": (DCN, "vector", {"cross_layers": 1, "top": []}, dcn_v1_twin([], 1)),
    "dcnv2": (
        DCNv2, "vector", {"cross_layers": 2, "top": [5]}, dcn_twin(lambda width: MatrixLayer(width, None))
    ),
    "dcnv2, stacked, low rank": (
        DCNv2,
        "vector",
        {"cross_layers": 2, "top": [5], "cross_rank": 3, "structure": "stacked"},
        low_rank_twin(3, "stacked"),
    ),
    "dcnv2, low rank": (
        DCNv2,
        "vector",
        {"cross_layers": 3, "top": [5, 4], "cross_rank": 2},
        low_rank_twin(2, top=[5, 4], layers=3),
    ),
    "dcnv2, low rank, nothing deep": (
        DCNv2,
        "vector",
        {"cross_layers": 2, "top": [], "cross_rank": 1},
        low_rank_twin(1, top=[]),
    ),
    "dcnv2, low rank, stacked, nothing deep": (
        DCNv2,
        "vector",
        {"cross_layers": 1, "top": [], "cross_rank": 2, "structure": "stacked"},
        low_rank_twin(2, "stacked", [], 1),
    ),
    "dcnv2, experts": (
        DCNv2,
        "vector",
        {"cross_layers": 2, "top": [5], "cross_rank": 3, "cross_experts": 2},
        dcn_twin(lambda width: MixtureLayer(width, 3, 2)),
    ),
    "dlrm, towers": dlrm_towers(2, 1, 0),
    "dlrm, towers of several vectors": dlrm_towers(3, 2, 1, keep=True),
    "dlrm, towers of summaries": dlrm_towers(2, 0, 2),
    "dcnv2, towers": dcn_towers(2, 1),
    "dcnv2, towers of low rank": dcn_towers(3, 2, rank=2),
}  # fmt: skip

TYPICAL = {"deepfm", "dlrm, towers", "dcnv2, experts"}
"""A model with a linear term, one with towers, one with a mixture; of the others, what takes seconds is slow."""
TYPICAL_FIRST = [
    pytest.param(case, marks=() if case in TYPICAL else pytest.mark.slow) for case in CASES
]


def build(case: str, num_dense: int = 3, tasks: int = 1, dtype: str = "float64"):
    model, kind, settings, _ = CASES[case]
    torch.manual_seed(0)
    options = {"num_dense": num_dense, "tasks": tasks, **settings}
    return model(tables(kind, tasks, dtype), FEATURES, **options).to(getattr(torch, dtype))


def twin_of(case: str, model, num_dense: int, tasks: int):
    """The plain model with the same dense weights and the same rows."""
    _, kind, _, make = CASES[case]
    plain = make(tables(kind, tasks), FEATURES, num_dense, tasks).double()
    remaining = plain.load_state_dict(plain.taken(dense_state_dict(model)), strict=False)
    assert not remaining.unexpected_keys and all(
        key.startswith("bags.") for key in remaining.missing_keys
    )
    with torch.no_grad():
        for name, bag in plain.bags.items():
            bag.weight.copy_(model.embeddings.rows(name, torch.arange(ROWS)))
    return plain


@pytest.mark.parametrize("tasks", [1, 2])
@pytest.mark.parametrize("num_dense", [0, 3])
@pytest.mark.parametrize("case", CASES)
def test_model_is_its_twin(case, num_dense, tasks):
    model = build(case, num_dense, tasks)
    with torch.no_grad():  # linear terms start at zero, which would hide them
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    plain, inputs = twin_of(case, model, num_dense, tasks), batch(num_dense=num_dense, tasks=tasks)
    logits, wanted = model(inputs), plain(inputs)
    assert logits.shape == (inputs.size, tasks)
    torch.testing.assert_close(logits, wanted)

    bce(logits, inputs.label).backward()
    bce(wanted, inputs.label).backward()
    twins = dict(plain.named_parameters())
    gradients = plain.taken({name: item.grad for name, item in model.named_parameters()})
    assert len(twins) == len(gradients) + len(plain.bags)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, twins[name].grad, msg=lambda m, n=name: f"{n}: {m}")
    RowOptimizer(model.embeddings).step()
    for name, bag in plain.bags.items():
        stepped = bag.weight.detach() - LR_ROWS * bag.weight.grad
        torch.testing.assert_close(model.embeddings.rows(name, torch.arange(ROWS)), stepped)


@pytest.mark.parametrize("case", TYPICAL_FIRST)
def test_one_batch_can_be_learned(case):
    model = build(case, dtype="float32")
    rows, dense = RowOptimizer(model.embeddings), torch.optim.Adam(model.parameters(), lr=1e-2)
    inputs = batch(dtype=torch.float32)
    for _ in range(200):
        dense.zero_grad()
        loss = bce(model(inputs), inputs.label)
        loss.backward()
        rows.step()
        dense.step()
        if loss.item() < 0.1:
            return
    raise AssertionError(f"loss is still {loss.item()}")


@pytest.mark.parametrize("case", CASES)
def test_a_batch_of_none(case):
    logits = build(case)(batch(size=0))
    assert logits.shape == (0, 1)
    logits.sum().backward()


@pytest.mark.parametrize("case", CASES)
def test_bfloat16_of_the_dense_network(case):
    """Near the exact logits, in the rows' dtype, with gradients for everything."""
    model = build(case, dtype="float32")
    inputs = batch(dtype=torch.float32)
    exact = model(inputs).detach()
    model.autocast = torch.bfloat16
    logits = model(inputs)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, exact, rtol=0.05, atol=0.1)
    if case not in (
        "lr",
        "fm",
        "fm, over fields",
    ):  # whose network has no product that a single dense column notices
        assert not torch.equal(logits, exact), "nothing was computed in bfloat16"
    bce(logits, inputs.label).backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    contexts = model.embeddings.pipeline.gradients.contexts
    (backwards,) = (
        context.gradients.backwards for context in contexts if context.gradients.backwards
    )
    assert all(gradient.dtype == torch.float32 for gradient in backwards[0])


@pytest.mark.parametrize("case", TYPICAL_FIRST)
def test_the_dense_network_compiles_whole(case):
    """Lookups stay outside; the network is one graph, whatever the batch's size; logits and gradients are the same."""
    torch._dynamo.reset()  # it counts the programs of one class, whatever its settings
    model = build(case)
    plain = copy.deepcopy(model)
    model.compile(backend="aot_eager", fullgraph=True)
    for size in (9, 12, 15):
        inputs = batch(size)
        result, wanted = model(inputs), plain(inputs)
        torch.testing.assert_close(result, wanted)
        bce(result, inputs.label).backward()
        bce(wanted, inputs.label).backward()
    for actual, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["deepfm", "dlrm", "dcnv2"])
def test_the_dense_network_compiles_with_inductor(case):
    model = build(case, dtype="float32")
    wanted = model(batch(dtype=torch.float32)).detach()
    model.compile()
    result = model(batch(dtype=torch.float32))
    torch.testing.assert_close(result, wanted)
    result.sum().backward()


def test_a_compiled_model_is_copied_without_its_program():
    model = build("deepfm")
    model.compile(backend="eager")
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert not torch.equal(model(batch()), other(batch()))


@functools.cache
def no_gpu() -> str:
    return "" if torch.cuda.is_available() else "torch sees no GPU on this machine"


@pytest.mark.skipif(bool(no_gpu()), reason=no_gpu())
@pytest.mark.parametrize("case", CASES)
def test_the_dense_network_on_a_gpu(case):
    """Rows, ids and their gradients stay in DRAM."""
    model = build(case)
    plain = copy.deepcopy(model)
    model.to("cuda")
    inputs = batch()
    result, wanted = model(inputs), plain(inputs)
    assert result.device.type == "cuda"
    torch.testing.assert_close(result.cpu(), wanted)
    bce(result, inputs.label.cuda()).backward()
    bce(wanted, inputs.label).backward()
    for actual, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(actual.grad.cpu(), expected.grad)
    for item in (model, plain):
        RowOptimizer(item.embeddings).step()
    ids = torch.arange(ROWS)
    torch.testing.assert_close(model.embeddings.rows("a", ids), plain.embeddings.rows("a", ids))


def test_outputs_arrive_where_the_module_was_moved():
    """Without a GPU: the device that holds no data. Moving the module moves no row."""
    model = build("deepfm").to("meta")
    logits = model(batch())
    assert logits.device.type == "meta" and logits.shape == (9, 1)
    assert model.embeddings.rows("a", torch.arange(3)).device.type == "cpu"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DeepFM(tables("vector", 1), FEATURES, num_dense=0), ["'a'", "deep", "Table("]),
        (lambda: DLRM(tables("both", 1), FEATURES, num_dense=0), ["'a'", "no parts"]),
        (
            lambda: FactorizationMachine(tables("both", 2), FEATURES, num_dense=0, tasks=1),
            ["'a.wide'", "2", "1 tasks"],
        ),
        (lambda: LR(tables("vector", 1), FEATURES, num_dense=0), ["'a'", "4", "1 tasks"]),
        (
            lambda: DCNv2(tables("vector", 1), FEATURES, num_dense=0, cross_experts=2),
            ["cross_rank"],
        ),
    ],
)
def test_tables_that_do_not_fit_are_refused(make, words):
    with pytest.raises(ConfigError) as caught:
        make()
    for word in words:
        assert word in str(caught.value)


def test_an_mlp_runs_whatever_is_in_it():
    torch.manual_seed(0)
    plain = nn.Sequential(*mlp([13, 8, 1]), nn.Sigmoid(), nn.LayerNorm(1))
    ours = mlp([13, 8, 1])
    ours.append(nn.Sigmoid())
    ours.append(nn.LayerNorm(1))
    ours.load_state_dict(plain.state_dict())
    x = torch.randn(100, 13)
    torch.testing.assert_close(ours(x), plain(x))


@pytest.mark.parametrize("width", [13, 205])  # of few weights, and of more than MIN_WEIGHTS
@pytest.mark.parametrize("batch", [1, 63, 64, 100])
def test_a_linear_layer_is_torchs(batch, width):
    torch.manual_seed(0)
    x = torch.randn(batch, width)
    x[-1, 3] = float("nan")
    w = torch.randn(20, width)
    for b in (
        torch.randn(20),
        torch.randn(20, 2)[:, 0],
        torch.randn(1).expand(20),
        torch.randn(1),
        None,
    ):
        for relu in (False, True):
            wanted = nn.functional.linear(x, w, b)
            wanted = wanted.relu() if relu else wanted
            torch.testing.assert_close(
                linear(x, w, b, relu=relu), wanted, rtol=1e-4, atol=1e-4, equal_nan=True
            )
    assert linear(torch.randn(batch, 0), torch.randn(3, 0), torch.randn(3)).shape == (batch, 3)


@pytest.mark.skipif(not ONEDNN, reason="torch's own layer has both at once")
def test_a_layers_weights_have_their_gradients_before_its_inputs_do():
    order = []
    x, w = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    read = x * 1
    read.register_hook(lambda _: order.append("x"))
    w.register_post_accumulate_grad_hook(lambda _: order.append("w"))
    linear(read, w, None, relu=True).sum().backward()
    assert order == ["w", "x"]


@pytest.mark.parametrize("width", [13, 205])
def test_gradients_of_a_linear_layer_are_torchs(width):
    torch.manual_seed(0)
    results = []
    for function in (
        lambda x, w, b: linear(x, w, b, relu=True),
        lambda x, w, b: nn.functional.linear(x, w, b).relu(),
    ):
        torch.manual_seed(1)
        x, w, b = (torch.randn(*s, requires_grad=True) for s in ((100, width), (20, width), (20,)))
        function(x, w, b).square().sum().backward()
        results.append([x.grad, w.grad, b.grad])
    for ours, other in zip(*results, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("shape", [(5, 3), (2, 5, 3), (0, 3)])
def test_an_exported_linear_layer_trains(shape, relu):
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    w = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    b = torch.randn(4, dtype=torch.float64, requires_grad=True)
    layer = torch.ops.colonnade.linear
    torch.autograd.gradcheck(lambda *inputs: layer(*inputs, relu), (x, w, b))
    torch.autograd.gradcheck(lambda *inputs: layer(*inputs, None, relu), (x, w))
