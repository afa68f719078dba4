"""Fused first operators over vectors at any address (dots of all pairs (DLRM), factorization machine, cross layer), and
their definition in plain PyTorch.

Legend: B samples, V vectors, D dim.

float32 and float64 on the CPU run in the native core, with the same bits for any number of threads and any instruction
set. Everything else runs as plain PyTorch (`plain_pairwise_dot`, `plain_fm`, `plain_cross`), equal up to the order of
sums and differentiable any number of times. Mixed dtypes are promoted. The native forms are differentiable once: a
second derivative raises RuntimeError and names the plain form. They are custom operators of torch, so `torch.compile`
accepts them whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from colonnade import _native
from colonnade.ops.memory import empty

BOTH, VECTOR, SQUARES = range(3)
"""Terms of `fm`: a vector that is added, and its square; one that is added alone; sums of squares of single ids."""


def plain_pairwise_dot(vectors: Sequence[Tensor], included: Sequence[int] = ()) -> Tensor:
    """Compute `pairwise_dot` of vectors (B, k, D) each -> (B, len(included) * D + V (V - 1) / 2)."""
    stacked = torch.cat(list(vectors), dim=1)  # (B, V, D)
    num_vectors = stacked.shape[1]
    rows, columns = torch.tril_indices(num_vectors, num_vectors, -1, device=stacked.device)
    dots = torch.bmm(stacked, stacked.transpose(1, 2)).flatten(1)
    selected = dots.index_select(1, rows * num_vectors + columns)
    return torch.cat([*(stacked[:, v] for v in included), selected.to(stacked.dtype)], dim=1)


def plain_fm(vectors: Sequence[Tensor], terms: Sequence[int] = ()) -> Tensor:
    """Compute `fm` of vectors (B, k, D) each -> (B, 1): half of |sum of vectors|^2 - sum of |vector|^2."""
    stacked = torch.cat(list(vectors), dim=1)
    sums, squares = (
        sum_terms(stacked, terms) if terms else (stacked.sum(1), stacked.square().sum(1))
    )
    return (sums.square() - squares).sum(1, keepdim=True) / 2


def sum_terms(vectors: Tensor, terms: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the sums (B, D) that vectors (B, V, D) have in `fm`: those of vectors, and of squares."""
    # Views, not columns by an index: copies of those took twice as long, with their gradients (measured).
    pairs = list(zip(vectors.unbind(1), terms, strict=True))
    zero = vectors.new_zeros(vectors.shape[0], vectors.shape[2])
    squares = [v.square() if term == BOTH else v for v, term in pairs if term != VECTOR]
    return sum((v for v, term in pairs if term != SQUARES), zero), sum(squares, zero)


def plain_cross(first: Tensor, factor: Tensor, input: Tensor) -> Tensor:
    """Compute first * factor + input."""
    return first * factor + input


def pairwise_dot(vectors: Sequence[Tensor], *, dim: int, included: Sequence[int] = ()) -> Tensor:
    """Return the dot product of every pair of vectors, after the `included` vectors themselves (Naumov et al. 2019).

    vectors: tensors (B, k, D) or (B, k * D) with D = `dim`; together V vectors, numbered in order.
    included: numbers of vectors to include, each at most once. Returns (B, len(included) * D + V (V - 1) / 2): the
    included vectors, then <v_i, v_j> for i = 1 .. V - 1 and in it j = 0 .. i - 1. No (B, V, V) matrix is made.
    ValueError for shapes that disagree.
    """
    views = _view_vectors(vectors, dim)
    is_native = _is_native(views)
    if is_native and _can_skip_dispatch():
        return _native_pairwise_dot(views, included)  # the core checks `included`, too
    indices = [int(v) for v in included]
    num_vectors = sum(view.shape[1] for view in views)
    if len(set(indices)) < len(indices) or not all(0 <= v < num_vectors for v in indices):
        raise ValueError(
            f"included: got {indices}, wanted different numbers in 0 .. {num_vectors - 1}"
        )
    if not is_native:
        return plain_pairwise_dot(views, indices)
    return torch.ops.colonnade.pairwise_dot(views, indices)


def fm(vectors: Sequence[Tensor], *, dim: int, terms: Sequence[int] = ()) -> Tensor:
    """Return the factorization machine's second-order term (Rendle 2010): the sum of <v_i, v_j> over pairs, (B, 1).

    vectors: as in `pairwise_dot`. Computed as half of |sum of vectors|^2 - sum of |vector|^2, element by element.
    terms: `BOTH`, `VECTOR` or `SQUARES` for each vector; (): all are `BOTH`.
    """
    views = _view_vectors(vectors, dim)
    if not _is_native(views):
        return plain_fm(views, terms)
    return (
        _native_fm(views, terms)
        if _can_skip_dispatch()
        else torch.ops.colonnade.fm(views, list(terms))
    )


