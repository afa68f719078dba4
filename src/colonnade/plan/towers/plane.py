"""Points whose distances are as near as can be to given ones: features in a plane, for clustering and for the eye.

Stress minimisation by majorisation (SMACOF, de Leeuw 1977) from classical scaling (Torgerson 1952): no chance in it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
ROUNDS = 500
WORTH = 1e-7
"""Of the stress: a round that takes less of it is the last."""


def place(distances: Floats, dims: int = 2) -> tuple[Floats, float]:
    """(F, dims) points, and their stress: sum (|x_i - x_j| - d_ij)^2 over sum d_ij^2; 0 is perfect.

    distances: (F, F), symmetric, 0 on the diagonal. Points that are all alike lie on one spot.
    """
    points = classical(distances, dims)
    total = float((distances**2).sum())
    if not total:
        return points, 0.0
    stress = _stress(points, distances) / total
    for _ in range(ROUNDS):
        length = _lengths(points)
        ratio = np.divide(distances, length, out=np.zeros_like(length), where=length > 1e-12)
        guttman = np.diag(ratio.sum(1)) - ratio
        moved = guttman @ points / len(points)
        after = _stress(moved, distances) / total
        if after >= stress:
            break
        gain, points, stress = stress - after, moved, after
        if gain < WORTH * stress:
            break
    return points, stress


def classical(distances: Floats, dims: int) -> Floats:
    """(F, dims): the leading axes of the centred squares. Each axis points to where its longest element is positive."""
    num = len(distances)
    centre = np.eye(num) - 1.0 / num
    values, vectors = np.linalg.eigh(-0.5 * centre @ (distances**2) @ centre)
    order = np.argsort(-values, kind="stable")[:dims]
    axes = vectors[:, order] * np.sqrt(np.maximum(values[order], 0.0))
    # Of elements that are as long up to rounding, the first says which way an axis points.
    longest = (np.abs(axes) >= np.abs(axes).max(0, initial=0.0) * (1 - 1e-9)).argmax(0)
    signs = np.sign(axes[longest, np.arange(len(order))])
    axes = axes * np.where(signs == 0, 1.0, signs)
    return np.hstack([axes, np.zeros((num, dims - len(order)))])


def _lengths(points: Floats) -> Floats:
    return np.sqrt(((points[:, None] - points[None]) ** 2).sum(-1))


def _stress(points: Floats, distances: Floats) -> float:
    return float(((_lengths(points) - distances) ** 2).sum())
