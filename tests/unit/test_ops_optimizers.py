"""The twins of the optimizers against their references: torch.optim on one parameter a row, stepped only when the
row is touched; or the paper, transcribed in float64 without a look at the twin."""

import math

import numpy as np
import pytest
import torch

from colonnade import _native
from colonnade.ops import optimizers
from colonnade.ops.optimizers import Settings

NUM_ROWS, DIM, NUM_STEPS = 7, 5, 12
STATE_FLOATS = {
    "sgd": lambda dim: 0,
    "rowwise_adagrad": lambda dim: 1,
    "momentum": lambda dim: dim,
    "adagrad": lambda dim: dim,
    "adam": lambda dim: 2 * dim,
    "rowwise_adam": lambda dim: dim + 1,
    "adamw": lambda dim: 2 * dim,
    "ftrl": lambda dim: 2 * dim,
    "lamb": lambda dim: 2 * dim,
}


def test_every_kernel_has_a_twin_and_its_state():
    assert sorted(STATE_FLOATS) == sorted(optimizers.STEPS) == sorted(_native.OPTIMIZERS)
    for kind, name in enumerate(_native.OPTIMIZERS):
        for dim in (1, 5, 128):
            assert _native.optimizer_state_elements(kind, dim) == STATE_FLOATS[name](dim)
    for kind in (-1, len(STATE_FLOATS)):
        with pytest.raises(ValueError, match=f"optimizer {kind}, wanted 0 .. 8"):
            _native.optimizer_state_elements(kind, 1)


class Steps:
    """Several steps that touch some rows, each with several gradients (duplicates, accumulated batches)."""

    def __init__(self, dtype):
        rng = np.random.default_rng(5)
        self.weights = torch.from_numpy(rng.standard_normal((NUM_ROWS, DIM))).to(dtype)
        self.touched = [rng.choice(NUM_ROWS, size=4, replace=False) for _ in range(NUM_STEPS)]
        self.terms = [
            torch.from_numpy(rng.standard_normal((3, 4, DIM))).to(dtype) for _ in range(NUM_STEPS)
        ]

    def twin(self, name, s, first_state=0.0, first_count=0):
        weights, clocks = self.weights.clone(), torch.zeros(NUM_ROWS, dtype=torch.int64)
        state = weights.new_zeros(NUM_ROWS, STATE_FLOATS[name](DIM))
        state[:, :first_count] = first_state
        for rows, terms in zip(self.touched, self.terms, strict=True):
            own, its_state = weights[rows], state[rows]
            gradients = terms[0] + terms[1] + terms[2]
            optimizers.apply_optimizer(name, own, its_state, clocks[rows], gradients, s)
            weights[rows], state[rows] = own, its_state
            clocks[rows] += 1
        return weights

    def torch(self, make):
        rows = [torch.nn.Parameter(row.clone()) for row in self.weights]
        stepped = [make([row]) for row in rows]
        for touched, terms in zip(self.touched, self.terms, strict=True):
            for i, row in enumerate(touched):
                for term in terms[:, i]:  # backward adds up
                    (rows[row] * term).sum().backward()
                stepped[row].step()
                stepped[row].zero_grad()
        return torch.stack(rows).detach()

    def paper(self, step, *first_state):
        """step(w, g, t, *state) -> (w, *state), all float64 arrays of one row."""
        weights = self.weights.double().numpy().copy()
        states = [tuple(np.copy(x) for x in first_state) for _ in range(NUM_ROWS)]
        counts = [0] * NUM_ROWS
        for touched, terms in zip(self.touched, self.terms, strict=True):
            for i, row in enumerate(touched):
                counts[row] += 1
                g = terms[:, i].double().sum(0).numpy()
                weights[row], *states[row] = step(weights[row], g, counts[row], *states[row])
        return torch.from_numpy(weights)


def assert_equal(got, wanted):
    tolerance = 1e-12 if got.dtype == torch.float64 else 1e-6
    scale = float(wanted.abs().max())
    torch.testing.assert_close(
        got.double(), wanted.double(), rtol=tolerance, atol=tolerance * scale
    )


BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


