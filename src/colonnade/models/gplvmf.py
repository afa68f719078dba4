"""GPLVMF (Huang and Xu 2019): each user's ratings are a Gaussian process over learned vectors of items and contexts.

GPFM (Nguyen et al. 2014) is the same without the prior of these vectors. Both are exact: a user's marginal likelihood
and predictions come from a Cholesky factor of its ratings' covariance. The bound, with one draw of the vectors for each
step, was derived from the papers' abstracts and the code of GPFM.

Legend: R samples of a batch, U users in it, L most training ratings of one of them, Q held-out ratings, D width of a
latent vector, X inputs of the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from colonnade.batch import Batch
from colonnade.comm.mesh import Mesh
from colonnade.data.contract import Source
from colonnade.data.counter import read_words, stream_key
from colonnade.data.ratings import COUNT
from colonnade.embedding import EmbeddingCollection
from colonnade.errors import ConfigError, DataError
from colonnade.models.fields import find_field_dims
from colonnade.models.ranking import average_metrics, evaluation_mode
from colonnade.models.split import SplitModel
from colonnade.table import Feature, Table

MEAN = "mean"
LOG_VARIANCE = "log_variance"
BIAS = "bias"
FIRST_VARIANCE = 0.05
"""Variance of the latent vectors of new rows: part `log_variance` is the logarithm of its multiple."""
BIAS_VARIANCE = 0.25
"""Variance of the prior of biases, in units of the variance of ratings."""
WARM_UP_STEPS = 100
"""Number of steps over which the weight of the latent prior grows to 1. At full weight from the start, vectors collapse
to the prior before they have learned anything."""
JITTER = 1e-6
"""Least variance of noise, in units of the variance of ratings."""


class MarginalLikelihood:
    """Objective of `GPLVMF`: the negative bound of the log marginal likelihood per training rating; metrics of the
    ratings that it holds out."""

    monitor = "rmse"
    metrics = ("rmse", "mae", "nlpd")
    outputs = ("mean", "sd")
    """Names of the columns of predictions."""

    def loss(self, model: GPLVMF, batch: Batch, mesh: Mesh) -> Tensor:
        """Compute this rank's part of the bound. The first step sets mean and scale of ratings, which is collective."""
        if batch.label is None or batch.label.shape[1] != 1:
            raise DataError("gplvmf: got a batch without one label, wanted the rating")
        if model.embeddings.step == 0:
            model.fit_scale(batch.label, mesh)
        return model.compute_negative_bound(batch) / max(batch.world_weight, 1e-12)

    def evaluate(
        self, model: GPLVMF, source: Source, batch_size: int, mesh: Mesh
    ) -> dict[str, float]:
        """Compute the metrics over the held-out ratings of `source`. Collective; changes nothing.

        nlpd is the negative log density of a rating; `relevance_NAME` of an item or context is the mean, over pairs of
        a held-out and a training rating of one user, of 1 - the factor of the covariance that it accounts for. It is 0
        if the context changes nothing, and nears 1 if ratings in other contexts say nothing.
        """
        numbers = [name for name in source.schema.dense if not name.startswith(COUNT)]
        contexts = [f"relevance_{name}" for name in (*model.latent_features, *numbers)]
        names = ("mse", "mae", "nlpd", *contexts)

        def measure(batch: Batch) -> Mapping[str, Tensor]:
            processes = model.condition(batch)
            assert batch.label is not None
            label = batch.label[: processes.num_queries, 0].cpu().double()
            mean, sd = model.predict_queries(processes).cpu().T
            error = label - mean
            density = sd.log() + 0.5 * (error / sd).square() + 0.5 * math.log(2 * math.pi)
            relevances = model.measure_relevances(processes)
            values = zip(names, (error.square(), error.abs(), density, *relevances), strict=True)
            return {name: value.cpu()[label.isfinite()] for name, value in values}

        with evaluation_mode(model):
            averages = average_metrics(measure, names, source, batch_size, mesh)
        return {"rmse": math.sqrt(averages.pop("mse")), **averages}

    def predict(self, model: GPLVMF, batch: Batch) -> Tensor:
        """Return mean and standard deviation of the ratings of a batch's held-out samples, which come first, (Q, 2)
        float64. The deviation includes the noise of ratings."""
        return model(batch)


Kernel = Callable[[Tensor, Tensor], Tensor]
"""Function of samples of each user, (U, L) and (U, M), to their covariances (U, L, M) before the amplitude."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Distribution of the inputs of the kernel that one item or context gives, float64 on the network's device."""

    mean: Tensor  # (R, D)
    variance: Tensor  # (R, D)
    ids: Tensor  # (R,) int64: samples with one id have one vector; of numbers, the numbers of the samples


