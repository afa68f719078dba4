"""Definition of the sparse optimizers in plain PyTorch, as `_native.update` applies them to rows.

Native rows equal these bit for bit; these equal their references within 1e-6 (float32) and 1e-12 (float64), with each
row a parameter of its own that is stepped only when a batch touches it:

| function        | reference                                 | state of a row, in order         | weight decay |
|-----------------|-------------------------------------------|----------------------------------|--------------|
| sgd             | torch.optim.SGD                           |                                  | added to g   |
| rowwise_adagrad | torch.optim.Adagrad, one sum per row:     | s                                | added to g   |
|                 | s += mean(g^2)                            |                                  |              |
| momentum        | torch.optim.SGD(momentum, nesterov)       | momentum (D)                     | added to g   |
| adagrad         | torch.optim.Adagrad                       | s (D)                            | added to g   |
| adam            | torch.optim.Adam                          | m (D), v (D)                     | added to g   |
| rowwise_adam    | torch.optim.Adam, one v per row:          | m (D), v                         | added to g   |
|                 | v = beta2 v + (1 - beta2) mean(g^2)       |                                  |              |
| adamw           | torch.optim.AdamW                         | m (D), v (D)                     | decoupled    |
| ftrl            | McMahan et al 2013, algorithm 1           | n (D), z (D)                     | l1, l2       |
| lamb            | You et al 2020, algorithm 2, phi(x) = x,  | m (D), v (D)                     | in the step  |
|                 | each row a layer                          |                                  |              |

The step count t of Adam and its variants is the row's own clock + 1. All state begins at 0, except the sums of squares
(s, n), which begin at a setting. Loading weights counts as an update, so that the row is stored, but not as a step: it
sets IS_LOADED in the clock.

Legend: U unique rows, D dim. Arithmetic is in the dtype of the weights (float32 or float64); every operation rounds
once, in the order written; a number of the settings is rounded to that dtype where it meets a tensor.
"""

from __future__ import annotations

import itertools
import math
import operator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from colonnade.ops.reference import GOLDEN, _shift, _sqrt, _word, mix64

IS_LOADED = 1 << 62
"""Bit of a clock: the first of the row's updates loaded its weights, so that its optimizer's steps are one fewer."""
LAST_UPDATE = 2**31 - 1  # the count of updates stops here


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Numbers of one part's optimizer, in the order of the columns of `_native.update`'s settings."""

    lr: float
    weight_decay: float = 0.0
    eps: float = 1e-8
    beta1: float = 0.9
    """Decay of the first moment; the momentum of momentum SGD."""
    beta2: float = 0.999
    nesterov: bool = False
    l1: float = 0.0
    l2: float = 0.0
    beta: float = 1.0
    """Setting of FTRL."""
    max_norm: float = math.inf
    """Largest L2 norm of a row's part after the update; inf: any."""
    clip_value: float = math.inf
    weight_bound: float = math.inf
    """Largest absolute value of a weight after the update; inf: any."""
    gradient_scale: float = 1.0


def apply_optimizer(
    name: str,  # a key of STEPS
    weights: Tensor,  # (U, D)
    state: Tensor,  # (U, state of the optimizer)
    clocks: Tensor,  # (U,) int64
    gradients: Tensor,  # (U, D): sums of the rows' entries
    settings: Settings,
) -> None:
    """Update one part of rows in place; clocks do not advance.

    g *= gradient_scale; g clamped to +-clip_value; g += weight_decay * w (if not 0 and not in OWN_DECAY); the step;
    then rows longer than max_norm are multiplied by max_norm / (norm + 1e-7), as torch.embedding_renorm_ does; then
    weights are clamped to +-weight_bound.
    """
    if settings.gradient_scale != 1:
        gradients = gradients * settings.gradient_scale
    if settings.clip_value < math.inf:
        gradients = gradients.clamp(-settings.clip_value, settings.clip_value)
    if settings.weight_decay and name not in OWN_DECAY:
        gradients = gradients + weights * settings.weight_decay
    STEPS[name](weights, state, clocks, gradients, settings)
    if settings.max_norm < math.inf:
        norms = _sqrt(sum_squares(weights))
        bounds = torch.full_like(norms, settings.max_norm)
        factors = (bounds / (norms + 1e-7))[:, None]
        weights.copy_(torch.where((norms > bounds)[:, None], weights * factors, weights))
    if settings.weight_bound < math.inf:
        weights.clamp_(-settings.weight_bound, settings.weight_bound)


