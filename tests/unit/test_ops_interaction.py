"""Fused interactions: against their plain twins, on every path, for any number of threads."""

from __future__ import annotations

import pytest
import torch
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from native_batches import everywhere, running_on, same_bits

from colonnade import _native
from colonnade.ops import interaction

DTYPES = {torch.float32: 2e-6, torch.float64: 1e-12}
DIMS = (1, 2, 3, 4, 7, 8, 15, 16, 17, 24, 31, 32, 33, 48, 64, 100)
COUNTS = (1, 2, 3, 4, 5, 8, 9, 10, 16, 17, 18, 25, 27, 33, 34, 42)


@st.composite
def vector_lists(draw):
    """Yield (vectors with their strides, dim, copied): 2-D or 3-D tensors, with gaps, of a transposed batch, or side by
    side."""
    batch_size = draw(st.sampled_from((0, 1, 2, 3, 5, 17)))
    dim, num_vectors = draw(st.sampled_from(DIMS)), draw(st.sampled_from(COUNTS))
    dtype = draw(st.sampled_from(list(DTYPES)))
    random = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    # Small integers: every sum is exact, so every order of summing gives the same bits.
    is_exact = draw(st.booleans())
    vectors = []
    while num_vectors:
        k = draw(st.integers(1, num_vectors))
        num_vectors -= k
        gap, skip = draw(st.integers(0, 5)), draw(st.integers(0, 3))
        lie = draw(st.sampled_from(("rows", "fields", "batch last", "elements apart")))
        shape = {
            "rows": (batch_size, k * dim + gap),
            "fields": (batch_size, k, dim + gap),
            "batch last": (k, batch_size, dim + gap),
            "elements apart": (batch_size, dim, k),
        }[lie]
        n = torch.Size(shape).numel()
        if is_exact:
            storage = torch.randint(-9, 10, (n + skip,), generator=random).to(dtype)
        else:
            storage = torch.randn(n + skip, generator=random, dtype=dtype)
        whole = storage[skip:].view(shape)
        vectors.append(
            {
                "rows": lambda x, k=k: x[:, : k * dim],
                "fields": lambda x: x[..., :dim],
                "batch last": lambda x: x[..., :dim].transpose(0, 1),
                "elements apart": lambda x: x.transpose(1, 2),
            }[lie](whole)
        )
    total = sum(v.numel() for v in vectors) // max(1, batch_size * dim) if batch_size else 1
    retained = draw(st.lists(st.integers(0, total - 1), unique=True, max_size=4)) if total else []
    return vectors, dim, retained, is_exact