def cross(first: Tensor, factor: Tensor, input: Tensor) -> Tensor:
    """Compute DCN-v2's cross layer without its product (Wang et al. 2021): first * factor + input, elementwise.

    With first = x_0, input = x_l and factor = W x_l + b it is x_{l+1}. All (B, D); ValueError if shapes differ.
    """
    if not first.shape == factor.shape == input.shape or first.dim() != 2:
        shapes = [tuple(t.shape) for t in (first, factor, input)]
        raise ValueError(f"cross: got shapes {shapes}, wanted one shape (B, D) for all three")
    first, factor, input = _promote([first, factor, input])
    if not _is_native([first, factor, input]):
        return plain_cross(first, factor, input)
    return (
        _native_cross(first, factor, input)
        if _can_skip_dispatch()
        else torch.ops.colonnade.cross(first, factor, input)
    )


def _can_skip_dispatch() -> bool:
    """Return whether nothing records or traces.

    Then torch's operator dispatch is skipped, which imports the compiler at its first call (1.5 s).
    """
    return not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()


def _promote(tensors: Sequence[Tensor]) -> list[Tensor]:
    dtype = tensors[0].dtype
    if all(tensor.dtype == dtype for tensor in tensors):
        return list(tensors)
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return [tensor.to(dtype) for tensor in tensors]