def sgd(
    weights: Tensor, state: Tensor, clocks: Tensor, gradients: Tensor, settings: Settings
) -> None:
    """Apply SGD: w -= g lr."""
    weights.sub_(gradients * settings.lr)


def momentum(
    weights: Tensor, state: Tensor, clocks: Tensor, gradients: Tensor, settings: Settings
) -> None:
    """Apply momentum SGD: m = m beta1 + g; w -= lr m, or, with Nesterov, lr (g + m beta1)."""
    state.copy_(state * settings.beta1 + gradients)
    weights.sub_((gradients + state * settings.beta1 if settings.nesterov else state) * settings.lr)


def adagrad(
    weights: Tensor, state: Tensor, clocks: Tensor, gradients: Tensor, settings: Settings
) -> None:
    """Apply Adagrad: s += g^2; w -= g lr / (sqrt(s) + eps)."""
    state.add_(gradients * gradients)
    weights.sub_(gradients * settings.lr / (_sqrt(state) + settings.eps))


def rowwise_adagrad(
    weights: Tensor, state: Tensor, clocks: Tensor, gradients: Tensor, settings: Settings
) -> None:
    """Apply row-wise Adagrad: s += mean(g^2); w -= g (lr / (sqrt(s) + eps))."""
    sums = state[:, 0]
    sums.add_(_mean_squares(gradients))
    steps = torch.full_like(sums, settings.lr) / (_sqrt(sums) + settings.eps)
    weights.sub_(gradients * steps[:, None])


def adam(
    weights: Tensor, state: Tensor, clocks: Tensor, gradients: Tensor, settings: Settings
) -> None:
    """Apply Adam: m += (g - m) (1 - beta1); v = v beta2 + g^2 (1 - beta2);
    w -= m (lr / (1 - beta1^t)) / (sqrt(v) (1 / sqrt(1 - beta2^t)) + eps)."""
    m, v = state.chunk(2, dim=1)
    steps, inverse_roots = _compute_bias_corrections(settings.lr, clocks, settings, gradients.dtype)
    _first_moment(m, gradients, settings)
    _second_moment(v, gradients * gradients, settings)
    weights.sub_(m * steps[:, None] / (_sqrt(v) * inverse_roots[:, None] + settings.eps))


def rowwise_adam(
    weights: Tensor, state: Tensor, clocks: Tensor, gradients: Tensor, settings: Settings
) -> None:
    """Apply Adam with one v = v beta2 + mean(g^2) (1 - beta2) for the whole row;
    w -= m ((lr / (1 - beta1^t)) / (sqrt(v) (1 / sqrt(1 - beta2^t)) + eps))."""
    m = state[:, :-1]
    v = state[:, -1]
    steps, inverse_roots = _compute_bias_corrections(settings.lr, clocks, settings, gradients.dtype)
    _first_moment(m, gradients, settings)
    _second_moment(v, _mean_squares(gradients), settings)
    weights.sub_(m * (steps / (_sqrt(v) * inverse_roots + settings.eps))[:, None])


def adamw(
    weights: Tensor, state: Tensor, clocks: Tensor, gradients: Tensor, settings: Settings
) -> None:
    """Apply AdamW: w *= 1 - lr weight_decay; then Adam."""
    weights.mul_(1 - settings.lr * settings.weight_decay)
    adam(weights, state, clocks, gradients, settings)