@BOTH
@pytest.mark.parametrize("decay", [0.0, 0.05])
@pytest.mark.parametrize(
    ("name", "s", "make"),
    [
        ("sgd", {"lr": 0.1}, lambda p, wd: torch.optim.SGD(p, 0.1, weight_decay=wd)),
        (
            "momentum",
            {"lr": 0.02, "beta1": 0.8},
            lambda p, wd: torch.optim.SGD(p, 0.02, 0.8, weight_decay=wd),
        ),
        (
            "momentum",
            {"lr": 0.02, "beta1": 0.8, "nesterov": True},
            lambda p, wd: torch.optim.SGD(p, 0.02, 0.8, weight_decay=wd, nesterov=True),
        ),
        (
            "adagrad",
            {"lr": 0.1, "eps": 1e-6},
            lambda p, wd: torch.optim.Adagrad(
                p, 0.1, eps=1e-6, weight_decay=wd, initial_accumulator_value=0.5
            ),
        ),
        ("adam", {"lr": 0.01}, lambda p, wd: torch.optim.Adam(p, 0.01, weight_decay=wd)),
        (
            "adam",
            {"lr": 0.01, "beta1": 0.5, "beta2": 0.9, "eps": 1e-3},
            lambda p, wd: torch.optim.Adam(p, 0.01, (0.5, 0.9), 1e-3, weight_decay=wd),
        ),
        ("adamw", {"lr": 0.01}, lambda p, wd: torch.optim.AdamW(p, 0.01, weight_decay=wd)),
    ],
)
def test_equals_torch(dtype, decay, name, s, make):
    steps = Steps(dtype)
    got = steps.twin(name, Settings(weight_decay=decay, **s), 0.5, DIM if name == "adagrad" else 0)
    assert_equal(got, steps.torch(lambda p: make(p, decay)))


@BOTH
@pytest.mark.parametrize("decay", [0.0, 0.05])
def test_rowwise_adagrad(dtype, decay):
    def step(w, g, t, s):
        g = g + decay * w
        s = s + np.mean(g**2)
        return w - 0.1 * g / (np.sqrt(s) + 1e-6), s

    steps = Steps(dtype)
    got = steps.twin("rowwise_adagrad", Settings(lr=0.1, eps=1e-6, weight_decay=decay), 0.5, 1)
    assert_equal(got, steps.paper(step, 0.5))


@BOTH
@pytest.mark.parametrize("decay", [0.0, 0.05])
def test_rowwise_adam(dtype, decay):
    def step(w, g, t, m, v):
        g = g + decay * w
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * np.mean(g**2)
        return w - 0.01 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8), m, v

    steps = Steps(dtype)
    got = steps.twin("rowwise_adam", Settings(lr=0.01, weight_decay=decay))
    assert_equal(got, steps.paper(step, np.zeros(DIM), 0.0))


@BOTH
@pytest.mark.parametrize("l1", [0.0, 0.7])
def test_ftrl_is_algorithm_1(dtype, l1):
    """McMahan et al 2013, per coordinate, the paper's alpha, beta, lambda1, lambda2."""
    alpha, beta, l2 = 0.1, 1.0, 0.3

    def step(w, g, t, n, z):
        sigma = (np.sqrt(n + g**2) - np.sqrt(n)) / alpha
        z = z + g - sigma * w
        n = n + g**2
        w = -(z - np.sign(z) * l1) / ((beta + np.sqrt(n)) / alpha + l2)
        return np.where(np.abs(z) <= l1, 0.0, w), n, z

    steps = Steps(dtype)
    got = steps.twin("ftrl", Settings(lr=alpha, beta=beta, l1=l1, l2=l2), 0.1, DIM)
    assert_equal(got, steps.paper(step, np.full(DIM, 0.1), np.zeros(DIM)))
    assert bool((got == 0).any()) == (l1 > 0)


@BOTH
@pytest.mark.parametrize("decay", [0.0, 0.05])
def test_lamb_is_algorithm_2(dtype, decay):
    """You et al 2020 with phi(x) = x; a row of zeros steps with trust ratio 1."""

    def step(w, g, t, m, v):
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * g**2
        r = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-6) + decay * w
        norms = np.linalg.norm(w), np.linalg.norm(r)
        return w - 0.01 * (norms[0] / norms[1] if min(norms) > 0 else 1.0) * r, m, v

    steps = Steps(dtype)
    steps.weights[2] = 0
    got = steps.twin("lamb", Settings(lr=0.01, eps=1e-6, weight_decay=decay))
    assert_equal(got, steps.paper(step, np.zeros(DIM), np.zeros(DIM)))


