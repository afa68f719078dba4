"""RowOptimizer as its user meets it: groups, schedules, clipping, accumulation, parts; equal to torch's optimizers."""

from __future__ import annotations

import math

import pytest
import torch
from ranks import run_ranks

from colonnade import (
    FTRL,
    LAMB,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Batch,
    EmbeddingCollection,
    Feature,
    Ids,
    Mesh,
    RowOptimizer,
    RowWiseAdagrad,
    RowWiseAdam,
    Table,
    Uniform,
)
from colonnade.errors import ConfigError, NonFiniteError

ROWS, DIM = 7, 3
ALL = [
    SGD(lr=0.1),
    SGD(lr=0.1, momentum=0.9, weight_decay=0.01),
    SGD(lr=0.1, momentum=0.9, nesterov=True),
    Adagrad(lr=0.1, initial_accumulator=0.1),
    RowWiseAdagrad(lr=0.1),
    Adam(lr=0.1, weight_decay=0.01),
    RowWiseAdam(lr=0.1),
    AdamW(lr=0.1, weight_decay=0.1),
    FTRL(lr=0.1, l1=0.01, l2=0.1),
    LAMB(lr=0.1, weight_decay=0.01),
]
OF_TORCH = [
    (SGD(lr=0.1, weight_decay=0.02), torch.optim.SGD),
    (SGD(lr=0.1, momentum=0.9, nesterov=True), torch.optim.SGD),
    (Adagrad(lr=0.1, weight_decay=0.02), torch.optim.Adagrad),
    (Adam(lr=0.1, betas=(0.8, 0.99)), torch.optim.Adam),
    (AdamW(lr=0.1, weight_decay=0.3), torch.optim.AdamW),
]


def name_of(optimizer) -> str:
    return f"{optimizer.name}{getattr(optimizer, 'momentum', '')}"


def collection(*tables: Table) -> EmbeddingCollection:
    tables = tables or (table(SGD(lr=1.0)),)
    return EmbeddingCollection(tables, [Feature(t.name, t.name) for t in tables], seed=5).open()


def table(optimizer, name="item", **changes) -> Table:
    settings = {"rows": ROWS, "initializer": Uniform(scale=0.5), "dtype": "float64"} | changes
    dim = settings.pop("dim", DIM)
    return Table(name, dim, optimizer=optimizer, **settings)


def batch(ids: list[int], *names: str) -> Batch:
    results = {name: Ids(torch.tensor(ids)) for name in names or ("item",)}
    return Batch(len(ids), torch.zeros(len(ids), 0), results)


def backward(embeddings, ids, gradient, *names):
    result = embeddings(batch(ids, *names))
    torch.autograd.backward(list(result.values()), [gradient.to(v.dtype) for v in result.values()])


def rows_of(embeddings, name="item") -> torch.Tensor:
    return embeddings.rows(name, torch.arange(ROWS))


def gradients(steps: int, seed: int = 0):
    """Per step: ids with duplicates, not all rows, and a gradient per lookup."""
    random = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        ids = torch.randint(0, ROWS, (6,), generator=random)
        yield ids, torch.randn(6, DIM, dtype=torch.float64, generator=random)


@pytest.mark.parametrize(("settings", "kind"), OF_TORCH, ids=lambda x: getattr(x, "name", ""))
def test_a_row_trains_as_a_parameter_of_its_own_under_torch(settings, kind):
    """One torch parameter per row, stepped only when touched."""
    embeddings = collection(table(settings))
    rows = RowOptimizer(embeddings)
    twins = [row.clone().requires_grad_() for row in rows_of(embeddings)]
    known = settings.settings()
    known.pop("initial_accumulator", None)  # 0, as torch's
    optimizers = [kind([twin], **known) for twin in twins]
    for ids, gradient in gradients(9):
        backward(embeddings, ids.tolist(), gradient)
        rows.step()
        for row in ids.unique().tolist():
            twins[row].grad = gradient[ids == row].sum(0)
            optimizers[row].step()
    torch.testing.assert_close(rows_of(embeddings), torch.stack(twins).detach(), rtol=1e-12, atol=1e-14)  # fmt: skip


