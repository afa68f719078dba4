"""GPLVMF (Huang and Xu 2019): each user's ratings are a Gaussian process over learned vectors of items and contexts.

GPFM (Nguyen et al. 2014) is the same without the prior of these vectors. Both are exact: a user's marginal likelihood
and predictions come from a Cholesky factor of its ratings' covariance. The bound, with one draw of the vectors for each
step, was derived from the papers' abstracts and the code of GPFM.

Legend: R samples of a batch, U users in it, L most training ratings of one of them, Q held-out ratings, D width of a
latent vector, X inputs of the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
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
        contexts = [f"relevance_{name}" for name in (*model.latent_dims, *numbers)]

        def measure(batch: Batch) -> Mapping[str, Tensor]:
            posterior = model.condition(batch)
            assert batch.label is not None
            label = batch.label[: posterior.num_queries, 0].double()
            mean, sd = (column.cpu() for column in model.predict_queries(posterior).T)
            error = label - mean
            density = sd.log() + 0.5 * (error / sd).square() + 0.5 * math.log(2 * math.pi)
            values = [error.square(), error.abs(), density, *model.measure_relevances(posterior)]
            is_labelled = label.isfinite()
            names = ("mse", "mae", "nlpd", *contexts)
            return {
                name: value.cpu()[is_labelled] for name, value in zip(names, values, strict=True)
            }

        with evaluation_mode(model):
            names = ("mse", "mae", "nlpd", *contexts)
            averages = average_metrics(measure, names, source, batch_size, mesh)
        return {"rmse": math.sqrt(averages.pop("mse")), **averages}

    def predict(self, model: GPLVMF, batch: Batch) -> Tensor:
        """Return mean and standard deviation of the ratings of a batch's held-out samples, which come first, (Q, 2)
        float64. The deviation includes the noise of ratings."""
        return model.predict_queries(model.condition(batch))


@dataclass(frozen=True, slots=True)
class Posterior:
    """Processes of a batch's users, given their training ratings."""

    inputs: Tensor  # (R, X), scaled: the kernel is of their distances
    prior_mean: Tensor  # (R,) in units of `GPLVMF.scale`, from `GPLVMF.offset` on
    factor: Tensor  # (U, L, L) Cholesky factors
    whitened: Tensor  # (U, L, 1): factor^-1 (ratings - prior mean)
    training: tuple[Tensor, Tensor]  # (U, L) samples, and which of them are there
    queries: tuple[Tensor, Tensor]
    num_queries: int


