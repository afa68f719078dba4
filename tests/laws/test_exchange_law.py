"""Every exchange equals `references/exchange_reference.py` at the exactness it declares, and so does every mix."""

from __future__ import annotations

import pytest
from exchanges import CHOICES, check, run_exchange
from ranks import run_ranks

from colonnade import Mesh

SIZES = [9, 0, 1, 13]
STALE, EXACT = ("float32", 1), ("float64", 0)


def run_cases(mesh, names, cases):
    return [[run_exchange(mesh, CHOICES[name], SIZES, *case) for case in cases] for name in names]


@pytest.mark.parametrize(
    ("num_ranks", "cases"),
    [
        (1, [STALE]),
        (2, [EXACT]),
        (3, [STALE]),
        pytest.param(1, [EXACT], marks=pytest.mark.slow),
        pytest.param(2, [STALE], marks=pytest.mark.slow),
        pytest.param(3, [EXACT], marks=pytest.mark.slow),
    ],
)
def test_equals_reference(num_ranks, cases):
    names = sorted(CHOICES)
    if num_ranks == 1:
        everyone = [run_cases(Mesh(), names, cases)]
    else:
        everyone = run_ranks(num_ranks, run_cases, names, cases)
    for i, name in enumerate(names):
        for j, case in enumerate(cases):
            check(CHOICES[name], SIZES, *case, [results[i][j] for results in everyone])