@pytest.mark.parametrize("optimizer", ALL, ids=name_of)
def test_every_optimizer_trains_and_counts(optimizer):
    """Towards a target, from a common start; float32."""
    embeddings = collection(table(optimizer, dtype="float32"))
    rows = RowOptimizer(embeddings)
    target = torch.linspace(-0.3, 0.3, DIM)

    def loss():
        return (embeddings(batch(list(range(ROWS))))["item"] - target).square().sum()

    first = loss()
    for _ in range(30):
        last = loss()
        last.backward()
        rows.step()
    assert last < 0.35 * first, (float(first), float(last))


def test_groups_carry_name_and_settings_and_schedules_work():
    embeddings = collection(table(Adam(lr=0.5), "a"), table(SGD(lr=2.0), "b"))
    rows = RowOptimizer(embeddings, clip_value=7.0)
    assert [group["name"] for group in rows.param_groups] == ["a", "b"]
    assert rows.param_groups[0]["betas"] == (0.9, 0.999)
    assert rows.param_groups[1]["clip_value"] == 7.0
    schedule = torch.optim.lr_scheduler.LambdaLR(rows, [lambda t: 1.0, lambda t: 0.0 if t else 1.0])
    before = rows_of(embeddings, "b")
    backward(embeddings, [0, 1], torch.ones(2, DIM), "a", "b")
    rows.step()
    schedule.step()
    middle = rows_of(embeddings, "b")
    assert torch.equal(middle[:2], before[:2] - 2.0)
    backward(embeddings, [0, 1], torch.ones(2, DIM), "a", "b")
    rows.step()
    assert torch.equal(rows_of(embeddings, "b"), middle)


def test_clipping_by_value_clips_the_sum_of_a_row():
    embeddings = collection(table(SGD(lr=1.0), initializer=Uniform(scale=0.0)))
    rows = RowOptimizer(embeddings, clip_value=1.0)
    gradient = torch.tensor([[0.7, -3.0, 0.1], [0.7, 1.0, 0.1], [-5.0, 0.2, 9.0]])
    backward(embeddings, [4, 4, 2], gradient)
    rows.step()
    result = -rows_of(embeddings)
    assert torch.allclose(result[4], torch.tensor([1.0, -1.0, 0.2]).double())
    assert torch.allclose(result[2], torch.tensor([-1.0, 0.2, 1.0]).double())


def test_clipping_by_norm_is_torchs_over_all_tables():
    tables = [table(SGD(lr=1.0), name, initializer=Uniform(scale=0.0)) for name in ("a", "b")]
    embeddings = collection(*tables)
    rows = RowOptimizer(embeddings)
    ids, gradient = next(gradients(1))
    twins = [torch.zeros(ROWS, DIM, dtype=torch.float64, requires_grad=True) for _ in tables]
    for twin in twins:
        twin.grad = torch.zeros_like(twin).index_add(0, ids, gradient)
    for max_norm in (0.5, 1e6):
        backward(embeddings, ids.tolist(), gradient, "a", "b")
        before = rows_of(embeddings, "a")
        norm = rows.clip_grad_norm_(max_norm)
        rows.step()
        copies = [twin.detach().clone().requires_grad_() for twin in twins]
        for copy, twin in zip(copies, twins, strict=True):
            copy.grad = twin.grad.clone()
        wanted = torch.nn.utils.clip_grad_norm_(copies, max_norm)
        assert torch.allclose(norm.double(), wanted)
        change = before - rows_of(embeddings, "a")
        assert torch.allclose(change, copies[0].grad, rtol=1e-12)