@dataclass(frozen=True, slots=True)
class Processes:
    """Processes of a batch's users, given their training ratings, in units of `GPLVMF.scale`."""

    inputs: Sequence[Inputs]
    kernel: Kernel
    prior_mean: Tensor  # (R,)
    factor: Tensor  # (U, L, L): Cholesky factors
    whitened: Tensor  # (U, L, 1): factor^-1 (ratings - prior mean)
    training: Tensor  # (U, L): samples
    has_rating: Tensor  # (U, L) bool: False where a user has fewer ratings
    queries: Tensor  # (U, most held-out ratings of a user): samples
    has_query: Tensor
    num_queries: int  # Q


class GPLVMF(SplitModel):
    """Gaussian process of each user over latent vectors, with biases of users, items and contexts in its mean.

    The first feature is the user, the others are items and contexts: their tables have the parts mean (D), log_variance
    (D) and bias (1), the user's has bias (1). Samples are those of `data.ratings`: dense columns are real-valued
    contexts, which enter the kernel as they are, then a count for each feature. All users share the relevances of the
    kernel's inputs, its amplitude and the noise.

    prior: a latent vector has the prior N(0, 1), and a posterior whose mean and variance are learned. A training step
    draws one vector for each id; predictions have the expected kernel, in closed form. Without, variances are 0, and
    vectors are learned by maximum likelihood (GPFM).
    """

    objective = MarginalLikelihood()

    def __init__(
        self,
        tables: Sequence[Table],
        features: Sequence[Feature],
        *,
        num_dense: int,
        prior: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.tables = {feature.name: feature.table for feature in features}
        find_field_dims(tables, features, BIAS)
        dims = find_field_dims(tables, features[1:], MEAN)
        self.num_numbers = num_dense - len(features)
        if self.num_numbers < 0:
            raise ConfigError(
                f"gplvmf: got {num_dense} dense columns for {len(features)} features, wanted a count for each: group "
                "the data by user with data.options.group_by"
            )
        self.embeddings = EmbeddingCollection(tables, features, seed=seed)
        self.prior = prior
        self.dims = [*dims.values(), *[1] * self.num_numbers]
        num_inputs = sum(self.dims)
        start = torch.full((num_inputs,), -0.5 * math.log(max(num_inputs, 1)))
        self.log_relevance = nn.Parameter(start)
        self.log_amplitude = nn.Parameter(torch.zeros(()))
        self.log_noise = nn.Parameter(torch.zeros(()))
        self.mean = nn.Parameter(torch.zeros(()))
        self.offset: Tensor
        self.scale: Tensor
        self.register_buffer("offset", torch.zeros((), dtype=torch.float64))
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))

    @property
    def latent_features(self) -> list[str]:
        """Names of items and contexts with latent vectors."""
        return list(self.tables)[1:]

    def fit_scale(self, label: Tensor, mesh: Mesh) -> None:
        """Set offset and scale to mean and standard deviation of all ranks' ratings. Collective."""
        y = label.double()
        sums = torch.stack([y.new_tensor(y.numel()), y.sum(), y.square().sum()])
        count, total, squares = mesh.all_reduce("dense", sums.cpu()).tolist()
        mean = total / max(count, 1.0)
        self.offset.fill_(mean)
        self.scale.fill_(math.sqrt(max(squares / max(count, 1.0) - mean**2, 0.0)) or 1.0)

    def network(self, a: Tensor, b: Tensor) -> Tensor:
        """Compute exp(-distance^2 / 2) of all pairs: (U, L, X), (U, M, X) -> (U, L, M)."""
        squares = a.square().sum(2)[:, :, None] + b.square().sum(2)[:, None]
        return torch.exp(torch.clamp_max(a @ b.transpose(1, 2) - 0.5 * squares, 0.0))

    def compute_negative_bound(self, batch: Batch) -> Tensor:
        """Compute the sum over a batch's users of the negative log marginal likelihood, and of the penalties of their
        ids: an id's penalty is divided among all its training ratings."""
        rows = self.embeddings(batch)
        inputs = self._read_inputs(batch, rows)
        vectors = [x.mean for x in inputs]
        if self.prior:
            for i, name in enumerate(self.latent_features):
                noise = self._draw_noise(name, batch.ids[name].values, self.dims[i])
                vectors[i] = vectors[i] + inputs[i].variance.sqrt() * noise.to(vectors[i])
        x = torch.cat(vectors, 1) * (0.5 * self.log_relevance.double()).exp()

        def compute_kernel(a: Tensor, b: Tensor) -> Tensor:
            return self.evaluate_network(x[a], x[b], out_like=x)

        processes = self._condition(batch, rows, inputs, compute_kernel)
        if processes.num_queries:
            raise DataError(
                f"gplvmf: got {processes.num_queries} held-out ratings in a batch of training, wanted whole users"
            )
        bound = 0.5 * processes.whitened.square().sum()
        bound = bound + processes.factor.diagonal(dim1=1, dim2=2).log().sum()
        bound = bound + batch.size * (self.scale.log() + 0.5 * math.log(2 * math.pi))
        counts = batch.dense[:, self.num_numbers :].to(bound)
        for name, count in zip(self.tables, counts.T, strict=True):
            squares = rows[f"{name}.{BIAS}"].double().square()[:, 0]
            bound = bound + (squares / (2 * BIAS_VARIANCE * count)).sum()
        if self.prior:
            warm_up = min(1.0, self.embeddings.step / WARM_UP_STEPS)
            for latent, count in zip(inputs, counts.T[1:], strict=False):
                divergence = latent.mean.square() + latent.variance - 1 - latent.variance.log()
                bound = bound + warm_up * (0.5 * divergence.sum(1) / count).sum()
        return bound

    def condition(self, batch: Batch) -> Processes:
        """Compute the processes of a batch's users under the expected kernel."""
        rows = self.embeddings(batch)
        inputs = self._read_inputs(batch, rows)

        def compute_kernel(a: Tensor, b: Tensor) -> Tensor:
            return math.prod(self._expect_factors(inputs, a, b), start=a.new_ones(()).double())

        return self._condition(batch, rows, inputs, compute_kernel)

    def forward(self, batch: Batch) -> Tensor:
        return self.predict_queries(self.condition(batch))

    def predict_queries(self, processes: Processes) -> Tensor:
        """Compute mean and standard deviation of the held-out ratings, (Q, 2) float64."""
        amplitude, noise = self._compute_variances()
        cross = amplitude * processes.kernel(processes.training, processes.queries)
        cross = cross * processes.has_rating[:, :, None]
        projected = torch.linalg.solve_triangular(processes.factor, cross, upper=False)
        mean = (projected * processes.whitened).sum(1) + processes.prior_mean[processes.queries]
        variance = (amplitude - projected.square().sum(1)).clamp_min(0.0) + noise
        columns = torch.stack([self.offset + self.scale * mean, self.scale * variance.sqrt()], 2)
        return _gather_queries(processes, columns)

    def measure_relevances(self, processes: Processes) -> Iterator[Tensor]:
        """Yield, for each item or context, 1 - its factor of the kernel of each held-out rating and the training
        ratings of its user, on average, (Q,); 0 without training ratings."""
        counts = processes.has_rating.sum(1, keepdim=True).clamp_min(1)
        samples = processes.queries, processes.training
        for factor in self._expect_factors(processes.inputs, *samples):
            changes = (1 - factor) * processes.has_rating[:, None]
            yield _gather_queries(processes, changes.sum(2) / counts)

    def _condition(
        self, batch: Batch, rows: Mapping[str, Tensor], inputs: Sequence[Inputs], kernel: Kernel
    ) -> Processes:
        """Compute the processes of a batch's users under a kernel of its samples."""
        biases = sum(rows[f"{name}.{BIAS}"].double() for name in self.tables)
        prior_mean = (self.mean.double() + biases)[:, 0]
        is_training = batch.dense[:, self.num_numbers].cpu() > 0
        num_queries = int((~is_training).sum())
        if batch.label is None or bool(is_training[:num_queries].any()):
            raise DataError(
                "gplvmf: got a batch without ratings, or with training ratings before held-out ones, wanted samples of "
                "data.options.group_by"
            )
        users, user_of_sample = batch.ids[next(iter(self.tables))].values.unique(
            return_inverse=True
        )
        training, has_rating, queries, has_query = (
            x.to(prior_mean.device)
            for part in (is_training, ~is_training)
            for x in _pad_by_user(user_of_sample, part.nonzero()[:, 0], len(users))
        )
        amplitude, noise = self._compute_variances()
        mask = has_rating.to(prior_mean)
        covariance = amplitude * kernel(training, training) * mask[:, :, None] * mask[:, None]
        covariance = covariance + torch.diag_embed(noise * mask + (1 - mask))
        factor, failures = torch.linalg.cholesky_ex(covariance)
        factor = torch.where((failures == 0)[:, None, None], factor, torch.nan)
        ratings = (batch.label[:, 0].to(prior_mean) - self.offset) / self.scale
        residual = torch.where(has_rating, (ratings - prior_mean)[training], 0.0)
        whitened = torch.linalg.solve_triangular(factor, residual[:, :, None], upper=False)
        return Processes(
            inputs,
            kernel,
            prior_mean,
            factor,
            whitened,
            training,
            has_rating,
            queries,
            has_query,
            num_queries,
        )

    def _read_inputs(self, batch: Batch, rows: Mapping[str, Tensor]) -> list[Inputs]:
        """Return the inputs of items and contexts, then of numbers."""
        inputs = []
        for name in self.latent_features:
            mean = rows[f"{name}.{MEAN}"].double()
            variance = FIRST_VARIANCE * rows[f"{name}.{LOG_VARIANCE}"].double().exp()
            variance = variance if self.prior else torch.zeros_like(mean)
            inputs.append(Inputs(mean, variance, batch.ids[name].values.to(mean.device)))
        numbers = batch.dense[:, : self.num_numbers].to(inputs[0].mean if inputs else self.offset)
        samples = torch.arange(batch.size, device=numbers.device)
        columns = numbers.split(1, dim=1) if self.num_numbers else ()
        return inputs + [Inputs(x, torch.zeros_like(x), samples) for x in columns]

    def _expect_factors(self, inputs: Sequence[Inputs], a: Tensor, b: Tensor) -> Iterator[Tensor]:
        """Yield each item's or context's factor of the expected kernel of samples (U, L) and (U, M), (U, L, M)."""
        relevances = self.log_relevance.double().exp().split(self.dims)
        for x, relevance in zip(inputs, relevances, strict=True):
            exponent: Any = 0.0
            for mean, variance, weight in zip(x.mean.T, x.variance.T, relevance, strict=True):
                spread = 1 + weight * (variance[a][:, :, None] + variance[b][:, None])
                difference = mean[a][:, :, None] - mean[b][:, None]
                exponent = exponent - 0.5 * (weight * difference.square() / spread + spread.log())
            is_same = x.ids[a][:, :, None] == x.ids[b][:, None]
            yield torch.where(is_same, 1.0, torch.exp(exponent))

    def _compute_variances(self) -> tuple[Tensor, Tensor]:
        """Return the variances of the processes and of the noise, in units of the variance of ratings."""
        return self.log_amplitude.double().exp(), self.log_noise.double().exp() + JITTER

    def _draw_noise(self, feature: str, ids: Tensor, dim: int) -> Tensor:
        """Draw this step's standard normals, (R, dim), which depend only on (seed, step, table, id, column)."""
        table = sorted(self.tables.values()).index(self.tables[feature])
        return draw_normals(stream_key(self.embeddings.seed, self.embeddings.step, table), ids, dim)


