"""Linear layer with its ReLU, and distances of vectors as a matrix product, through oneDNN.

torch sends fp32 products to MKL, which uses less than half of some processors (here an AMD EPYC: 4096 x 367 x 256
forward 4.3 ms, oneDNN 1.9 ms; both passes of an MLP about 2x). oneDNN is part of torch, behind private operators.

oneDNN up to 3.11 points the stack pointer at a block of the heap during a product, so a signal's frame (11 KiB with AMX
registers) overwrites the heap below that block, and a later free() aborts (oneDNN issue 4845). Therefore the main
thread, which receives a process's signals, gets an alternate stack for Python's signal handlers.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading

import torch
from torch import Tensor
from torch.nn.functional import linear as torch_linear

ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
MIN_ROWS = 64 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 512
"""Number of rows below which oneDNN's conversions cost more than it saves. Without AVX-512 both libraries are level
from there on, and with 100 rows MKL takes 0.50 (128 x 64 weights) to 0.91 (256 x 512) of oneDNN's time."""
MIN_WEIGHTS = 4096
"""Number of weights below which MKL is faster: both passes of 13,312 x 64 x 8 (a tower module) take 2.0 to 2.5 ms
instead of 5.3 to 5.7, of 1,024 x 256 x 1 (a last layer) 0.3 instead of 1.0. At 367 x 16 weights either may win."""
SIGNAL_STACK_BYTES = 256 << 10  # pages that no handler touches cost nothing
SS_DISABLE = 2  # of sigaltstack(2): the thread has no alternate stack

_is_stack_checked = sys.platform != "linux"
_signal_stack: mmap.mmap | None = None  # never freed: a signal may arrive at any time


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, relu: bool = False) -> Tensor:
    """Multiply x (B, K) by weight (N, K) transposed, add bias (N,), apply ReLU if `relu`: (B, N).

    Equal to torch.nn.functional.linear up to rounding. That function computes everything but a plain float32 product on
    the CPU.
    """
    if _is_exporting() and not torch.is_autocast_enabled("cpu"):
        return torch.ops.colonnade.linear(x, weight, bias, relu)
    is_plain = (
        not ONEDNN
        or torch.compiler.is_compiling()
        or x.shape[0] < MIN_ROWS
        or weight.numel() < MIN_WEIGHTS
        or x.device.type != "cpu"
        or not x.dtype == weight.dtype == torch.float32
        or x.dim() != 2
        or weight.dim() != 2
        or (bias is not None and (bias.dtype != torch.float32 or bias.shape != weight.shape[:1]))
        or x.shape[1] != weight.shape[1]
        or torch.is_autocast_enabled("cpu")
    )
    if is_plain:
        y = torch_linear(x, weight, bias)
        if not relu:
            return y
        return y.relu() if torch.is_grad_enabled() else y.relu_()
    if not _is_stack_checked:
        install_alternate_signal_stack()
    if not torch.is_grad_enabled():  # nothing to record
        y = _multiply(x, weight, bias)
        return y.relu_() if relu else y
    product = _Product.apply(x, weight.detach(), None if bias is None else bias.detach())
    return _Layer.apply(product, x, weight, bias, relu)


def _is_exporting() -> bool:
    """Return whether `torch.export` traces. A traced layer is one operator, which chooses when it runs."""
    return (
        torch.compiler.is_compiling()
        and getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)()
    )


