"""`colonnade recommend`: the best items for each user of a file, by a retrieval model."""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import typer

from colonnade.cli.predict import AtOption
from colonnade.errors import ConfigError
from colonnade.terminal import print_text

EXAMPLES = (
    "A file of users has the columns that the model reads of a user, such as history, as the training file has them "
    "(Parquet, CSV, or one JSON object per line). The output has a row per user, in their order: lists of items and of "
    "scores, best first (in .csv and .tsv with | between them), and whether these are the most popular items because "
    "nothing is known of the user. It appears when it is complete.\n\n"
    "[bold]Examples[/bold]\n\n"
    "  colonnade recommend runs/mine --users users.parquet --k 10 --output best.parquet\n\n"
    "  colonnade recommend runs/mine --users users.jsonl --items items.csv --output best.parquet --key user_id\n\n"
    "  colonnade recommend served --users users.csv --output best.csv --with-seen"
)


def recommend(
    model: Annotated[
        Path, typer.Argument(help="Run folder, or a folder that `colonnade export` wrote.")
    ],
    users: Annotated[Path, typer.Option(help="File of users: .parquet, .csv, .tsv or .jsonl.")],
    output: Annotated[
        Path, typer.Option(help="File for the items and scores: .parquet, .csv or .tsv.")
    ],
    k: Annotated[int, typer.Option(min=1, help="Items for each user.")] = 10,
    items: Annotated[
        Path | None,
        typer.Option(
            help="File of all items that may be recommended; default: the catalogue of the model's data."
        ),
    ] = None,
    key: Annotated[
        str | None, typer.Option(help="Column of users to copy to the output, as `key`.")
    ] = None,
    with_seen: Annotated[
        bool, typer.Option("--with-seen", help="Recommend items too that the user took already.")
    ] = False,
    at: AtOption = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Users at a time.")] = 256,
) -> None:
    """Recommend the best items to each user of a file.

    All items of the catalogue are ranked, exactly, as `colonnade evaluate` ranks them. Rows are mapped read-only."""
    import pyarrow as pa

    from colonnade.cli.record_files import read_record_batches, read_records
    from colonnade.cli.score_files import TableWriter
    from colonnade.serve.recommend import Recommender

    started = time.perf_counter()
    catalogue = None if items is None else list(read_records(items))
    num_users = num_popular = num_left_out = 0
    with Recommender.open(model, items=catalogue, at=at) as recommender:
        item_type = pa.string() if recommender.catalogue.keys.dtype == object else pa.int64()
        types = {
            "items": pa.list_(item_type),
            "scores": pa.list_(pa.float64()),
            "by_popularity": pa.bool_(),
        }
        empty = pa.table({name: pa.array([], kind) for name, kind in types.items()})
        with TableWriter(output, empty) as file:
            for records in read_record_batches(users, batch_size):
                keys = None if key is None else take_keys(records, key, users, recommender.columns)
                best = recommender.recommend(records, k, exclude_seen=not with_seen)
                columns = {} if keys is None else {"key": pa.array(keys)}
                columns |= {
                    name: pa.array(getattr(best, name), kind) for name, kind in types.items()
                }
                file.write(pa.table(columns))
                num_users += len(records)
                num_popular += sum(best.by_popularity)
                num_left_out += best.num_left_out
    seconds = time.perf_counter() - started
    if items is not None and recommender.catalogue.taken is None:
        print_text("with --items, users are known by their records alone, not by the training data")
    if num_popular or num_left_out:
        print_text(
            f"unknown: {num_popular:,} users, who get the most popular items (by_popularity); {num_left_out:,} items "
            "of histories, which are left out"
        )
    print_text(
        f"step {recommender.step}: {num_users:,} users, {recommender.catalogue.num_items:,} items ranked, "
        f"{num_users / max(seconds, 1e-9):,.0f} users/s\nrecommendations: {output}"
    )


def take_keys(
    records: list[dict[str, Any]], key_column: str, file_path: Path, model_columns: Collection[str]
) -> list[Any]:
    """Return the values of the column `key_column`, and remove it from the records unless it is one of
    `model_columns`."""
    if any(key_column not in record for record in records):
        raise ConfigError(
            f"{file_path}: got no column {key_column!r}, which --key names; its columns are {', '.join(records[0])}"
        )
    return [
        record[key_column] if key_column in model_columns else record.pop(key_column)
        for record in records
    ]
