"""Answers of knowledge graph models by name: (head, relation, ?) and (?, relation, tail) in, the best entities out.

with colonnade.Predictor.open("runs/links") as predictor:
    (best,) = colonnade.rank_answers(predictor, [("Paris", "capital of", None)], k=5)
print(best[0])  # ("France", 3.2)
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import cast

import torch

from colonnade.batch import Batch, Ids
from colonnade.data import open_source
from colonnade.errors import ConfigError, DataError
from colonnade.models.link_prediction import KnowledgeGraph
from colonnade.models.retriever import top_items
from colonnade.predict import Predictor

Name = str | int


def rank_answers(
    predictor: Predictor,
    questions: Sequence[tuple[Name | None, Name, Name | None]],
    k: int = 10,
    *,
    exclude_known: bool = False,
) -> list[list[tuple[Name, float]]]:
    """Rank all entities as answers to questions (head, relation, None) or (None, relation, tail), given by name.

    Returns the k best entities of each question with their scores, best first; equal scores in the order of entities.
    exclude_known: leave out the answers in the data that the model was trained on, which is opened for them. Every call
    reads the vectors of all entities, so ask many questions at once. Raises ConfigError for another kind of model,
    DataError for an unknown name.
    """
    config = predictor.config
    recorded = {} if config is None else config.data.options
    if not isinstance(predictor.model, KnowledgeGraph) or "entity_names" not in recorded:
        raise ConfigError(
            f"got a {type(predictor.model).__name__} of {'your own' if config is None else config.data.name} data, "
            "wanted a knowledge graph model of a run with --data triples (or fb15k237), which has the names of entities"
        )
    entities, relations = (json.loads(recorded[f"{kind}_names"]) for kind in ("entity", "relation"))
    entity_rows, relation_rows = (
        {name: row for row, name in enumerate(names)} for names in (entities, relations)
    )
    triples = torch.zeros(len(questions), 3, dtype=torch.int64)
    is_tail = torch.zeros(len(questions), dtype=torch.bool)
    for number, (head, relation, tail) in enumerate(questions):
        if (head is None) == (tail is None) or relation is None:
            raise DataError(
                f"question {number}: got ({head!r}, {relation!r}, {tail!r}), wanted a relation, and None in place of "
                "the head or of the tail, whichever is asked for"
            )
        is_tail[number] = tail is None
        for column, (kind, name, rows) in enumerate(
            (
                ("entity", head, entity_rows),
                ("relation", relation, relation_rows),
                ("entity", tail, entity_rows),
            )
        ):
            if name is not None and name not in rows:
                raise DataError(
                    f"question {number}: got the {kind} {name!r}, wanted one of the {len(rows):,} that the model was "
                    f"trained on, such as {next(iter(rows), None)!r}"
                )
            triples[number, column] = rows.get(name, 0)
    with predictor.hold_checkpoint() as network:
        model = cast("KnowledgeGraph", network)
        names = ("head", "relation", "tail")
        ids = {name: Ids(triples[:, column].contiguous()) for column, name in enumerate(names)}
        batch = Batch(len(questions), torch.empty(len(questions), 0), ids)
        links = model(model.fill_missing_features(batch))
        queries = torch.where(is_tail[:, None], links.tail_queries, links.head_queries)
        scores = model.score_entities(queries, model.embed_entities(len(entities)))
    scores = scores.clone()  # out of inference mode
    if exclude_known:
        assert config is not None
        data = open_source(config.data.name, config.data.path, **recorded)
        known = data.test.index.find_answers(triples)  # type: ignore[union-attr]
        for answers, is_asked in ((known.tails, is_tail), (known.heads, ~is_tail)):
            rows = answers.samples
            chosen = is_asked[rows]
            scores[rows[chosen], answers.values[chosen]] = float("-inf")
    top = top_items(scores, min(k, len(entities)))
    return [
        [(entities[row], float(scores[number, row])) for row in rows if row >= 0]
        for number, rows in enumerate(top.tolist())
    ]
