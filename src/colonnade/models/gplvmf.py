"""GPLVMF (Huang and Xu 2019): each user's ratings are a Gaussian process over learned vectors of items and contexts.

GPFM (Nguyen et al. 2014) is the same without the prior of these vectors. Both are exact: a user's marginal likelihood
and predictions come from a Cholesky factor of its ratings' covariance. The bound, with one draw of the vectors for each
step, was derived from the papers' abstracts and the code of GPFM.

Legend: R samples of a batch, Q held out, U users in it, T most samples of one of them, D width of a latent vector, X
inputs of the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
WARM_UP_STEPS = 300
"""Number of steps over which the weight of the latent prior grows to 1. At full weight from the start, vectors collapse
to the prior before they have learned anything."""
JITTER = 1e-6
"""Least variance of noise, in units of the variance of ratings."""

Input = tuple[str, Tensor, Tensor, Tensor]
"""Inputs of the kernel of one item or context: its name, or "" for a number; means and variances (R, D), ids (R,)."""


class MarginalLikelihood:
    """Objective of `GPLVMF`: the negative bound of the log marginal likelihood per training rating; metrics of the
    ratings that it holds out."""

    monitor = "rmse"
    metrics = ("rmse", "mae", "nlpd")
    outputs = ("mean", "sd")

    def loss(self, model: GPLVMF, batch: Batch, mesh: Mesh) -> Tensor:
        """Compute this rank's part of the bound. The first batch sets mean and scale of ratings. Collective."""
        if batch.label is None or batch.label.shape[1] != 1 or model.find_held_out(batch).any():
            raise DataError(
                "gplvmf: got a batch without one label, or with held-out ratings, wanted all training ratings of its "
                "users: group the data with data.options.group_by"
            )
        if model.embeddings.step == 0 and not model.is_scaled:
            model.fit_scale(batch.label, mesh)
        return model.compute_negative_bound(batch) / max(batch.world_weight, 1e-12)

    def evaluate(
        self, model: GPLVMF, source: Source, batch_size: int, mesh: Mesh
    ) -> dict[str, float]:
        """Compute the metrics over the held-out ratings of `source`. Collective; changes nothing.

        nlpd is the negative log density of a rating. `relevance_NAME` of an item or context is the mean, over pairs of
        a held-out and a training rating of one user, of 1 - its factor of their covariance: 0 if the context changes
        nothing, near 1 if ratings in other contexts say nothing; 0 for a user without training ratings.
        """
        numbers = [name for name in source.schema.dense if not name.startswith(COUNT)]
        contexts = [f"relevance_{name}" for name in (*model.latent_dims, *numbers)]
        names = ("mse", "mae", "nlpd", *contexts)

        def measure(batch: Batch) -> Mapping[str, Tensor]:
            assert batch.label is not None
            is_measured = model.find_held_out(batch) & batch.label[:, 0].cpu().isfinite()
            mean, sd, *relevances = model(batch).cpu()[is_measured].T
            error = batch.label[:, 0].cpu().double()[is_measured] - mean
            density = sd.log() + 0.5 * (error / sd).square() + 0.5 * math.log(2 * math.pi)
            values = (error.square(), error.abs(), density, *relevances)
            return dict(zip(names, values, strict=True))

        with evaluation_mode(model):
            averages = average_metrics(measure, names, source, batch_size, mesh)
        return {"rmse": math.sqrt(averages.pop("mse")), **averages}

    def predict(self, model: GPLVMF, batch: Batch) -> Tensor:
        """Return mean and standard deviation of the ratings of a batch's held-out samples, (Q, 2) float64. The
        deviation includes the noise of ratings."""
        return model(batch)[model.find_held_out(batch), :2]


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
        find_field_dims(tables, features, BIAS)
        dims = find_field_dims(tables, features[1:], MEAN)
        self.latent_dims = {name.removesuffix(f".{MEAN}"): dim for name, dim in dims.items()}
        self.num_numbers = num_dense - len(features)
        if self.num_numbers < 0:
            raise ConfigError(
                f"gplvmf: got {num_dense} dense columns for {len(features)} features, wanted a count for each: group "
                "the data by user with data.options.group_by"
            )
        self.embeddings = EmbeddingCollection(tables, features, seed=seed)
        self.tables = {feature.name: feature.table for feature in features}
        if len({*self.tables.values()}) < len(features):
            raise ConfigError(
                f"gplvmf: got the tables {', '.join(self.tables.values())} of {', '.join(self.tables)}, wanted a table "
                "of its own for each: leave out `table` in the schema"
            )
        self.prior = prior
        num_inputs = sum(dims.values()) + self.num_numbers
        start = torch.full((num_inputs,), -0.5 * math.log(max(num_inputs, 1)))
        self.log_relevance = nn.Parameter(start)
        self.log_amplitude = nn.Parameter(torch.zeros(()))
        self.log_noise = nn.Parameter(torch.zeros(()))
        self.mean = nn.Parameter(torch.zeros(()))
        self.offset: Tensor
        self.scale: Tensor
        self.register_buffer("offset", torch.zeros((), dtype=torch.float64))
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))
        self.is_scaled = False

    def fit_scale(self, label: Tensor, mesh: Mesh) -> None:
        """Set offset and scale to mean and standard deviation of all ranks' ratings. Collective."""
        y = label.double()
        sums = torch.stack([y.new_tensor(y.numel()), y.sum(), y.square().sum()])
        count, total, squares = mesh.all_reduce("dense", sums.cpu()).tolist()
        mean = total / max(count, 1.0)
        self.offset.fill_(mean)
        self.is_scaled = True
        self.scale.fill_(math.sqrt(max(squares / max(count, 1.0) - mean**2, 0.0)) or 1.0)

    def find_held_out(self, batch: Batch) -> Tensor:
        """Return which samples are held out, (R,) bool on the CPU: no training rating has their ids counted."""
        return batch.dense[:, self.num_numbers].cpu() == 0

    def network(self, x: Tensor) -> Tensor:
        """Compute exp(-distance^2 / 2) of all pairs: (U, T, X) -> (U, T, T)."""
        squares = 0.5 * x.square().sum(2)
        exponent = x @ x.transpose(1, 2) - squares[:, :, None] - squares[:, None]
        return torch.exp(torch.clamp_max(exponent, 0.0))

    def compute_negative_bound(self, batch: Batch) -> Tensor:
        """Compute the sum over a batch's users of the negative log marginal likelihood, and of the penalties of their
        ids: an id's penalty is divided among all its training ratings."""
        rows = self.embeddings(batch)
        inputs = self._read_inputs(batch, rows)
        x = torch.cat([self._draw_vectors(*x) for x in inputs], 1)
        x = x * (0.5 * self.log_relevance.double()).exp()
        samples, is_sample = self._pad_by_user(batch, x.device)
        kernel = self.evaluate_network(x[samples], out_like=x)
        _, factor, whitened = self._condition(batch, rows, kernel, samples, is_sample)
        bound = 0.5 * whitened.square().sum() + factor.diagonal(dim1=1, dim2=2).log().sum()
        bound = bound + batch.size * (self.scale.log() + 0.5 * math.log(2 * math.pi))
        counts = batch.dense[:, self.num_numbers :].to(bound)
        for name, count in zip(self.tables, counts.T, strict=True):
            squares = rows[f"{name}.{BIAS}"].double().square()[:, 0]
            bound = bound + (squares / (2 * BIAS_VARIANCE * count)).sum()
        warm_up = min(1.0, self.embeddings.step / WARM_UP_STEPS)
        for (_, mean, variance, _), count in zip(inputs, counts.T[1:], strict=False):
            if self.prior:
                divergence = 0.5 * (mean.square() + variance - 1 - variance.log()).sum(1)
                bound = bound + warm_up * (divergence / count).sum()
        return bound

    def forward(self, batch: Batch) -> Tensor:
        """Compute mean and standard deviation of ratings, and the relevance of each item and context for them, (R, 2 +
        contexts) float64."""
        rows = self.embeddings(batch)
        inputs = self._read_inputs(batch, rows)
        samples, is_sample = self._pad_by_user(batch, self.offset.device)
        factors = self._expect_factors(inputs, samples)
        kernel = math.prod(factors, start=self.scale.new_ones(*samples.shape, samples.shape[1]))
        mask, factor, whitened = self._condition(batch, rows, kernel, samples, is_sample)
        amplitude, noise = self._compute_variances()
        cross = amplitude * kernel * mask[:, :, None]
        projected = torch.linalg.solve_triangular(factor, cross, upper=False)
        mean = (projected * whitened).sum(1) + self._compute_prior_mean(rows)[samples]
        variance = (amplitude - projected.square().sum(1)).clamp_min(0.0) + noise
        counts = mask.sum(1, keepdim=True).clamp_min(1)
        relevances = [((1 - f) * mask[:, None]).sum(2) / counts for f in factors]
        columns = [self.offset + self.scale * mean, self.scale * variance.sqrt(), *relevances]
        outputs = mean.new_empty(batch.size, len(columns))
        outputs[samples[is_sample]] = torch.stack(columns, 2)[is_sample]
        return outputs

    def _condition(
        self,
        batch: Batch,
        rows: Mapping[str, Tensor],
        kernel: Tensor,
        samples: Tensor,
        is_sample: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return, for each user, which samples are training ratings (U, T), the Cholesky factor of their covariance,
        (U, T, T) with ones for other samples, and factor^-1 (ratings - prior mean), (U, T, 1)."""
        if batch.label is None:
            raise DataError("gplvmf: got a batch without ratings, wanted those of its users")
        is_training = is_sample & ~self.find_held_out(batch).to(samples.device)[samples]
        mask = is_training.to(kernel)
        amplitude, noise = self._compute_variances()
        covariance = amplitude * kernel * mask[:, :, None] * mask[:, None]
        covariance = covariance + torch.diag_embed(noise * mask + (1 - mask))
        factor, failures = torch.linalg.cholesky_ex(covariance)
        factor = torch.where((failures == 0)[:, None, None], factor, torch.nan)
        ratings = (batch.label[:, 0].to(kernel) - self.offset) / self.scale
        residual = (ratings - self._compute_prior_mean(rows))[samples]
        residual = torch.where(is_training, residual, 0.0)[:, :, None]
        return mask, factor, torch.linalg.solve_triangular(factor, residual, upper=False)

    def _pad_by_user(self, batch: Batch, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the samples of each user, (U, T), padded with sample 0, and which of these are samples."""
        users = batch.ids[next(iter(self.tables))].values.unique(return_inverse=True)[1]
        counts = torch.bincount(users)
        is_sample = torch.arange(int(counts.max()) if batch.size else 0) < counts[:, None]
        samples = torch.zeros(is_sample.shape, dtype=torch.int64)
        samples[is_sample] = users.argsort(stable=True)
        return samples.to(device), is_sample.to(device)

    def _compute_prior_mean(self, rows: Mapping[str, Tensor]) -> Tensor:
        """Compute the mean of the processes at each sample, (R,), in units of the scale of ratings."""
        return self.mean.double() + sum(rows[f"{f}.{BIAS}"][:, 0].double() for f in self.tables)

    def _compute_variances(self) -> tuple[Tensor, Tensor]:
        """Return the variances of the processes and of the noise, in units of the variance of ratings."""
        return self.log_amplitude.double().exp(), self.log_noise.double().exp() + JITTER

    def _read_inputs(self, batch: Batch, rows: Mapping[str, Tensor]) -> list[Input]:
        """Return the inputs of items and contexts, then of numbers, float64."""
        inputs: list[Input] = []
        counts = batch.dense[:, self.num_numbers + 1 :].to(self.offset)
        for name, count in zip(self.latent_dims, counts.T, strict=True):
            mean = rows[f"{name}.{MEAN}"].double()
            variance = torch.zeros_like(mean)
            if self.prior:
                variance = FIRST_VARIANCE * rows[f"{name}.{LOG_VARIANCE}"].double().exp()
                # Rows of ids without training ratings are random; these ids have the prior.
                is_new = count[:, None] == 0
                mean, variance = mean.masked_fill(is_new, 0.0), variance.masked_fill(is_new, 1.0)
            inputs.append((name, mean, variance, batch.ids[name].values))
        numbers = batch.dense[:, : self.num_numbers].to(self.offset)
        samples = torch.arange(batch.size)
        return inputs + [("", x[:, None], torch.zeros_like(x)[:, None], samples) for x in numbers.T]

    def _expect_factors(self, inputs: Sequence[Input], samples: Tensor) -> list[Tensor]:
        """Compute each item's or context's factor of the expected kernel of all pairs of a user's samples, (U, T, T).

        Samples with one id have one vector, so their factor is 1."""
        factors = []
        relevances = self.log_relevance.double().exp().split([x[1].shape[1] for x in inputs])
        for (_, means, variances, ids), relevance in zip(inputs, relevances, strict=True):
            exponent: Any = 0.0
            for mean, variance, weight in zip(means.T, variances.T, relevance, strict=True):
                spread = 1 + weight * (variance[samples][:, :, None] + variance[samples][:, None])
                difference = mean[samples][:, :, None] - mean[samples][:, None]
                exponent = exponent - 0.5 * (weight * difference.square() / spread + spread.log())
            padded = ids.to(samples.device)[samples]
            is_same = padded[:, :, None] == padded[:, None]
            factors.append(torch.where(is_same, 1.0, torch.exp(exponent)))
        return factors

    def _draw_vectors(self, name: str, mean: Tensor, variance: Tensor, ids: Tensor) -> Tensor:
        """Draw this step's vectors of an input, (R, D), by (seed, step, table, id, column), or the mean of
        a number, and without a prior."""
        if not (self.prior and name):
            return mean
        table = sorted(self.tables.values()).index(self.tables[name])
        key = stream_key(self.embeddings.seed, self.embeddings.step, table)
        return mean + variance.sqrt() * draw_normals(key, ids, mean.shape[1]).to(mean)


def draw_normals(key: int, ids: Tensor, dim: int) -> Tensor:
    """Draw a standard normal vector for each id, (R, dim) float64, that depends only on (key, id, column).

    Box and Muller's method on two words of the stream `key`."""
    positions = ids.numpy().astype(np.uint64)[:, None] * np.uint64(2 * dim)
    words = read_words(key, positions + np.arange(2 * dim, dtype=np.uint64))
    uniform = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
    radius = np.sqrt(-2 * np.log1p(-uniform[:, :dim]))
    return torch.from_numpy(radius * np.cos(2 * np.pi * uniform[:, dim:]))