def ftrl(
    weights: Tensor, state: Tensor, clocks: Tensor, gradients: Tensor, settings: Settings
) -> None:
    """Apply FTRL: sigma = (sqrt(n + g^2) - sqrt(n)) / lr; n += g^2; z += g - sigma w;
    w = 0 where |z| <= l1, else (sign(z) l1 - z) / ((sqrt(n) + beta) / lr + l2). Divides by lr as * (1 / lr)."""
    n, z = state.chunk(2, dim=1)
    next_n = n + gradients * gradients
    roots = _sqrt(next_n)
    sigma = (roots - _sqrt(n)) * (1 / settings.lr)
    n.copy_(next_n)
    z.add_(gradients - sigma * weights)
    l1 = torch.full_like(z, settings.l1)
    values = (torch.where(z > 0, l1, -l1) - z) / (
        (roots + settings.beta) * (1 / settings.lr) + settings.l2
    )
    weights.copy_(torch.where((z <= l1) & (z >= -l1), torch.zeros_like(z), values))


def lamb(
    weights: Tensor, state: Tensor, clocks: Tensor, gradients: Tensor, settings: Settings
) -> None:
    """Apply LAMB: m, v as in Adam; r = (m / (1 - beta1^t)) / (sqrt(v) (1 / sqrt(1 - beta2^t)) + eps) + weight_decay w;
    w -= r (lr (|w| / |r|)), with ratio 1 if a norm is 0."""
    m, v = state.chunk(2, dim=1)
    inverses, inverse_roots = _compute_bias_corrections(1.0, clocks, settings, gradients.dtype)
    _first_moment(m, gradients, settings)
    _second_moment(v, gradients * gradients, settings)
    r = m * inverses[:, None] / (_sqrt(v) * inverse_roots[:, None] + settings.eps)
    if settings.weight_decay:
        r = r + weights * settings.weight_decay
    row_norms = _sqrt(sum_squares(weights))
    step_norms = _sqrt(sum_squares(r))
    has_both = (row_norms > 0) & (step_norms > 0)
    ratios = torch.where(has_both, row_norms / step_norms, torch.ones_like(row_norms))
    weights.sub_(r * (ratios * settings.lr)[:, None])


STEPS = {
    step.__name__: step
    for step in (sgd, rowwise_adagrad, momentum, adagrad, adam, rowwise_adam, adamw, ftrl, lamb)
}
"""Steps by the names of the native kernels (`_native.OPTIMIZERS`)."""
OWN_DECAY = frozenset(("adamw", "ftrl", "lamb"))
"""Optimizers whose steps use weight decay, or do not have it; for all others it is added to the gradient."""


def sum_squares(rows: Tensor) -> Tensor:
    """Sum the squares of each row, (U,).

    Sums are made in lanes, 64 bytes of elements side by side, column j in lane j mod lanes. Then the lanes are added as
    a tree (lane i + lane i + half, and again).
    """
    lanes = 64 // rows.element_size()
    columns = functional.pad(rows * rows, (0, -rows.shape[1] % lanes))
    sums = columns[:, :lanes]
    for start in range(lanes, columns.shape[1], lanes):
        sums = sums + columns[:, start : start + lanes]
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    return sums[:, 0]


def raise_to_powers(base: float, exponents: Tensor) -> Tensor:
    """Return base^t, (U,) float64, for t (U,) in 0 .. 2^32 - 1 (clamped), correct to about t roundings.

    The result is the product of base^(i * 256^k) over the four digits i of t to the base 256; each of the 256 numbers
    of a digit is the previous one times base^(256^k).
    """
    exponents = exponents.clamp(max=2**32 - 1)
    product = torch.ones(len(exponents), dtype=torch.float64, device=exponents.device)
    for k in range(4):
        powers = _powers(base, exponents.device)
        product = product * powers[_shift(exponents, 8 * k) & 0xFF]
        base = _powers(base, torch.device("cpu"))[256].item()
    return product


def count_updates(clocks: Tensor) -> Tensor:
    """Return how often rows were updated, from their clocks (U,); loading weights counts."""
    return clocks & (IS_LOADED - 1)


def advance_clocks(clocks: Tensor) -> Tensor:
    """Return the clocks (U,) after one more update."""
    return clocks + (count_updates(clocks) < LAST_UPDATE).long()