@torch.library.custom_op("colonnade::linear", mutates_args=(), device_types="cpu")
def _exported_linear(x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
    with torch.no_grad():
        return linear(x, weight, bias, relu=relu)


@_exported_linear.register_fake
def _(x, weight, bias, relu):
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _save_layer(ctx, inputs: tuple, output: Tensor) -> None:
    x, weight, _bias, relu = inputs
    ctx.save_for_backward(x, weight, *([output] if relu else []))


def _compute_layer_gradients(ctx, gradient: Tensor):
    x, weight, *activated = ctx.saved_tensors
    if activated:
        gradient = torch.ops.aten.threshold_backward(gradient, activated[0], 0)
    rows = gradient.flatten(0, -2)
    dx = gradient @ weight if ctx.needs_input_grad[0] else None
    dw = rows.t() @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
    return dx, dw, rows.sum(0) if ctx.needs_input_grad[2] else None, None


# For whoever trains an exported program; and torch.compile up to 2.11 takes itself for an export.
_exported_linear.register_autograd(_compute_layer_gradients, setup_context=_save_layer)


def plain_linear(x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
    """Compute `linear` in plain PyTorch: the decomposition of `colonnade::linear`."""
    y = torch_linear(x, weight, bias)
    return y.relu() if relu else y


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    bias = None if bias is None else bias.contiguous()
    return torch.ops.mkldnn._linear_pointwise(
        x.contiguous(), weight.contiguous(), bias, "none", [], ""
    )


class _Product(torch.autograd.Function):
    """Product of x and weight, plus bias. Its backward computes the gradient of x alone."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        weight = weight.contiguous()
        ctx.save_for_backward(weight)
        return _multiply(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: Tensor):
        dx = None
        if ctx.needs_input_grad[0]:
            (weight,) = ctx.saved_tensors
            dx = torch.ops.mkldnn._linear_pointwise(gradient, weight.t(), None, "none", [], "")
        return dx, None, None


class _Layer(torch.autograd.Function):
    """Product as the layer's result, in place. Its backward computes the gradients of weight and bias.

    It is a separate node so that backward computes these first: they are sent to other ranks while it computes the
    gradient of x.
    """

    @staticmethod
    def forward(
        ctx, product: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool
    ) -> Tensor:
        if relu:
            product.relu_()  # separate: oneDNN's ReLU makes 0 of NaN, which would hide divergence
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
                gradient.to_mkldnn(),
                x.contiguous().to_mkldnn(),
                weight.contiguous(),
                ctx.needs_input_grad[3],
            )
        return gradient, None, dw, db if ctx.needs_input_grad[3] else None, None


class SignalStack(ctypes.Structure):
    """Alternate signal stack as sigaltstack(2) reads and writes it on Linux (stack_t)."""

    _fields_ = [("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]


def install_alternate_signal_stack() -> None:
    """Give the main thread an alternate signal stack unless it has one. Does nothing in other threads."""
    global _is_stack_checked, _signal_stack
    if threading.current_thread() is not threading.main_thread():
        return
    sigaltstack = ctypes.CDLL(None).sigaltstack
    current = SignalStack()
    if sigaltstack(None, ctypes.byref(current)) == 0 and current.flags & SS_DISABLE:
        _signal_stack = mmap.mmap(-1, SIGNAL_STACK_BYTES, flags=mmap.MAP_PRIVATE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(_signal_stack))
        sigaltstack(ctypes.byref(SignalStack(address, 0, SIGNAL_STACK_BYTES)), None)
    _is_stack_checked = True


def _check_stack_again() -> None:
    """Forget that the main thread was checked: after fork, the thread that forked is the main thread."""
    global _is_stack_checked
    _is_stack_checked = sys.platform != "linux"


if sys.platform == "linux":
    os.register_at_fork(after_in_child=_check_stack_again)


def distances(queries: Tensor, others: Tensor) -> Tensor:
    """Return the distances (P, M) of vectors (P, D) and (M, D) of one dtype: the root of |q|^2 - 2 q.o + |o|^2.

    Computed in that dtype even under autocast. For near vectors, the error is that of rounding the vectors' squared
    lengths, unlike torch.cdist without products. The gradient is 0 where the distance is 0.
    """
    with torch.autocast(queries.device.type, enabled=False):
        return _Distances.apply(queries, others)


def squared_distances(queries: Tensor, others: Tensor) -> Tensor:
    """Return the squared distances (P, M) of vectors (P, D) and (M, D) of one dtype: |q|^2 - 2 q.o + |o|^2.

    Computed in that dtype even under autocast. For near vectors, the error is that of rounding the vectors' squared
    lengths, so the result may be slightly below 0.
    """
    with torch.autocast(queries.device.type, enabled=False):
        products = linear(-2 * queries, others, others.square().sum(1))
        return products + queries.square().sum(1, keepdim=True)


class _Distances(torch.autograd.Function):
    @staticmethod
    def forward(ctx, queries: Tensor, others: Tensor) -> Tensor:
        result = linear(-2 * queries, others, None)
        result += queries.square().sum(1, keepdim=True)
        result += others.square().sum(1)
        result.clamp_(min=0).sqrt_()  # keeps NaN, a sign of divergence
        ctx.save_for_backward(queries, others, result)
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: Tensor):
        queries, others, result = ctx.saved_tensors
        share = (gradient / result).masked_fill_(result == 0, 0)
        dq = do = None
        if ctx.needs_input_grad[0]:
            dq = queries * share.sum(1, keepdim=True) - linear(share, others.t(), None)
        if ctx.needs_input_grad[1]:
            do = others * share.sum(0)[:, None] - linear(share.t(), queries.t(), None)
        return dq, do
