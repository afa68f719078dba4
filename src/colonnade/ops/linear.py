"""Linear layer with its ReLU, and distances of vectors as a product of matrices, through oneDNN.

torch sends fp32 products to MKL, which uses less than half of some processors (here an AMD EPYC: 4096 x 367 x 256
forward 4.3 ms, oneDNN 1.9 ms; both passes of an MLP about 2x). oneDNN is in torch; only the way to it is longer.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear as torch_linear

ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
MIN_ROWS = 64  # below, the detour costs more than it saves
MIN_WEIGHTS = 4096
"""Below, MKL is the faster: both passes of 13,312 x 64 x 8 (a tower module's) in 2.0 to 2.5 ms for 5.3 to 5.7, of 1,024
x 256 x 1 (a last layer's) in 0.3 for 1.0; at 367 x 16 weights either may be."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, relu: bool = False) -> Tensor:
    """x (B, K) times weight (N, K) transposed, plus bias (N,), then ReLU if asked: (B, N).

    The function of torch.nn.functional.linear, to rounding; everything but a plain float32 product on the
    CPU is left to it.
    """
    plain = (
        not ONEDNN
        or torch.compiler.is_compiling()
        or x.device.type != "cpu"
        or not x.dtype == weight.dtype == torch.float32
        or x.dim() != 2
        or weight.dim() != 2
        or (bias is not None and (bias.dtype != torch.float32 or bias.shape != weight.shape[:1]))
        or x.shape[1] != weight.shape[1]
        or weight.numel() < MIN_WEIGHTS
        or len(x) < MIN_ROWS
        or torch.is_autocast_enabled("cpu")
    )
    if plain:
        y = torch_linear(x, weight, bias)
        return y.relu() if relu else y
    product = _Product.apply(x, weight.detach(), None if bias is None else bias.detach())
    return _Layer.apply(product, x, weight, bias, relu)


class _Product(torch.autograd.Function):
    """x times weight, plus bias: gradients of x alone."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        weight = weight.contiguous()
        bias = None if bias is None else bias.contiguous()
        ctx.save_for_backward(weight)
        return torch.ops.mkldnn._linear_pointwise(x.contiguous(), weight, bias, "none", [], "")

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: Tensor):
        dx = None
        if ctx.needs_input_grad[0]:
            (weight,) = ctx.saved_tensors
            dx = torch.ops.mkldnn._linear_pointwise(gradient, weight.t(), None, "none", [], "")
        return dx, None, None


class _Layer(torch.autograd.Function):
    """That product as the layer's result, in place: gradients of weight and bias. A node of its own, for backward then
    has these first: they may leave for other ranks while it makes those of x."""

    @staticmethod
    def forward(
        ctx, product: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool
    ) -> Tensor:
        if relu:
            product.relu_()  # apart: oneDNN's makes 0 of NaN, which would hide that a model diverges
        ctx.mark_dirty(product)
        ctx.save_for_backward(x, weight, *([product] if relu else []))
        return product

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: Tensor):
        x, weight, *activated = ctx.saved_tensors
        if activated:
            gradient = torch.ops.aten.threshold_backward(gradient, activated[0], 0)
        gradient = gradient.contiguous()
        dw = db = None
        if ctx.needs_input_grad[2] or ctx.needs_input_grad[3]:
            dw, db = torch.ops.aten.mkldnn_linear_backward_weights(
                gradient.to_mkldnn(), x.contiguous().to_mkldnn(), weight.contiguous(), ctx.needs_input_grad[3]
            )  # fmt: skip
        return gradient, None, dw, db if ctx.needs_input_grad[3] else None, None


def distances(queries: Tensor, others: Tensor) -> Tensor:
    """(P, D), (M, D) of one dtype -> (P, M): the root of |q|^2 - 2 q.o + |o|^2, in that dtype under autocast, too.

    That of near ones has the rounding of the vectors' lengths, which torch.cdist without products has not. Its
    gradient is 0 where it is 0.
    """
    with torch.autocast(queries.device.type, enabled=False):
        return _Distances.apply(queries, others)


def squared_distances(queries: Tensor, others: Tensor) -> Tensor:
    """(P, D), (M, D) of one dtype -> (P, M): |q|^2 - 2 q.o + |o|^2, in that dtype under autocast, too.

    Of near ones it has the rounding of the vectors' lengths, and may be below 0 by so much.
    """
    with torch.autocast(queries.device.type, enabled=False):
        found = linear(-2 * queries, others, others.square().sum(1))
        return found + queries.square().sum(1, keepdim=True)


class _Distances(torch.autograd.Function):
    @staticmethod
    def forward(ctx, queries: Tensor, others: Tensor) -> Tensor:
        found = linear(-2 * queries, others, None)
        found += queries.square().sum(1, keepdim=True)
        found += others.square().sum(1)
        found.clamp_(min=0).sqrt_()  # keeps NaN, which says that a model diverges
        ctx.save_for_backward(queries, others, found)
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: Tensor):
        queries, others, found = ctx.saved_tensors
        share = (gradient / found).masked_fill_(found == 0, 0)
        dq = do = None
        if ctx.needs_input_grad[0]:
            dq = queries * share.sum(1, keepdim=True) - linear(share, others.t(), None)
        if ctx.needs_input_grad[1]:
            do = others * share.sum(0)[:, None] - linear(share.t(), queries.t(), None)
        return dq, do