class GPLVMF(SplitModel):
    """Gaussian process of each user over latent vectors, with biases of users, items and contexts in its mean.

    The first feature is the user, the others are items and contexts: their tables have the parts mean (D), log_variance
    (D) and bias (1), the user's has bias (1). Samples are those of `data.ratings`: dense columns are real-valued
    contexts, which enter the kernel as they are, then a count for each feature. All users share the relevances of the
    kernel's inputs, its amplitude and the noise. prior: latent vectors have the prior N(0, 1), of which a step draws one
    vector for each id; without, they are learned by maximum likelihood (GPFM).
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
        self.features = [feature.name for feature in features]
        dims = find_field_dims(tables, features[1:], MEAN)
        self.latent_dims = {name.removesuffix(f".{MEAN}"): dim for name, dim in dims.items()}
        find_field_dims(tables, features, BIAS)
        self.num_numbers = num_dense - len(features)
        if self.num_numbers < 0:
            raise ConfigError(
                f"gplvmf: got {num_dense} dense columns for {len(features)} features, wanted a count for each: group "
                "the data by user with data.options.group_by"
            )
        self.embeddings = EmbeddingCollection(tables, features, seed=seed)
        self.tables = {feature.name: feature.table for feature in features}
        self.prior = prior
        num_inputs = sum(dims.values()) + self.num_numbers
        first = torch.full((num_inputs,), -0.5 * math.log(max(num_inputs, 1)))
        self.log_relevance = nn.Parameter(first)
        self.log_amplitude = nn.Parameter(torch.zeros(()))
        self.log_noise = nn.Parameter(torch.zeros(()))
        self.mean = nn.Parameter(torch.zeros(()))
        self.offset: Tensor
        self.scale: Tensor
        self.register_buffer("offset", torch.zeros((), dtype=torch.float64))
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))

    def fit_scale(self, label: Tensor, mesh: Mesh) -> None:
        """Set offset and scale to mean and standard deviation of all ranks' ratings. Collective."""
        y = label.double()
        sums = torch.stack([torch.tensor(float(y.numel())).double(), y.sum(), y.square().sum()])
        count, total, squares = mesh.all_reduce("dense", sums.cpu()).tolist()
        mean = total / max(count, 1.0)
        self.offset.fill_(mean)
        self.scale.fill_(math.sqrt(max(squares / max(count, 1.0) - mean**2, 0.0)) or 1.0)

    def network(self, a: Tensor, b: Tensor) -> Tensor:
        """Compute exp(-distance^2 / 2) of all pairs: (U, L, X), (U, M, X) -> (U, L, M)."""
        squares = a.square().sum(2)[:, :, None] + b.square().sum(2)[:, None]
        return torch.exp(torch.clamp_max(a @ b.transpose(1, 2) - 0.5 * squares, 0.0))

    def compute_negative_bound(self, batch: Batch) -> Tensor:
        """Compute the sum over a batch's users of the negative log marginal likelihood, plus its share of the penalties:
        an id's are divided among all its training ratings."""
        rows = self.embeddings(batch)
        posterior = self._condition(batch, rows, is_drawn=self.prior)
        likelihood = 0.5 * posterior.whitened.square().sum()
        likelihood = likelihood + posterior.factor.diagonal(dim1=1, dim2=2).log().sum()
        constant = batch.size * (self.scale.log() + 0.5 * math.log(2 * math.pi))
        counts = batch.dense[:, self.num_numbers :].to(likelihood)
        warm_up = min(1.0, self.embeddings.step / WARM_UP_STEPS)
        penalty = likelihood.new_zeros(())
        for name, count in zip(self.features, counts.T, strict=True):
            squares = rows[f"{name}.{BIAS}"].double().square()[:, 0]
            penalty = penalty + (squares / (2 * BIAS_VARIANCE * count)).sum()
            if self.prior and name in self.latent_dims:
                mean, variance = self._read_latents(rows, name)
                divergence = 0.5 * (mean.square() + variance - 1 - variance.log()).sum(1)
                penalty = penalty + warm_up * (divergence / count).sum()
        return likelihood + constant + penalty

    def condition(self, batch: Batch) -> Posterior:
        """Compute the processes of a batch's users at the mean of the latent vectors."""
        return self._condition(batch, self.embeddings(batch), is_drawn=False)

    def forward(self, batch: Batch) -> Tensor:
        return self.predict_queries(self.condition(batch))

    def predict_queries(self, posterior: Posterior) -> Tensor:
        """Compute mean and standard deviation of the held-out ratings, (Q, 2) float64."""
        queries, has_query = posterior.queries
        cross = self._compute_covariance(posterior, posterior.queries)  # (U, L, most queries)
        projected = torch.linalg.solve_triangular(posterior.factor, cross, upper=False)
        mean = (projected * posterior.whitened).sum(1) + posterior.prior_mean[queries]
        amplitude, noise = self._compute_variances()
        variance = (amplitude - projected.square().sum(1)).clamp_min(0.0) + noise
        columns = torch.stack([self.offset + self.scale * mean, self.scale * variance.sqrt()], 2)
        predictions = columns.new_empty(posterior.num_queries, 2)
        predictions[queries[has_query]] = columns[has_query]
        return predictions

    def measure_relevances(self, posterior: Posterior) -> Iterator[Tensor]:
        """Yield, for each item or context, 1 - its factor of the covariance of each held-out rating with the training
        ratings of its user, on average, (Q,); 0 without training ratings."""
        training, has_rating = posterior.training
        queries, has_query = posterior.queries
        dims = [*self.latent_dims.values(), *[1] * self.num_numbers]
        for inputs in posterior.inputs.split(dims, dim=1):
            changes = (1 - self.network(inputs[queries], inputs[training])) * has_rating[:, None]
            means = changes.sum(2) / has_rating.sum(1, keepdim=True).clamp_min(1)
            relevance = means.new_empty(posterior.num_queries)
            relevance[queries[has_query]] = means[has_query]
            yield relevance

    def _condition(self, batch: Batch, rows: Mapping[str, Tensor], *, is_drawn: bool) -> Posterior:
        """Compute the processes of a batch's users; is_drawn: at a draw of the latent vectors, else at their mean."""
        prior_mean = self.mean.double() + sum(rows[f"{f}.{BIAS}"].double() for f in self.features)
        prior_mean = prior_mean[:, 0]
        inputs = [self._read_inputs(batch, rows, name, is_drawn) for name in self.latent_dims]
        inputs.append(batch.dense[:, : self.num_numbers].to(prior_mean))
        is_training = batch.dense[:, self.num_numbers].cpu() > 0
        users, user_of_sample = batch.ids[self.features[0]].values.unique(return_inverse=True)
        training, has_rating = (
            x.to(prior_mean.device)
            for x in _pad_by_user(user_of_sample, is_training.nonzero()[:, 0], len(users))
        )
        queries = _pad_by_user(user_of_sample, (~is_training).nonzero()[:, 0], len(users))
        num_queries = int((~is_training).sum())
        if bool(is_training[:num_queries].any()):
            raise DataError("gplvmf: got training ratings before held-out ones, wanted these first")
        x = torch.cat(inputs, 1) * (0.5 * self.log_relevance.double()).exp()
        amplitude, noise = self._compute_variances()
        mask = has_rating.to(x)
        covariance = amplitude * self.evaluate_network(x[training], x[training], out_like=x)
        covariance = covariance * mask[:, :, None] * mask[:, None]
        covariance = covariance + torch.diag_embed(noise * mask + (1 - mask))
        factor, failures = torch.linalg.cholesky_ex(covariance)
        factor = torch.where((failures == 0)[:, None, None], factor, torch.nan)
        assert batch.label is not None
        ratings = (batch.label[:, 0].to(x) - self.offset) / self.scale
        residual = torch.where(has_rating, (ratings - prior_mean)[training], 0.0)
        whitened = torch.linalg.solve_triangular(factor, residual[:, :, None], upper=False)
        return Posterior(
            x,
            prior_mean,
            factor,
            whitened,
            (training, has_rating),
            (queries[0].to(x.device), queries[1].to(x.device)),
            num_queries,
        )

    def _compute_variances(self) -> tuple[Tensor, Tensor]:
        """Return the variances of the processes and of the noise, in units of the variance of ratings."""
        return self.log_amplitude.double().exp(), self.log_noise.double().exp() + JITTER

    def _compute_covariance(self, posterior: Posterior, samples: tuple[Tensor, Tensor]) -> Tensor:
        """Compute the covariances of each user's training ratings with its `samples`, (U, L, most samples)."""
        training, has_rating = posterior.training
        x = posterior.inputs
        kernel = self.evaluate_network(x[training], x[samples[0]], out_like=x)
        return self._compute_variances()[0] * kernel * has_rating[:, :, None]

    def _read_latents(self, rows: Mapping[str, Tensor], feature: str) -> tuple[Tensor, Tensor]:
        """Return means and variances of a feature's latent vectors, (R, D) float64 each."""
        variance = FIRST_VARIANCE * rows[f"{feature}.{LOG_VARIANCE}"].double().exp()
        return rows[f"{feature}.{MEAN}"].double(), variance

    def _read_inputs(
        self, batch: Batch, rows: Mapping[str, Tensor], feature: str, is_drawn: bool
    ) -> Tensor:
        """Return a feature's latent vectors, (R, D) float64: their means, or this step's draw, which depends only on
        (seed, step, table, id, column)."""
        mean, variance = self._read_latents(rows, feature)
        if not is_drawn:
            return mean
        names = sorted(set(self.tables.values()))
        key = stream_key(
            self.embeddings.seed, self.embeddings.step, names.index(self.tables[feature])
        )
        noise = draw_normals(key, batch.ids[feature].values, mean.shape[1])
        return mean + variance.sqrt() * noise.to(mean)


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