def as_3d(vectors, dim):
    return [v if v.dim() == 3 else v.reshape(len(v), v.shape[1] // dim, dim) for v in vectors]


def results(operator, vectors, gradient_seed=0):
    """The value, and what every second vector tensor from the first receives."""
    leaves = [v.detach().requires_grad_(i % 2 == 0) for i, v in enumerate(vectors)]
    value = operator(leaves)
    random = torch.Generator().manual_seed(gradient_seed)
    gradient = torch.randint(-5, 6, value.shape, generator=random).to(value.dtype)
    return [value.detach(), *torch.autograd.grad(value, leaves[::2], gradient)]


def check(fused, plain, vectors, is_exact):
    wanted = results(plain, vectors)
    first = None
    for isa, num_threads in everywhere():
        with running_on(isa, num_threads):
            result = results(fused, vectors)
        first = first or result
        for f, e, w in zip(result, first, wanted, strict=True):
            assert f.shape == w.shape and same_bits(f, e), (isa, num_threads)
    for f, w in zip(first, wanted, strict=True):
        if is_exact:
            assert torch.equal(f, w)
        else:
            scale = max(1.0, float(w.abs().max())) if w.numel() else 1.0
            assert (f - w).abs().max().item() <= DTYPES[f.dtype] * scale if w.numel() else True


@settings(max_examples=examples(20, 80), deadline=None)
@given(vector_lists())
def test_pairwise_dot_equals_twin(case):
    vectors, dim, retained, is_exact = case
    check(
        lambda x: interaction.pairwise_dot(x, dim=dim, included=retained),
        lambda x: interaction.plain_pairwise_dot(as_3d(x, dim), retained),
        vectors,
        is_exact,
    )


@settings(max_examples=examples(20, 80), deadline=None)
@given(vector_lists())
def test_fm_equals_twin(case):
    vectors, dim, _, is_exact = case
    check(
        lambda x: interaction.fm(x, dim=dim),
        lambda x: interaction.plain_fm(as_3d(x, dim)),
        vectors,
        is_exact,
    )


@settings(max_examples=examples(20, 80), deadline=None)
@given(vector_lists(), st.integers(0, 2**16))
def test_fm_of_squares_equals_twin(case, seed):
    vectors, dim, _, is_exact = case
    count = sum(v.shape[1] for v in as_3d(vectors, dim)) if len(vectors[0]) else 0
    random = torch.Generator().manual_seed(seed)
    terms = torch.randint(0, 3, (count,), generator=random).tolist()
    if count:
        check(
            lambda x: interaction.fm(x, dim=dim, terms=terms),
            lambda x: interaction.plain_fm(as_3d(x, dim), terms),
            vectors,
            is_exact,
        )


def test_fm_over_ids_has_the_bits_of_fields():
    """The value has the same bits as over fields where the inputs are those of one id a field."""
    fields = torch.randn(300, 26, 16)
    inputs = torch.stack([fields, fields.square()], dim=2).flatten(1, 2)
    terms = [interaction.VECTOR, interaction.SQUARES] * 26
    result = interaction.fm([inputs], dim=16, terms=terms)
    assert same_bits(result, interaction.fm([fields], dim=16))


def test_wrong_terms_are_refused():
    vectors = [torch.randn(3, 2, 4)]
    for terms in ([0], [0, 3]):
        with pytest.raises(ValueError, match="terms: got"):
            _native.fm(vectors, torch.empty(3, 1), terms)


@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (5, 7), (3, 16), (4096, 600)])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_cross_equals_twin(shape, dtype):
    """The product and the sum round once each: the same bits as torch. The largest is written around the cache."""
    inputs = [torch.randn(shape, dtype=dtype) for _ in range(3)]
    wanted = results(lambda x: interaction.plain_cross(*x), inputs)
    for isa, num_threads in everywhere():
        with running_on(isa, num_threads):
            result = results(lambda x: interaction.cross(*x), inputs)
        for f, w in zip(result, wanted, strict=True):
            assert same_bits(f, w), (isa, num_threads)


@pytest.mark.parametrize(("dim", "num_vectors"), [(1024, 5), (64, 27), (16, 130)])
def test_large(dim, num_vectors):
    """Long vectors, many vectors, and gradients of more than 8 MiB, which are written around the cache."""
    batch_size = (1 << 21) // (dim * num_vectors) + 64
    fields = torch.randint(-3, 4, (batch_size, num_vectors, dim)).float()
    for fused, plain in (
        (lambda x: interaction.pairwise_dot(x, dim=dim), interaction.plain_pairwise_dot),
        (lambda x: interaction.fm(x, dim=dim), interaction.plain_fm),
    ):
        for result, wanted in zip(results(fused, [fields]), results(plain, [fields]), strict=True):
            assert torch.equal(result, wanted)


def double(*shape):
    random = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=random, dtype=torch.float64, requires_grad=True)


def test_gradcheck():
    dense, fields = double(3, 5), double(3, 4 * 5)
    assert torch.autograd.gradcheck(
        lambda d, f: interaction.pairwise_dot([d, f], dim=5, included=[2, 0]), (dense, fields)
    )
    assert torch.autograd.gradcheck(lambda d, f: interaction.fm([d, f], dim=5), (dense, fields))
    inputs = (double(3, 4), double(3, 4), double(3, 4))
    assert torch.autograd.gradcheck(interaction.cross, inputs)


