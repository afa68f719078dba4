"""What a model is trained for and how it is scored."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, logsigmoid

from colonnade.batch import Batch, Ids
from colonnade.comm.collectives import gather
from colonnade.comm.mesh import Mesh
from colonnade.data.contract import Source
from colonnade.data.sets.triples import Known
from colonnade.errors import ConfigError, DataError
from colonnade.models.knowledge import KnowledgeGraph, Links
from colonnade.models.retriever import Contrast, Retriever
from colonnade.train.link_prediction import HITS, evaluate_links
from colonnade.train.metrics import evaluate
from colonnade.train.retrieval import PLACES, evaluate_retrieval


class Objective(Protocol):
    """Stateless: what is learned lives in the model."""

    monitor: str
    """Metric that chooses the best step unless `train.monitor` names another; more is better unless its name has loss,
    entropy, error or mean rank in it. An objective may have `metrics` too: names that `train.monitor` may have, which
    are then checked before training."""

    def loss(self, model: nn.Module, batch: Batch, mesh: Mesh) -> Tensor:
        """This rank's part of the mean over the global batch: the ranks' losses add up to it."""
        ...

    def evaluate(
        self, model: nn.Module, source: Source, batch_size: int, mesh: Mesh
    ) -> dict[str, float]:
        """Collective: metrics of one pass over `source`, the same on every rank; no trace on the run."""
        ...


class Probability:
    """`model(batch)` gives one logit per label, (B, tasks), of its being 1: binary cross entropy."""

    monitor = "auc"
    metrics = ("auc", "log_loss", "normalized_entropy", "expected_calibration_error", "group_auc")

    def loss(self, model: nn.Module, batch: Batch, mesh: Mesh) -> Tensor:
        return weighted_loss(model(batch), batch)

    def evaluate(
        self, model: nn.Module, source: Source, batch_size: int, mesh: Mesh
    ) -> dict[str, float]:
        return evaluate(model, source, batch_size, mesh)


class Retrieval:
    """The model is a `Retriever`: softmax cross entropy of each positive against candidates of all ranks."""

    monitor = "ndcg@20"
    metrics = tuple(f"{metric}@{k}" for k in PLACES for metric in ("recall", "ndcg"))

    def loss(self, model: nn.Module, batch: Batch, mesh: Mesh) -> Tensor:
        assert isinstance(model, Retriever)
        return contrastive_loss(model(batch), model.temperature, mesh)

    def evaluate(
        self, model: nn.Module, source: Source, batch_size: int, mesh: Mesh
    ) -> dict[str, float]:
        assert isinstance(model, Retriever)
        return evaluate_retrieval(model, source, batch_size, mesh)


class LinkPrediction:
    """The model is a `KnowledgeGraph`: each true triple against wrong ones, whose head or tail is any candidate."""

    monitor = "mrr"
    metrics = ("mrr", *(f"hits@{k}" for k in HITS), "mean rank")

    def loss(self, model: nn.Module, batch: Batch, mesh: Mesh) -> Tensor:
        assert isinstance(model, KnowledgeGraph) and isinstance(batch.key, Known)
        return link_loss(model, model(batch), batch.key, mesh)

    def evaluate(
        self, model: nn.Module, source: Source, batch_size: int, mesh: Mesh
    ) -> dict[str, float]:
        assert isinstance(model, KnowledgeGraph)
        return evaluate_links(model, source, batch_size, mesh)


def objective_of(model: nn.Module) -> Objective:
    """What a model of colonnade.models is trained for."""
    if isinstance(model, KnowledgeGraph):
        return LinkPrediction()
    return Retrieval() if isinstance(model, Retriever) else Probability()


def contrastive_loss(contrast: Contrast, temperature: float, mesh: Mesh) -> Tensor:
    """Collective, and its backward too. This rank's part of the weighted mean over all ranks' positions.

    At each position: -log of the positive's share in the softmax over it and all candidates that its sample has not
    taken. Scores are products over `temperature`, less the log of how often an item is drawn.
    """
    queries = contrast.queries
    candidates = gather(mesh, contrast.candidates)
    ids = gather(mesh, contrast.candidate_ids)
    log_q = gather(mesh, contrast.candidate_log_q).to(queries)
    weight = contrast.weight.to(queries)
    total = mesh.all_reduce("dense", contrast.weight.sum(dtype=torch.float64))
    positive = (queries * contrast.positives).sum(1, keepdim=True) / temperature
    positive = positive - contrast.positive_log_q.to(queries)[:, None]
    others = queries @ candidates.T / temperature - log_q
    others = others.masked_fill(is_taken(contrast, ids).to(queries.device), float("-inf"))
    losses = torch.cat([positive, others], dim=1).logsumexp(1) - positive[:, 0]
    return (losses * weight).sum() / max(float(total), 1e-12)


def link_loss(model: KnowledgeGraph, links: Links, known: Known, mesh: Mesh) -> Tensor:
    """Collective, and its backward too. This rank's part of the weighted mean over all ranks' triples.

    Of both questions of a triple the mean of what `model.loss` says, against all ranks' candidates that are not known
    to be true, and the penalty of the triple's own vectors.
    """
    candidates = gather(mesh, links.candidates)
    ids = gather(mesh, links.candidate_ids)
    total = mesh.all_reduce("dense", links.weight.sum(dtype=torch.float64))
    losses = []
    for queries, answers, true in (
        (links.toward_tail, links.tails, known.tails),
        (links.toward_head, links.heads, known.heads),
    ):
        right, wrong = model.run(queries, queries, answers, candidates)
        out = among(true, ids).to(wrong.device)
        if model.loss == "sigmoid":
            losses.append(true_or_wrong(right, wrong, out, model.temperature))
        else:
            assert model.num_entities is not None and true.offsets is not None
            all_wrong = (model.num_entities - true.offsets.diff()).to(wrong)
            losses.append(which_of_all(right, wrong, out, all_wrong, model.temperature))
    each = (losses[0] + losses[1]) / 2 + links.penalty
    return (each * links.weight.to(each)).sum() / max(float(total), 1e-12)


def true_or_wrong(right: Tensor, wrong: Tensor, out: Tensor, temperature: float) -> Tensor:
    """Scores right (P,) and wrong (P, M), but those that are `out` -> (P,): the mean of -log sigmoid(right) and of
    -log sigmoid(-wrong), weighed by the softmax of the wrong ones (Sun et al. 2019, equations 5 and 6)."""
    share = (wrong.detach() * temperature).masked_fill(out, float("-inf")).softmax(1)
    share = share.nan_to_num()  # where no candidate is wrong
    return -(logsigmoid(right) + (share * logsigmoid(-wrong)).sum(1)) / 2


def which_of_all(
    right: Tensor, wrong: Tensor, out: Tensor, all_wrong: Tensor, temperature: float
) -> Tensor:
    """Scores right (P,) and wrong (P, M), but those that are `out` -> (P,): -log of the answer's share in the softmax
    over it and all wrong entities, `all_wrong` (P,) in number, of which the wrong ones here are a sample, each standing
    for as many (sampled softmax: Bengio and Senecal 2003; of links: Ruffinelli et al. 2020)."""
    drawn = (out.shape[1] - out.count_nonzero(1)).clamp(min=1)
    weight = (all_wrong / drawn).log()
    # One pass over the scores for each line; cross entropy has all of the softmax in two.
    others = torch.add(weight[:, None], wrong, alpha=temperature).masked_fill_(out, float("-inf"))
    logits = torch.cat([right[:, None] * temperature, others], 1)
    return cross_entropy(logits, torch.zeros_like(drawn), reduction="none")


def weighted_loss(logits: Tensor, batch: Batch) -> Tensor:
    """Binary cross entropy; this rank's part of the mean over the global batch: the ranks' losses add up to it.

    logits (B, tasks), batch.label (B, tasks). A NaN label is one nobody knows: it adds nothing, and the divisor, the
    batch's weight times its tasks, does not depend on how many there are. Raises ConfigError, DataError where they
    do not fit.
    """
    if batch.label is None:
        raise DataError("the batch has no label; training needs one column of labels per task")
    if logits.shape != batch.label.shape:
        raise ConfigError(
            f"got logits {tuple(logits.shape)} for labels {tuple(batch.label.shape)}; "
            "the model's tasks and the data's label columns must agree"
        )
    if bool(((batch.label < 0) | (batch.label > 1)).any()):  # NaN is neither
        raise DataError(
            f"got labels from {batch.label.nan_to_num().min():g} to {batch.label.nan_to_num().max():g}, wanted 0 to 1 "
            "for cross entropy; make labels of numbers with `at_least`, or pass a loss of your own to colonnade.fit"
        )
    label = batch.label.to(logits)
    weight = None if batch.sample_weight is None else batch.sample_weight[:, None].to(logits)
    unknown = label.isnan()
    if bool(unknown.any()):
        known = ~unknown
        weight = None if weight is None else weight.expand_as(label)[known]
        logits_known, label = logits[known], label[known]
    else:
        logits_known = logits
    total = binary_cross_entropy_with_logits(logits_known, label, weight=weight, reduction="sum")
    return total / max(batch.world_weight * logits.shape[1], 1e-12)


def is_taken(contrast: Contrast, candidate_ids: Tensor) -> Tensor:
    """candidate_ids (M,) -> (P, M) bool: which of them each position's sample has taken."""
    num_samples = int(contrast.sample[-1]) + 1 if len(contrast.sample) else 0
    return _marks(*contrast.taken, num_samples, candidate_ids)[contrast.sample]


def among(bags: Ids, candidate_ids: Tensor) -> Tensor:
    """candidate_ids (M,) -> (B, M) bool: which of them are in each sample's bag."""
    assert bags.offsets is not None
    counts = bags.offsets.diff()
    samples = torch.repeat_interleave(torch.arange(len(counts)), counts)
    return _marks(samples, bags.values, len(counts), candidate_ids)


def _marks(samples: Tensor, items: Tensor, num_samples: int, candidate_ids: Tensor) -> Tensor:
    """Pairs (sample, item) -> (num_samples, M) bool."""
    found = torch.zeros(num_samples, len(candidate_ids), dtype=torch.bool)
    ids, order = candidate_ids.sort()
    first = torch.searchsorted(ids, items)
    # Of few of the items there is a candidate; the second search is for those alone.
    hits = (ids[first.clamp(max=len(ids) - 1)] == items).nonzero()[:, 0] if len(ids) else first[:0]
    first = first[hits]
    counts = torch.searchsorted(ids, items[hits], right=True) - first
    at = torch.arange(int(counts.sum())) + (first - counts.cumsum(0) + counts).repeat_interleave(
        counts
    )
    found[samples[hits].repeat_interleave(counts), order[at]] = True
    return found
