"""Validation of settings against model and data, before anything is opened."""

from __future__ import annotations

from torch import nn

from colonnade.config.run import RunConfig
from colonnade.data import Splits
from colonnade.data.contract import multi_id_columns
from colonnade.embedding import EmbeddingCollection
from colonnade.errors import ConfigError
from colonnade.plan.cost.consumers import check_whole_bags
from colonnade.plan.plan import Plan
from colonnade.publish.mirror import open_url
from colonnade.train.best import check_monitor_metric
from colonnade.train.objective import Objective


def find_collection(model: nn.Module) -> EmbeddingCollection:
    """Return the one EmbeddingCollection in a model. Raises ConfigError unless there is exactly one."""
    collections = [module for module in model.modules() if isinstance(module, EmbeddingCollection)]
    if len(collections) != 1:
        raise ConfigError(
            f"{type(model).__name__} has {len(collections)} EmbeddingCollections among its modules, wanted one; "
            "declare all tables in one collection"
        )
    return collections[0]


def check_data_for_settings(data: Splits, config: RunConfig, objective: Objective) -> None:
    """Raise ConfigError if the settings need a part or a metric that the data does not have."""
    for url in (config.train.mirror, config.train.publish):
        if url is not None:
            open_url(url)
    if config.train.progressive and not data.days:
        raise ConfigError(
            "train.progressive needs data with days (Splits.days); this data set has none"
        )
    check_source = getattr(objective, "check_source", None)
    for part, source in (("validation", data.validation), ("test", data.test)):
        try:
            if check_source is not None and source is not None:
                check_source(source)
        except ConfigError as error:
            raise ConfigError(f"the {part} part: {error}") from None
    monitor = config.train.monitor or objective.monitor
    known = getattr(objective, "metrics", None)
    if known is not None and monitor != objective.monitor:
        tasks = data.train.schema.labels[1:]
        check_monitor_metric(
            monitor, [*known, *(f"{metric}_{task}" for task in tasks for metric in known)]
        )
    if config.train.patience and data.validation is None:
        raise ConfigError(
            f"train.patience={config.train.patience} waits for a better {monitor} on the validation part, "
            "and this data set has none; give it one, or set patience to 0"
        )


def check_exchanges_of_features(plan: Plan, collection: EmbeddingCollection, data: Splits) -> None:
    """Raise ConfigError if a table's exchange does not support features with several ids per sample."""
    exchanges = [table.exchange for table in plan.tables]
    check_whole_bags(
        collection.declaration, plan.shardings, exchanges, multi_id_columns(data.train.schema)
    )