def clip_on(mesh):
    embeddings = EmbeddingCollection([table(Adam(lr=0.1))], [Feature("item", "item")], seed=5)
    embeddings.open(mesh=mesh)
    rows = RowOptimizer(embeddings)
    norms = []
    for ids, gradient in gradients(4):
        own = slice(mesh.rank * 6 // mesh.num_ranks, (mesh.rank + 1) * 6 // mesh.num_ranks)
        backward(embeddings, ids[own].tolist(), gradient[own])
        norms.append(float(rows.clip_grad_norm_(0.7)))
        rows.step()
    return norms, rows_of(embeddings)


def test_clipping_by_norm_is_the_same_on_any_number_of_ranks():
    from colonnade import Mesh

    alone = clip_on(Mesh())
    for norms, rows in run_ranks(2, clip_on):
        assert norms == pytest.approx(alone[0], rel=1e-12)
        torch.testing.assert_close(rows, alone[1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_where_rows_lie_changes_no_bit(dtype):
    """Rows are updated in the order in which they lie, which is that of their births; neither they nor the norm of all
    gradients may tell."""
    results = []
    for births in (torch.arange(3000), torch.arange(3000).flip(0), torch.randperm(3000)):
        tables = [table(Adam(lr=0.1), name, rows=None, dim=16, dtype=dtype) for name in ("a", "b")]
        embeddings = collection(*tables)
        rows = RowOptimizer(embeddings)
        for ids in births.split(500):  # born, and given up again
            embeddings.pipeline.drop_batch(
                embeddings.pipeline.prepare_batch(batch(ids.tolist(), "a", "b"))
            )
        random = torch.Generator().manual_seed(1)
        norms = []
        for _ in range(3):
            ids = torch.randint(0, 3000, (2000,), generator=random)
            gradient = torch.randn(2000, 16, generator=random)
            backward(embeddings, ids.tolist(), gradient, "a", "b")
            (lookup,) = embeddings.pipeline.gradients.contexts[0].parts
            assert lookup.pinned.by_page is not None
            norms.append(float(rows.clip_grad_norm_(0.7)))
            rows.step()
        results.append((norms, [embeddings.rows(name, torch.arange(3000)) for name in ("a", "b")]))
    for norms, weights in results[1:]:
        assert norms == results[0][0]
        assert all(map(torch.equal, weights, results[0][1]))


def test_clipping_then_backward_is_refused_and_zero_grad_starts_over():
    embeddings = collection()
    rows = RowOptimizer(embeddings)
    output = embeddings(batch([1, 2]))["item"].sum()
    output.backward(retain_graph=True)
    rows.clip_grad_norm_(1.0)
    output.backward()
    before = rows_of(embeddings)
    with pytest.raises(RuntimeError, match="clip between"):
        rows.step()
    assert torch.equal(rows_of(embeddings), before)
    rows.zero_grad()
    rows.step()
    assert torch.equal(rows_of(embeddings), before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_clipping_refuses_what_is_not_finite(bad):
    embeddings = collection()
    rows = RowOptimizer(embeddings)
    before = rows_of(embeddings)
    backward(embeddings, [1, 2], torch.full((2, DIM), bad))
    with pytest.raises(NonFiniteError):
        rows.clip_grad_norm_(1.0)
    rows.step()
    assert torch.equal(rows_of(embeddings), before)


@pytest.mark.parametrize("optimizer", ALL, ids=name_of)
def test_accumulation_is_one_step_on_the_sum(optimizer):
    """Two batches, two backwards of one of them; against the same lookups in one batch."""
    accumulated, at_once = collection(table(optimizer)), collection(table(optimizer))
    rows = [RowOptimizer(accumulated), RowOptimizer(at_once)]
    for ids, gradient in gradients(5):
        ids = ids.tolist()
        first = accumulated(batch(ids[:3]))["item"]
        torch.autograd.backward(first, gradient[:3], retain_graph=True)
        torch.autograd.backward(first, gradient[:3])
        backward(accumulated, ids[3:], gradient[3:])
        backward(at_once, ids, torch.cat([2 * gradient[:3], gradient[3:]]))
        for row in rows:
            row.step()
    torch.testing.assert_close(rows_of(accumulated), rows_of(at_once), rtol=1e-10, atol=1e-12)


def test_parts_are_tables_that_share_their_ids():
    """One table with parts trains what a table per part would; births apart, so all start at zero."""
    zero = Uniform(scale=0.0)
    parts = {"deep": Adam(lr=0.1), "wide": FTRL(lr=0.1, l1=0.05)}
    together = collection(table(parts, dim={"deep": DIM, "wide": 1}, initializer=zero))
    apart = collection(
        table(parts["deep"], "deep", initializer=zero),
        table(parts["wide"], "wide", initializer=zero, dim=1),
    )
    one, two = RowOptimizer(together), RowOptimizer(apart)
    assert [group["name"] for group in one.param_groups] == ["item.deep", "item.wide"]
    for ids, gradient in gradients(6):
        result = together(batch(ids.tolist()))
        assert {name: v.shape[1] for name, v in result.items()} == {
            "item.deep": DIM,
            "item.wide": 1,
        }
        wanted = apart(batch(ids.tolist(), "deep", "wide"))
        assert torch.equal(result["item.deep"], wanted["deep"])
        assert torch.equal(result["item.wide"], wanted["wide"])
        torch.autograd.backward(list(result.values()), [gradient, gradient[:, :1]])
        torch.autograd.backward(list(wanted.values()), [gradient, gradient[:, :1]])
        one.step(), two.step()
    rows = rows_of(together)
    assert rows.abs().sum() > 0
    assert torch.equal(rows[:, :DIM], rows_of(apart, "deep"))
    assert torch.equal(rows[:, DIM:], rows_of(apart, "wide"))


def test_a_part_that_nobody_reads_keeps_its_values():
    tables = [table(SGD(lr=1.0), dim={"deep": DIM, "wide": 1})]
    from colonnade import Concat

    embeddings = EmbeddingCollection(
        tables,
        [Feature("item", "item")],
        consumers={"deep": (Concat(), ["item.deep"]), "again": (Concat(), ["item.deep", "item.wide"])},
    ).open()  # fmt: skip
    rows = RowOptimizer(embeddings)
    before = rows_of(embeddings)
    result = embeddings(batch([1, 1]))
    result["deep"].sum().backward()
    rows.step()
    after = rows_of(embeddings)
    assert torch.equal(after[1, :DIM], before[1, :DIM] - 2)
    assert torch.equal(after[:, DIM], before[:, DIM])


def test_max_norm_is_that_of_nn_embedding():
    embeddings = collection(table(SGD(lr=1.0), max_norm=0.25))
    rows = RowOptimizer(embeddings)
    before = rows_of(embeddings)
    gradient = torch.randn(2, DIM, dtype=torch.float64)
    backward(embeddings, [1, 2], gradient)
    rows.step()
    wanted = (before[1:3] - gradient).clone()
    torch.embedding_renorm_(wanted, torch.tensor([0, 1]), 0.25, 2.0)
    torch.testing.assert_close(rows_of(embeddings)[1:3], wanted, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_updated_weights_are_bounded(dtype):
    """Weights of rows that were not updated stay as they are."""
    embeddings = collection(table(SGD(lr=1.0), dtype=dtype, weight_bound=0.25))
    rows = RowOptimizer(embeddings)
    before = rows_of(embeddings)
    backward(
        embeddings, [1, 2], torch.full((2, DIM), 3.0, dtype=embeddings.declaration.compute_dtype)
    )
    rows.step()
    after = rows_of(embeddings)
    assert (after[1:3] == -0.25).all()
    assert torch.equal(after[3:], before[3:]) and torch.equal(after[0], before[0])
    rows.param_groups[0]["weight_bound"] = 0.0
    with pytest.raises(ConfigError, match=r"weight_bound.*no row changed"):
        rows.step()


def test_a_master_makes_bfloat16_train_as_float32():
    """Gradients that do not depend on the weights: the float32 weights must be the masters, to the bit."""
    exact = collection(table(Adagrad(lr=0.1), dtype="float32"))
    split = collection(table(Adagrad(lr=0.1), dtype="bfloat16", master=True))
    pair = [RowOptimizer(exact), RowOptimizer(split)]
    for ids, gradient in gradients(20):
        for embeddings, rows in zip((exact, split), pair, strict=True):
            backward(embeddings, ids.tolist(), gradient.float())
            rows.step()
    bits = rows_of(exact).view(torch.int32)
    nearest = ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
    assert torch.equal(rows_of(split), nearest)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_small_updates_survive_in_16_bits_on_average(dtype):
    """An update far below half a unit in the last place would be lost by rounding to nearest."""
    many = 4000
    embeddings = collection(
        table(SGD(lr=1.0), rows=many, dtype=dtype, initializer=Uniform(scale=0.0))
    )
    rows = RowOptimizer(embeddings)
    ids = list(range(many))
    backward(embeddings, ids, torch.full((many, DIM), -1.0))
    rows.step()
    for _ in range(20):
        backward(embeddings, ids, torch.full((many, DIM), -1e-4))
        rows.step()
    mean = float(embeddings.rows("item", torch.arange(many)).double().mean())
    assert mean == pytest.approx(1.002, abs=2e-4)


@pytest.mark.parametrize("output", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rows_and_outputs_of_16_bits(dtype, output):
    retained = table(SGD(lr=1.0), dtype=dtype)
    embeddings = EmbeddingCollection(
        [retained], [Feature("item", "item")], output_dtype=output
    ).open()
    rows = RowOptimizer(embeddings)
    result = embeddings(batch([1, 2]))["item"]
    assert result.dtype == output
    weights = rows_of(embeddings)
    assert weights.dtype == getattr(torch, dtype)
    assert torch.equal(result, weights[1:3].to(output))
    result.backward(torch.ones_like(result))
    rows.step()
    torch.testing.assert_close(
        rows_of(embeddings)[1:3].float(), weights[1:3].float() - 1, rtol=0, atol=0.01
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda rows: rows.param_groups[0].update(lr=-1.0), "below 0"),
        (lambda rows: rows.param_groups[0].update(lr=float("nan")), "NaN"),
    ],
)
def test_settings_that_no_rule_can_use(change, words):
    embeddings = collection()
    rows = RowOptimizer(embeddings)
    before = rows_of(embeddings)
    backward(embeddings, [1], torch.ones(1, DIM))
    change(rows)
    with pytest.raises(ConfigError, match=words):
        rows.step()
    assert torch.equal(rows_of(embeddings), before)


@pytest.mark.parametrize("value", [None, "0.1", [0.1]])
def test_a_rate_that_is_no_number_is_refused_and_nothing_changes(value):
    embeddings = collection(table(Adagrad(lr=0.5)))
    rows = RowOptimizer(embeddings)
    backward(embeddings, [1, 2], torch.ones(2, DIM))
    before = rows_of(embeddings).clone()
    rows.param_groups[0]["lr"] = value
    with pytest.raises(ConfigError, match=r"param group 'item': got lr=.*wanted a number"):
        rows.step()
    assert torch.equal(rows_of(embeddings), before)
    rows.param_groups[0]["lr"] = 0.5
    rows.step()
    assert not torch.equal(rows_of(embeddings), before)


def test_ftrl_refuses_a_rate_of_zero():
    embeddings = collection(table(FTRL(lr=0.1)))
    rows = RowOptimizer(embeddings)
    backward(embeddings, [1], torch.ones(1, DIM))
    rows.param_groups[0]["lr"] = 0.0
    with pytest.raises(ConfigError, match="FTRL"):
        rows.step()


def test_open_tables_train_as_vocabulary_tables_do():
    """Rows of open tables are updated in the order of their pages: the same bits, whatever the order."""
    parts = {"deep": Adam(lr=0.1), "wide": RowWiseAdagrad(lr=0.1)}
    many, random = 3000, torch.Generator().manual_seed(3)
    pair = [
        EmbeddingCollection(
            [Table("item", {"deep": 16, "wide": 1}, rows=rows, optimizer=parts)],
            [Feature("item", "item")],
            seed=5,
        ).open()
        for rows in (many, None)
    ]
    optimizers = [RowOptimizer(embeddings) for embeddings in pair]
    for _ in range(4):
        ids = torch.randint(0, many, (2500,), generator=random)
        gradient = torch.randn(2500, 17, generator=random)
        for embeddings, rows in zip(pair, optimizers, strict=True):
            result = embeddings(batch(ids.tolist()))
            torch.autograd.backward(
                [result["item.deep"], result["item.wide"]], [gradient[:, :16], gradient[:, 16:]]
            )
            rows.step()
    ids = torch.arange(many)
    assert torch.equal(pair[0].rows("item", ids), pair[1].rows("item", ids))


@pytest.mark.parametrize(
    "schedule",
    [
        lambda rows: torch.optim.lr_scheduler.OneCycleLR(rows, max_lr=0.1, total_steps=5),
        lambda rows: torch.optim.lr_scheduler.CosineAnnealingLR(rows, T_max=5),
        lambda rows: torch.optim.lr_scheduler.ReduceLROnPlateau(rows),
    ],
)
@pytest.mark.parametrize("optimizer", [Adam(lr=0.1), SGD(lr=0.1, momentum=0.9)], ids=name_of)
def test_schedulers_of_torch_take_row_optimizers(schedule, optimizer):
    embeddings = collection(table(optimizer))
    rows = RowOptimizer(embeddings)
    scheduler = schedule(rows)
    for _ in range(4):
        backward(embeddings, [1, 2], torch.ones(2, DIM))
        rows.step()
        scheduler.step(*([1.0] if "Plateau" in type(scheduler).__name__ else []))


def test_clipping_twice_is_clipping_to_the_smaller():
    embeddings = collection(table(SGD(lr=1.0), initializer=Uniform(scale=0.0)))
    rows = RowOptimizer(embeddings)
    backward(embeddings, [1], torch.full((1, DIM), 100.0))
    rows.clip_grad_norm_(1.0)
    assert float(rows.clip_grad_norm_(5.0)) == pytest.approx(1.0, rel=1e-6)
    rows.step()
    assert float(rows_of(embeddings)[1].norm()) == pytest.approx(1.0, rel=1e-6)


def test_clipping_refuses_sums_that_overflow():
    embeddings = collection(table(SGD(lr=1.0), dtype="float32"))
    rows = RowOptimizer(embeddings)
    before = rows_of(embeddings)
    backward(embeddings, [1, 1, 1], torch.full((3, DIM), 3e38))
    with pytest.raises(NonFiniteError, match="norm of the summed"):
        rows.clip_grad_norm_(1.0)
    rows.step()
    assert torch.equal(rows_of(embeddings), before)


def test_a_gradient_that_its_owner_changes_is_refused():
    embeddings = collection()
    rows = RowOptimizer(embeddings)
    before, gradient = rows_of(embeddings), torch.ones(1, DIM, dtype=torch.float64)
    embeddings(batch([1]))["item"].backward(gradient)
    gradient.zero_()
    with pytest.raises(RuntimeError, match="changed in place"):
        rows.step()
    assert torch.equal(rows_of(embeddings), before)


def test_state_dicts_are_of_the_same_tables():
    ours, expected = collection(table(Adam(lr=0.1))), collection(table(SGD(lr=0.3)))
    rows, other = RowOptimizer(ours), RowOptimizer(expected)
    with pytest.raises(ConfigError, match="groups that differ"):
        rows.load_state_dict(other.state_dict())
    saved = RowOptimizer(ours).state_dict()
    saved["param_groups"][0]["lr"] = 0.7
    del saved["param_groups"][0]["weight_bound"]  # as before groups had one
    rows.load_state_dict(saved)
    assert rows.param_groups[0]["lr"] == 0.7 and rows.param_groups[0]["weight_bound"] is None
    with pytest.raises(ConfigError, match="the collection's tables"):
        rows.add_param_group({"params": [torch.zeros(1)]})


def test_momentum_that_rows_do_not_keep():
    embeddings = collection()
    rows = RowOptimizer(embeddings)
    rows.param_groups[0]["momentum"] = 0.9
    backward(embeddings, [1], torch.ones(1, DIM))
    with pytest.raises(ConfigError, match="declare the table"):
        rows.step()
    rows.param_groups[0]["momentum"] = 0.0
    rows.step()  # nothing of the refused step is in the way


def bad_setting_on_rank_0(mesh):
    embeddings = EmbeddingCollection([table(SGD(lr=0.1))], [Feature("item", "item")]).open(
        mesh=mesh
    )
    rows = RowOptimizer(embeddings)
    backward(embeddings, [1], torch.ones(1, DIM))
    if mesh.rank == 0:
        rows.param_groups[0]["lr"] = -1.0
    with pytest.raises(ConfigError):
        rows.step()
    rows.param_groups[0]["lr"] = 0.1
    rows.step()
    return rows_of(embeddings)


def test_a_bad_setting_on_one_rank_is_heard_by_all():
    one, two = run_ranks(2, bad_setting_on_rank_0)
    assert torch.equal(one, two)


def steps_of(mesh, scaler=None):
    """Rows and a dense layer. With a scaler, a gradient of rank 0's rows is inf in step 2, and one of the last rank's
    dense weights NaN in step 4; without, these steps are left out."""
    embeddings = EmbeddingCollection([table(Adam(lr=0.1))], [Feature("item", "item")]).open(
        mesh=mesh
    )
    rows, dense = RowOptimizer(embeddings), torch.nn.Linear(DIM, 1, dtype=torch.float64)
    for weight in dense.parameters():
        torch.nn.init.constant_(weight, 0.5)
    optimizer, results = torch.optim.SGD(dense.parameters(), lr=0.1), []
    for step in range(7):
        if scaler is None and step in (2, 4):
            continue
        value = embeddings(batch([step % 3, 1]))["item"]
        if step == 2 and mesh.rank == 0:
            value.register_hook(lambda gradient: gradient * math.inf)
        loss = (dense(value) - 1).square().sum() / mesh.num_ranks
        optimizer.zero_grad()
        (loss if scaler is None else scaler.scale(loss)).backward()
        if step == 4 and mesh.rank == mesh.num_ranks - 1:
            dense.bias.grad.fill_(math.nan)
        for weight in dense.parameters():
            weight.grad = mesh.all_reduce("control", weight.grad)
        if scaler is None:
            rows.step()
            optimizer.step()
        else:
            results.append((rows.scaled_step(scaler, optimizer), math.log2(scaler.get_scale())))
    return results, rows_of(embeddings), dense.weight.detach()


def scaled_steps(mesh):
    return steps_of(mesh, torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3))


def test_a_scaled_loss_trains_the_same_and_skips_whole_steps():
    """Scale is a power of two: the same bits as without it, but for the steps that are skipped, on every rank alike."""
    _, values, weight = steps_of(Mesh())
    one, *others = [scaled_steps(Mesh()), *run_ranks(2, scaled_steps)]
    assert torch.equal(one[1], values) and torch.equal(one[2], weight)
    stepped = [True, True, False, True, False, True, True]
    for result, values, weight in (one, *others):
        scales = [12, 12, 11, 12, 11, 11, 11]  # lowered, and grown after 3 steps
        assert result == list(zip(stepped, scales, strict=True))
        if result is not one[0]:
            assert torch.equal(values, others[0][1]) and torch.equal(weight, others[0][2])
    off = steps_of(Mesh(), torch.amp.GradScaler("cpu", enabled=False))
    assert [item for item, _ in off[0]] == stepped and torch.equal(off[1], one[1])


def test_tensors_in_a_tuple_are_read_again():
    tables = [Table("a", 2, optimizer=Adam(lr=0.5), initializer=Uniform(scale=0.0))]
    embeddings = EmbeddingCollection(tables, [Feature("a", "a")]).open()
    rows, beta = RowOptimizer(embeddings), torch.tensor(0.5)
    rows.param_groups[0]["betas"] = (beta, 0.9)
    before = rows._read_checked_settings().clone()
    beta.fill_(0.25)
    assert not torch.equal(rows._read_checked_settings(), before)


def test_settings_are_read_again_when_they_change():
    """Once read they are kept, whatever says that they are others: a schedule, a group, a tensor changed in place."""
    embeddings = EmbeddingCollection(
        [Table("a", 2, optimizer=SGD(lr=1.0), initializer=Uniform(scale=0.0))], [Feature("a", "a")]
    )
    rows, wanted = RowOptimizer(embeddings), 0.0
    rate = torch.tensor(0.5)

    def step() -> float:
        batch = Batch(1, dense=torch.zeros(1, 0), ids={"a": Ids(torch.tensor([7]))})
        embeddings(batch)["a"].sum().backward()
        rows.step()
        return float(embeddings.rows("a", torch.tensor([7]))[0, 0])

    for lr in (1.0, 1.0, 0.25, rate, rate):
        rows.param_groups[0]["lr"] = lr
        wanted -= float(lr)
        assert step() == wanted
        rate.mul_(0.5)
    rows.param_groups[0]["lr"] = -1.0
    with pytest.raises(ConfigError, match="below 0"):
        step()
    rows.param_groups[0]["lr"] = 1.0
    rows.zero_grad()
    embeddings.discard_batches()
    rows.scale_grad_(0.5)
    assert step() == wanted - 0.5 and step() == wanted - 1.5


def test_a_loop_without_a_step_is_told_so_once():
    embeddings = collection()
    with pytest.warns(
        UserWarning, match=r"got 100 batches and no step of a RowOptimizer"
    ) as warned:
        for _ in range(300):
            backward(embeddings, [1, 2], torch.ones(2, DIM))
    assert len(warned) == 1
    rows = RowOptimizer(embeddings)
    rows.step()
    for _ in range(300):  # it accumulates
        backward(embeddings, [1, 2], torch.ones(2, DIM))
    rows.step()
    assert embeddings.step == 2


def test_a_scaler_that_steps_rows_alone_is_refused_by_name():
    embeddings = collection()
    rows = RowOptimizer(embeddings)
    before = embeddings.rows("item", torch.arange(ROWS))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(embeddings(batch([1, 2]))["item"].sum()).backward()
    with pytest.raises(
        ConfigError, match=r"got GradScaler.step.*wanted rows.scaled_step\(scaler, "
    ):
        scaler.step(rows)
    assert torch.equal(embeddings.rows("item", torch.arange(ROWS)), before)
    assert rows.scaled_step(scaler) and scaler.get_scale() == 2.0
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    disabled.scale(embeddings(batch([1, 2]))["item"].sum()).backward()
    disabled.step(rows)
    assert torch.equal(
        embeddings.rows("item", torch.tensor([1, 3])), before[[1, 3]] - torch.tensor([[2.0], [0.0]])
    )