def _gather_queries(processes: Processes, values: Tensor) -> Tensor:
    """Return values of each user's held-out ratings, (U, most, ...), in the order of the batch, (Q, ...)."""
    gathered = values.new_empty(processes.num_queries, *values.shape[2:])
    gathered[processes.queries[processes.has_query]] = values[processes.has_query]
    return gathered


def draw_normals(key: int, ids: Tensor, dim: int) -> Tensor:
    """Draw a standard normal vector for each id, (R, dim) float64, that depends only on (key, id, column).

    Box and Muller's method on two words of the stream `key`."""
    positions = ids.numpy().astype(np.uint64)[:, None] * np.uint64(2 * dim)
    words = read_words(key, positions + np.arange(2 * dim, dtype=np.uint64))
    uniform = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
    radius = np.sqrt(-2 * np.log1p(-uniform[:, :dim]))
    return torch.from_numpy(radius * np.cos(2 * np.pi * uniform[:, dim:]))


def _pad_by_user(user_of_sample: Tensor, samples: Tensor, num_users: int) -> tuple[Tensor, Tensor]:
    """Return the `samples` of each user, (U, most), padded with sample 0, and which of these are samples."""
    users = user_of_sample[samples]
    order = users.argsort(stable=True)
    counts = torch.bincount(users, minlength=num_users)
    is_sample = torch.arange(int(counts.max()) if num_users else 0) < counts[:, None]
    padded = torch.zeros(is_sample.shape, dtype=torch.int64)
    padded[is_sample] = samples[order]
    return padded, is_sample
