"""Thresholded messages of dense sums: the elements of large magnitude, the others stay in the residual.

Source: Gupta et al., "Training Recommender Systems at Scale: Communication-Efficient Model and Data Parallelism", KDD
2021 (dynamic communication thresholding). A message has a fixed size, whatever the gradients are: every block of a
tensor has as many slots as elements should pass its threshold, and 5 % more. If more elements pass, a window that moves
with the step is sent.

If the dense optimizer is Adam, messages have each sender's directions instead of gradients (as in 1-bit Adam). Adam
would take the sum of a hundred late gradients for one of a hundredfold size, and make a tenth of their steps.

A block is a piece of at most 65,536 elements of one tensor, because layers differ in scale a hundredfold. A slot has
4 bytes: the offset within the block, and the value in bfloat16. At 1 % that is 0.042 bytes an element.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from colonnade import _native
from colonnade.plan.names import Thresholding

ADAM_BETAS, ADAM_EPSILON = (0.9, 0.999), 1e-8
MAX_BLOCK = 1 << 16  # offsets have 16 bits
SLOT_BYTES = 4
FIRST_DENSITY = 0.25
"""Share of the elements that the first message has. An element is sent every 1 / keep steps on each leg, which is too
late in the first steps, when gradients change most."""
MESSAGES_OF_AN_ELEMENT = 50
"""Number of messages of a typical element in a run, at least: in shorter runs what is late is too much of what is
learned."""
SPARE_SLOTS = 20  # one more for every so many elements that should pass
GAIN = 0.1
"""Exponent of the controller: if twice as many elements pass as should, the threshold rises by 7 %."""


def density_of_step(rule: Thresholding, step: int) -> float:
    """Return the density in a step (from 0): the share of the elements that a message has. Pure."""
    if step >= rule.keep_steps:
        return rule.keep
    warming = FIRST_DENSITY * math.pow(rule.keep / FIRST_DENSITY, step / rule.keep_steps)
    return max(rule.keep, warming)


def count_passing(block_size: int, density: float) -> int:
    """Return how many elements of a block should pass its threshold: at least one. Pure."""
    return max(1, int(density * block_size + 1e-9))


def find_threshold(elements: Tensor, num_wanted: int) -> float:
    """Return the magnitude that `num_wanted` of the elements (n,) have at least. Pure."""
    return float(elements.abs().kthvalue(len(elements) + 1 - num_wanted).values)


def split_into_blocks(sizes: Sequence[int], num_shares: int) -> list[list[int]]:
    """Split a buffer into `num_shares` equal shares; return the sizes of each share's blocks, in order. Pure.

    sizes: elements of the tensors, side by side; padding at the end of the buffer belongs to the last one.
    """
    share_size = -(-sum(sizes) // num_shares)
    ends = [*accumulate(sizes[:-1]), share_size * num_shares]
    cuts = sorted({0, *ends, *range(0, share_size * num_shares, share_size)})
    blocks: list[list[int]] = [[] for _ in range(num_shares)]
    for begin, end in pairwise(cuts):
        num_pieces = -(-(end - begin) // MAX_BLOCK)
        bounds = [begin + (end - begin) * piece // num_pieces for piece in range(num_pieces + 1)]
        blocks[begin // share_size] += [last - first for first, last in pairwise(bounds)]
    return blocks


def count_slots(blocks_by_share: Sequence[Sequence[int]], density: float) -> list[list[int]]:
    """Return the slots of each block, by share; the last block of a share has those that make all shares equal. Pure.

    density: share of the elements that a message has."""
    slots = []
    for blocks in blocks_by_share:
        passing = [count_passing(size, density) for size in blocks]
        slots.append([count - -count // SPARE_SLOTS for count in passing])
    longest = max(map(sum, slots))
    for slots_of_share in slots:
        slots_of_share[-1] += longest - sum(slots_of_share)
    return slots


def thresholded_buffer_bytes(sizes: Sequence[int], num_shares: int, density: float) -> int:
    """Return the bytes of the messages of all shares of a buffer. sizes, density: as above. Pure."""
    return (
        num_shares * sum(count_slots(split_into_blocks(sizes, num_shares), density)[0]) * SLOT_BYTES
    )


class AdamMoments:
    """Moments of the gradients that one rank sends, as torch.optim.Adam has them by its default settings."""

    def __init__(self, num_elements: int) -> None:
        self.moments = torch.zeros(2, num_elements)
        self.moments_before = self.moments.clone()  # before the last step
        self.step = 0

    def compute_directions(self, gradients: Tensor) -> Tensor:
        """Add gradients (n,) to the moments; return the directions (n,): steps of Adam at a learning rate of 1."""
        self.moments, self.moments_before = self.moments_before, self.moments
        self.step += 1
        mean, square = self.moments
        torch.lerp(self.moments_before[0], gradients, 1 - ADAM_BETAS[0], out=mean)
        torch.mul(self.moments_before[1], ADAM_BETAS[1], out=square)
        square.addcmul_(gradients, gradients, value=1 - ADAM_BETAS[1])
        corrections = [1.0 - beta**self.step for beta in ADAM_BETAS]
        roots = (square / corrections[1]).sqrt_().add_(ADAM_EPSILON)
        return torch.div(mean, roots).div_(corrections[0])

    def undo_last_step(self) -> None:
        """Restore the moments before the last step."""
        self.moments, self.moments_before = self.moments_before, self.moments
        self.step -= 1


class ThresholdedShares:
    """Shares of a buffer that one rank sends on one leg of a sum, with the thresholds and residuals of their blocks."""

    def __init__(self, rule: Thresholding, blocks_by_share: list[list[int]], own: range) -> None:
        """blocks_by_share: of the whole buffer; own: the shares that this rank sends."""
        self.rule = rule
        self.blocks_by_share = blocks_by_share
        self.own = own
        self.sizes = [size for share in own for size in blocks_by_share[share]]
        self.starts = torch.tensor([0, *accumulate(self.sizes)])
        self.residual = torch.zeros(len(own), sum(blocks_by_share[0]))
        self.residual_before = self.residual.clone()  # before the last step
        self.thresholds = torch.zeros(len(self.sizes))
        """In units of applied gradients; 0: computed in the next step from its elements."""
        self.thresholds_before = self.thresholds.clone()
        self.density = 0.0  # that of the two tensors below, which change in the warm-up alone
        self.slots = self.num_wanted = torch.zeros(len(self.sizes), dtype=torch.int64)
        """Slots of each block, and the number of its elements that should pass."""

    def encode_with_residuals(self, values: Tensor, gradient_scale: float, step: int) -> Tensor:
        """Encode values plus residuals to int32, share by share, and store the new residuals.

        An element that is not finite makes the message one NaN, and leaves residuals as they are."""
        self.residual, self.residual_before = self.residual_before, self.residual
        self._set_density(step)
        thresholds = self.thresholds.clone()
        for block, threshold in enumerate(thresholds.tolist()):
            if not threshold:
                elements = slice(*self.starts[block : block + 2].tolist())
                thresholds[block] = find_threshold(
                    values.view(-1)[elements] / gradient_scale
                    + self.residual_before.view(-1)[elements],
                    int(self.num_wanted[block]),
                )
        message = torch.empty(int(self.slots.sum()), dtype=torch.int32)
        num_passed = torch.zeros_like(self.slots)
        _native.encode_thresholded(
            values.view(-1),
            self.residual_before.view(-1),
            gradient_scale,
            self.starts,
            self.slots,
            thresholds * gradient_scale,
            step,
            self.residual.view(-1),
            num_passed,
            message,
        )
        thresholds.mul_((num_passed.clamp(min=1) / self.num_wanted) ** GAIN)
        self.thresholds, self.thresholds_before = thresholds, self.thresholds
        return message

    def decode(self, coded: Tensor, values_out: Tensor, step: int) -> None:
        """Decode messages of these shares, once or from several ranks, into `values_out` (shares, n / N)."""
        self._set_density(step)
        num_messages = len(values_out) // len(self.own)
        for message, values in zip(
            coded.view(num_messages, -1), values_out.view(num_messages, -1), strict=True
        ):
            _native.decode_thresholded(message, self.starts, self.slots, values)

    def undo_last_step(self) -> None:
        """Restore residuals and thresholds before the last step."""
        self.residual, self.residual_before = self.residual_before, self.residual
        self.thresholds, self.thresholds_before = self.thresholds_before, self.thresholds

    def _set_density(self, step: int) -> None:
        density = density_of_step(self.rule, step)
        if density == self.density:
            return
        self.density = density
        slots = count_slots(self.blocks_by_share, density)
        self.slots = torch.tensor([count for share in self.own for count in slots[share]])
        self.num_wanted = torch.tensor([count_passing(size, density) for size in self.sizes])