@pytest.mark.parametrize("name", ["pairwise_dot", "fm", "cross"])
def test_second_derivatives_are_refused(name):
    x = double(2, 6)
    value = {
        "pairwise_dot": lambda: interaction.pairwise_dot([x], dim=2),
        "fm": lambda: interaction.fm([x], dim=2),
        "cross": lambda: interaction.cross(x, x, x),
    }[name]()
    (first,) = torch.autograd.grad(value.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        first.sum().backward()


def test_bfloat16_and_mixed_dtypes():
    dense, fields = torch.randn(3, 4).bfloat16(), torch.randn(3, 8)
    mixed = interaction.pairwise_dot([dense, fields], dim=4, included=[0])
    assert same_bits(mixed, interaction.pairwise_dot([dense.float(), fields], dim=4, included=[0]))
    fields = fields.bfloat16().requires_grad_()
    for operator in (interaction.pairwise_dot, interaction.fm):
        value = operator([dense, fields], dim=4)
        assert value.dtype == torch.bfloat16
        value.float().sum().backward()
        assert fields.grad.dtype == torch.bfloat16


def test_autocast():
    linear, fields = torch.nn.Linear(3, 4), torch.randn(5, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        dense = linear(torch.randn(5, 3))
        value = interaction.pairwise_dot([dense, fields], dim=4, included=[0])
    value.sum().backward()
    assert value.dtype == torch.float32
    assert linear.weight.grad.isfinite().all() and fields.grad.isfinite().all()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_whole(backend):
    def step(dense, fields, x):
        dots = interaction.pairwise_dot([dense, fields], dim=4, included=[0])
        return dots.sum() + interaction.fm([fields], dim=4).sum() + interaction.cross(x, x, x).sum()

    inputs = [torch.randn(5, n, requires_grad=True) for n in (4, 8, 3)]
    compiled = torch.compile(step, backend=backend, fullgraph=True)
    result = torch.autograd.grad(compiled(*inputs), inputs)
    for f, w in zip(result, torch.autograd.grad(step(*inputs), inputs), strict=True):
        torch.testing.assert_close(f, w)


def test_refusals():
    x = torch.randn(3, 8)
    with pytest.raises(ValueError, match="at least one tensor"):
        interaction.pairwise_dot([], dim=4)
    with pytest.raises(ValueError, match=r"vectors\[1\]: got \(3, 6\), wanted \(3, k \* 4\)"):
        interaction.fm([x, x[:, :6]], dim=4)
    with pytest.raises(ValueError, match=r"vectors\[1\]: got \(2, 8\)"):
        interaction.fm([x, x[:2]], dim=4)
    for retained in ([2], [-1], [0, 0]):
        with pytest.raises(
            ValueError, match=r"included: got .* wanted different numbers in 0 .. 1"
        ):
            interaction.pairwise_dot([x], dim=4, included=retained)
    with pytest.raises(ValueError, match="wanted one shape"):
        interaction.cross(x, x, x[:2])


def test_the_core_refuses():
    """Core refuses arguments that the wrapper never sends, and changes nothing."""
    x, out = torch.randn(3, 2, 4), torch.full((3, 1), 7.0)
    with pytest.raises(ValueError, match=r"vectors\[1\]: got float64"):
        _native.pairwise_dot([x, x.double()], [], out)
    with pytest.raises(ValueError, match=r"vectors\[0\]: .* last stride is 1"):
        _native.fm([x.transpose(1, 2)], out)
    with pytest.raises(ValueError, match="out: got float32"):
        _native.pairwise_dot([x], [0], out)
    with pytest.raises(ValueError, match="copied: got vector 5"):
        _native.pairwise_dot([x], [5], torch.empty(3, 5))
    with pytest.raises(ValueError, match=r"out\[0\]"):
        _native.fm_gradient([x], out, [torch.empty(3, 1, 4)])
    assert (out == 7).all()