def _view_vectors(vectors: Sequence[Tensor], dim: int) -> list[Tensor]:
    """View each tensor as (B, k, D). Raises ValueError for other shapes."""
    if not vectors:
        raise ValueError(
            "vectors: got none, wanted at least one tensor (B, k * dim) or (B, k, dim)"
        )
    views = []
    for i, tensor in enumerate(_promote(vectors)):
        view = tensor
        if tensor.dim() == 2 and dim > 0 and tensor.shape[1] % dim == 0:
            view = tensor.view(tensor.shape[0], tensor.shape[1] // dim, dim)
        if view.dim() != 3 or view.shape[2] != dim or view.shape[0] != vectors[0].shape[0]:
            raise ValueError(
                f"vectors[{i}]: got {tuple(tensor.shape)}, wanted ({vectors[0].shape[0]}, k * {dim})"
                f" or ({vectors[0].shape[0]}, k, {dim})"
            )
        views.append(view)
    return views


def _is_native(tensors: Sequence[Tensor]) -> bool:
    return all(
        t.device.type == "cpu" and t.dtype in (torch.float32, torch.float64) for t in tensors
    )


def _prepare_vectors(vectors: Sequence[Tensor]) -> list[Tensor]:
    """Prepare vectors for the core: detached, elements of a vector contiguous."""
    if torch.is_inference_mode_enabled() and all(v.stride(2) == 1 for v in vectors):
        return list(vectors)  # nothing records them
    return [
        v.detach() if v.stride(2) == 1 or v.shape[2] == 1 else v.detach().contiguous()
        for v in vectors
    ]


def _allocate_gradients(vectors: Sequence[Tensor], wanted: Sequence[bool]) -> list[Tensor | None]:
    return [
        empty(*v.shape, dtype=v.dtype) if is_wanted else None
        for v, is_wanted in zip(vectors, wanted, strict=True)
    ]


def _dots_width(vectors: Sequence[Tensor], num_included: int) -> int:
    num_vectors = sum(v.shape[1] for v in vectors)
    return num_included * vectors[0].shape[2] + num_vectors * (num_vectors - 1) // 2


def _native_pairwise_dot(vectors: Sequence[Tensor], included: Sequence[int]) -> Tensor:
    out = empty(len(vectors[0]), _dots_width(vectors, len(included)), dtype=vectors[0].dtype)
    _native.pairwise_dot(_prepare_vectors(vectors), list(included), out)
    return out


_pairwise_dot = torch.library.custom_op(
    "colonnade::pairwise_dot", mutates_args=(), device_types="cpu"
)(_native_pairwise_dot)


@_pairwise_dot.register_fake
def _(vectors, included):
    return vectors[0].new_empty(vectors[0].shape[0], _dots_width(vectors, len(included)))


@torch.library.custom_op("colonnade::pairwise_dot_gradient", mutates_args=(), device_types="cpu")
def _pairwise_dot_gradient(
    vectors: Sequence[Tensor], included: Sequence[int], gradient: Tensor, wanted: Sequence[bool]
) -> list[Tensor]:
    """Compute the gradients of the vectors that are wanted."""
    out = _allocate_gradients(vectors, wanted)
    gradient = gradient.detach().contiguous()
    _native.pairwise_dot_gradient(_prepare_vectors(vectors), list(included), gradient, out)
    return [o for o in out if o is not None]


def _native_fm(vectors: Sequence[Tensor], terms: Sequence[int]) -> Tensor:
    out = empty(len(vectors[0]), 1, dtype=vectors[0].dtype)
    _native.fm(_prepare_vectors(vectors), out, list(terms))
    return out


_fm = torch.library.custom_op("colonnade::fm", mutates_args=(), device_types="cpu")(_native_fm)


@_fm.register_fake
def _(vectors, terms):
    return vectors[0].new_empty(vectors[0].shape[0], 1)


@torch.library.custom_op("colonnade::fm_gradient", mutates_args=(), device_types="cpu")
def _fm_gradient(
    vectors: Sequence[Tensor], terms: Sequence[int], gradient: Tensor, wanted: Sequence[bool]
) -> list[Tensor]:
    """Compute the gradients of the vectors that are wanted."""
    out = _allocate_gradients(vectors, wanted)
    gradient = gradient.detach().contiguous()
    _native.fm_gradient(_prepare_vectors(vectors), gradient, out, list(terms))
    return [o for o in out if o is not None]


def _native_cross(first: Tensor, factor: Tensor, input: Tensor) -> Tensor:
    x, u, y = (t.detach().contiguous() for t in (first, factor, input))
    out = empty(*first.shape, dtype=first.dtype)
    _native.cross(x, u, y, out)
    return out


_cross = torch.library.custom_op("colonnade::cross", mutates_args=(), device_types="cpu")(
    _native_cross
)


@_cross.register_fake
def _(first, factor, input):
    return first.new_empty(first.shape)


@torch.library.custom_op("colonnade::cross_gradient", mutates_args=(), device_types="cpu")
def _cross_gradient(first: Tensor, factor: Tensor, gradient: Tensor) -> list[Tensor]:
    """Compute the gradients of first and factor."""
    x, u, g = (t.detach().contiguous() for t in (first, factor, gradient))
    d_first, d_factor = (empty(*first.shape, dtype=first.dtype) for _ in range(2))
    _native.cross_gradient(x, u, g, d_first, d_factor)
    return [d_first, d_factor]


@_pairwise_dot_gradient.register_fake
def _(vectors, included, gradient, wanted):
    return [v.new_empty(v.shape) for v, is_wanted in zip(vectors, wanted, strict=True) if is_wanted]


@_fm_gradient.register_fake
def _(vectors, terms, gradient, wanted):
    return [v.new_empty(v.shape) for v, is_wanted in zip(vectors, wanted, strict=True) if is_wanted]


@_cross_gradient.register_fake
def _(first, factor, gradient):
    return [first.new_empty(first.shape), first.new_empty(first.shape)]


def _save_vectors(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs[0])
    ctx.numbers = inputs[1]  # included vectors, or terms
    ctx.wanted = [v.requires_grad for v in inputs[0]]


def _fill_unwanted(gradients: Sequence[Tensor], wanted: Sequence[bool]) -> list[Tensor | None]:
    remaining = iter(gradients)
    return [next(remaining) if is_wanted else None for is_wanted in wanted]


def _dots_backward(ctx: Any, gradient: Tensor):
    gradients = torch.ops.colonnade.pairwise_dot_gradient(
        list(ctx.saved_tensors), ctx.numbers, gradient, ctx.wanted
    )
    # torch wants None for a list of numbers, but an empty list for an empty one.
    return _fill_unwanted(gradients, ctx.wanted), None if ctx.numbers else []


def _fm_backward(ctx: Any, gradient: Tensor):
    gradients = torch.ops.colonnade.fm_gradient(
        list(ctx.saved_tensors), ctx.numbers, gradient, ctx.wanted
    )
    return _fill_unwanted(gradients, ctx.wanted), None if ctx.numbers else []


def _save_factors(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], inputs[1])


def _cross_backward(ctx: Any, gradient: Tensor):
    first, factor = ctx.saved_tensors
    d_first, d_factor = torch.ops.colonnade.cross_gradient(first, factor, gradient)
    return d_first, d_factor, gradient


def _no_second_derivative(ctx: Any, *gradients: Any):
    raise RuntimeError(
        "the fused interactions are differentiable once; for second derivatives use the function of the same name in"
        " colonnade.ops.interaction.plain_fm and its like"
    )


_pairwise_dot.register_autograd(_dots_backward, setup_context=_save_vectors)
_fm.register_autograd(_fm_backward, setup_context=_save_vectors)
_cross.register_autograd(_cross_backward, setup_context=_save_factors)
for _gradient in (_pairwise_dot_gradient, _fm_gradient, _cross_gradient):
    _gradient.register_autograd(_no_second_derivative)