def round_stochastically(
    values: Tensor,  # (U, D) float32
    ids: Tensor,  # (U,) int64
    clocks: Tensor,  # (U,) int64, before they advance
    seed: int,  # of the table
    dtype: torch.dtype,  # bfloat16 or float16
    *,
    first_column: int = 0,  # of the first value, in its row
) -> Tensor:
    """Round each value to one of its two neighbours at random, the nearer the likelier, so that the mean is the value.

    Returns (U, D). 16 random bits (float16: their upper 13) are added below the last bit that stays, and the rest is
    cut off. An exact value stays. The upper neighbour of the largest number is infinity, and larger values become
    infinity; NaN stays NaN. Below float16's smallest normal number the steps are 2^-24, counted in float32.

    Column c of a row takes bits 16 (c mod 4) and up of word c // 4 + 1 of the splitmix64 stream that starts at
    mix64(mix64(mix64(id) ^ seed) ^ (updates + 1)).
    """
    random = draw_rounding_bits(ids, clocks, seed, values.shape[1], first_column=first_column)
    bits = values.view(torch.int32).long() & 0xFFFFFFFF
    if dtype == torch.bfloat16:
        rounded = torch.where(values.isnan(), bits >> 16 | 0x40, (bits + random) >> 16)
    else:
        random >>= 3
        magnitudes = bits & 0x7FFFFFFF
        signs = bits >> 16 & 0x8000
        rounded = ((magnitudes + random >> 13) - ((127 - 15) << 10)).clamp(max=0x7C00)
        is_small = values.abs() < 2**-14
        steps = torch.where(is_small, values.abs(), 0.0) * 2**24 + random.float() * 2**-13
        rounded = torch.where(is_small, steps.long(), rounded)
        rounded = torch.where(values.isnan(), 0x7E00 | magnitudes >> 13 & 0x3FF, rounded) | signs
    return ((rounded ^ 0x8000) - 0x8000).short().view(dtype)


def draw_rounding_bits(
    ids: Tensor, clocks: Tensor, seed: int, dim: int, *, first_column: int
) -> Tensor:
    """Return the random bits of `round_stochastically`, (U, dim) int64, 16 each, for the columns from `first_column`
    on."""
    start = mix64(mix64(mix64(ids) ^ _word(seed)) ^ (count_updates(clocks) + 1))
    columns = torch.arange(first_column, first_column + dim, device=ids.device)
    words = mix64(start[:, None] + (columns // 4 + 1) * _word(GOLDEN))
    random = torch.empty_like(words)
    for lane in range(4):
        lane_columns = slice((lane - first_column) % 4, None, 4)
        random[:, lane_columns] = _shift(words[:, lane_columns], 16 * lane) & 0xFFFF
    return random


@lru_cache(256)
def _powers(base: float, device: torch.device) -> Tensor:
    """Return the powers base^i, (257,) float64, each the previous one times base."""
    powers = itertools.accumulate([base] * 256, operator.mul, initial=1.0)
    return torch.tensor(list(powers), dtype=torch.float64, device=device)


def _mean_squares(g: Tensor) -> Tensor:
    sums = sum_squares(g)
    return sums / torch.full_like(sums, g.shape[1])


def _compute_bias_corrections(
    lr: float, clocks: Tensor, settings: Settings, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return lr / (1 - beta1^t) and 1 / sqrt(1 - beta2^t), (U,) each, t = steps + 1, from float64, rounded once."""
    t = count_updates(clocks) - (clocks >= IS_LOADED).long() + 1
    first = 1 - raise_to_powers(settings.beta1, t)
    second = 1 - raise_to_powers(settings.beta2, t)
    return (
        (torch.full_like(first, lr) / first).to(dtype),
        (torch.ones_like(second) / _sqrt(second)).to(dtype),
    )


def _first_moment(m: Tensor, g: Tensor, s: Settings) -> None:
    m.add_((g - m) * (1 - s.beta1))


def _second_moment(v: Tensor, squares: Tensor, s: Settings) -> None:
    v.copy_(v * s.beta2 + squares * (1 - s.beta2))