def test_scale_clip_and_max_norm():
    """torch.clamp and torch.embedding_renorm_."""
    weights, g = torch.randn(9, 4), torch.randn(9, 4)
    g[0, 0] = math.nan
    wanted = weights - (g * 0.5).clamp(-0.3, 0.3) * 0.1
    torch.embedding_renorm_(wanted, torch.arange(9), 1.5, 2.0)
    s = Settings(lr=0.1, clip_value=0.3, gradient_scale=0.5, max_norm=1.5)
    optimizers.apply_optimizer(
        "sgd", weights, torch.empty(9, 0), torch.zeros(9, dtype=torch.int64), g, s
    )
    torch.testing.assert_close(weights, wanted, equal_nan=True, rtol=1e-6, atol=1e-6)
    assert weights[0, 0].isnan()
    assert float(weights[1:].norm(dim=1).max()) <= 1.5 * (1 + 1e-6)


def test_weights_are_bounded():
    weights, g = torch.randn(9, 4), torch.randn(9, 4)
    weights[0, 0] = math.nan
    wanted = (weights - g * 0.1).clamp(-0.4, 0.4)
    s = Settings(lr=0.1, weight_bound=0.4)
    optimizers.apply_optimizer(
        "sgd", weights, torch.empty(9, 0), torch.zeros(9, dtype=torch.int64), g, s
    )
    torch.testing.assert_close(weights, wanted, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("base", [0.0, 0.5, 0.9, 0.999, 0.999999])
def test_power(base):
    exponents = torch.tensor([0, 1, 2, 255, 256, 1000, 65536, 10**6, 2**32 - 1, 2**32])
    wanted = torch.tensor(
        [base ** min(t, 2**32 - 1) for t in exponents.tolist()], dtype=torch.float64
    )
    torch.testing.assert_close(
        optimizers.raise_to_powers(base, exponents), wanted, rtol=1e-10, atol=1e-15
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
class TestRounding:
    def rounded(self, values, dtype, num_rows=4000, clock=0):
        rows = torch.tensor(values).repeat(num_rows, 1)
        clocks = torch.full((num_rows,), clock)
        return optimizers.round_stochastically(
            rows, torch.arange(num_rows), clocks, 9, dtype
        ).float()

    def test_what_is_exact_stays(self, dtype):
        every = torch.arange(-(2**15), 2**15).short().view(dtype)
        every = every[every.isfinite() | every.isinf()].float()
        ids, clocks = torch.tensor([3]), torch.tensor([8])
        again = optimizers.round_stochastically(every[None], ids, clocks, 1, dtype)[0]
        assert torch.equal(again.float().view(torch.int32), every.view(torch.int32))
        assert self.rounded([math.nan, -math.nan], dtype).isnan().all()

    def test_neighbours_and_mean(self, dtype):
        values = [1.0 + 0.3 * 2**-10, -3.00123, 1e-6 / 3, -5e-8, 1234.567, 2**-14 - 1e-9]
        rounded = self.rounded(values, dtype)
        for j, value in enumerate(values):
            result = rounded[:, j].unique()
            assert len(result) == 2 and result[0] < value < result[1]
            gap = float(result[1] - result[0])
            assert float(rounded[:, j].double().mean()) == pytest.approx(value, abs=gap * 0.04)

    def test_too_large(self, dtype):
        largest = torch.finfo(dtype).max
        rounded = self.rounded([largest * 1.0009, largest * 1.001, -3.4028234e38], dtype)
        assert set(rounded[:, 0].tolist()) <= {largest, math.inf}
        assert set(rounded[:, 2].tolist()) <= {-torch.finfo(dtype).max, -math.inf}
        if dtype == torch.float16:
            assert self.rounded([65536.0, 1e30], dtype).isinf().all()

    def test_bits_depend_on_clock_and_column(self, dtype):
        values = [1.0 + 2**-12] * 40
        first = self.rounded(values, dtype, 2000)
        assert torch.equal(first, self.rounded(values, dtype, 2000))
        assert not torch.equal(first, self.rounded(values, dtype, 2000, clock=1))
        up = (first > 1).double() - (first > 1).double().mean()
        covariance = up.T @ up / len(up)
        limit = 5 * float(covariance.diag().max()) / math.sqrt(len(up))
        assert float((covariance - covariance.diag().diag()).abs().max()) < limit
