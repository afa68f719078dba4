"""Prefetched values in checkpoints: rows, sums by sample, sums in a tower, or operators' inputs.

A run may continue with other exchanges if the values are rows, not sums.

Legend: T tables, U prefetched rows, D a table's width, B samples of this rank, G of all ranks, M of a rank's peers,
W columns.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from colonnade.errors import CheckpointError
from colonnade.exchange.bag_layout import BagLayout, BagReads, BagsLookup, LastHop
from colonnade.exchange.operators import Operators
from colonnade.lookup.fields import FieldColumns
from colonnade.wire.tower_transport import PeerTransport
from colonnade.wire.transport import DirectRoute, HostRoute, combine_transfers

PrefetchedValues = Mapping[str, Tensor]
TABLES = "of_tables"
"""Key of the indices of the tables with prefetched values, where these are not all tables."""


def prefetched_tables(prefetched: Sequence[PrefetchedValues], num_tables: int) -> set[int]:
    """Return the indices of the tables with prefetched values; they are the same on every rank."""
    if not prefetched or TABLES not in prefetched[0]:
        return set(range(num_tables))
    return set(prefetched[0][TABLES].tolist())


def collect_prefetched_rows(
    rank_prefetched_values: Sequence[PrefetchedValues],
) -> list[PrefetchedValues]:
    """Collect the rows in all ranks' prefetched values, whichever exchanges read them, as dicts of ids (U,),
    table_offsets (T + 1,) and values, table by table."""
    parts: list[PrefetchedValues] = []
    for rank_values in rank_prefetched_values:
        ends = [key for key in rank_values if key.rpartition(".")[2] == "table_offsets"]
        for prefix in (key.removesuffix("table_offsets") for key in ends):
            parts.append(
                {name: rank_values[prefix + name] for name in ("ids", "table_offsets", "values")}
            )
    return parts


def gather_prefetched_rows(
    prefetched_parts: Sequence[PrefetchedValues],
    table_widths: np.ndarray,
    table_index: int,
    wanted_ids: Tensor,
) -> Tensor:
    """Gather prefetched rows of a table by id, (len(wanted_ids), D). Raises CheckpointError for missing ones."""
    ids = []
    rows = []
    dim = int(table_widths[table_index])
    for part in prefetched_parts:
        offsets = part["table_offsets"]
        first, last = offsets[table_index : table_index + 2].tolist()
        before = int(
            (offsets.diff()[:table_index] * torch.from_numpy(table_widths[:table_index])).sum()
        )
        ids.append(part["ids"][first:last])
        rows.append(part["values"][before : before + (last - first) * dim].view(-1, dim))
    all_ids, order = torch.cat(ids).sort(stable=True) if ids else (wanted_ids[:0], wanted_ids[:0])
    where = torch.searchsorted(all_ids, wanted_ids)
    if bool((where >= len(all_ids)).any()) or not torch.equal(all_ids[where], wanted_ids):
        raise build_other_exchange_error()
    if not len(wanted_ids):
        return rows[0][:0] if rows else torch.empty(0, dim)
    return torch.cat(rows)[order[where]]


def build_other_exchange_error() -> CheckpointError:
    """Return the error for prefetched values that cannot be restored."""
    return CheckpointError(
        "the checkpoint has values that another exchange had read ahead, and rows cannot be restored from sums; "
        "continue with the exchanges of the checkpoint (plan.exchange and plan.tables as they were), or from a "
        "checkpoint of a run without staleness"
    )


# ---- sums of bags, by sample


def export_sums(total: Tensor, layout: BagLayout) -> dict[str, Tensor]:
    """Return sums (B, W), and the names and dims of their fields, for a checkpoint."""
    dims = torch.tensor([layout.declaration.fields[i].dim for i in layout.fields.order])
    return {"sums": total, "fields": encode_names(_list_sum_keys(layout)), "field_dims": dims}


def restore_prefetched_sums(
    lookup: BagsLookup,
    layout: BagLayout,
    rank: int,
    table_widths: np.ndarray,
    rank_prefetched_values: Sequence[PrefetchedValues],
) -> Tensor:
    """Return this rank's sums (B, W): its samples' part of the sums that all ranks of some world had prefetched for
    this step's global batch, in rank order in every world; or sums of the rows that another exchange had prefetched.
    table_widths: by table. Raises CheckpointError where neither was prefetched."""
    sizes = lookup.sizes
    names = _list_sum_keys(layout)
    first = sum(sizes[:rank])
    if has_sums(rank_prefetched_values, names):
        all_samples = gather_prefetched_sums(
            rank_prefetched_values, names, layout.arriving, sum(sizes)
        )
    elif any("gathered" in rank_values for rank_values in rank_prefetched_values):
        all_samples = gather_prefetched_columns(
            rank_prefetched_values, names, layout.fields.columns, sizes
        )
    else:
        return _pool_prefetched_rows(
            lookup, layout, table_widths, collect_prefetched_rows(rank_prefetched_values)
        )
    return all_samples[first : first + sizes[rank]]


def _pool_prefetched_rows(
    lookup: BagsLookup,
    layout: BagLayout,
    table_widths: np.ndarray,
    prefetched_parts: Sequence[PrefetchedValues],
) -> Tensor:
    """Return sums (B, W) of the compute dtype, by sample, of rows that were read ahead."""
    lookups = lookup.requested
    declaration = layout.declaration
    fields = layout.fields
    assert lookups is not None
    size = lookup.batch.size
    dtype = declaration.compute_dtype
    sums = torch.zeros(size, fields.width, dtype=dtype)
    bounds = lookups.feature_offsets.tolist()
    requested = layout.requested
    for c, (f, t) in enumerate(zip(requested.features, requested.tables.tolist(), strict=True)):
        ids = lookups.ids[bounds[c] : bounds[c + 1]]
        rows = gather_prefetched_rows(prefetched_parts, table_widths, t, ids).to(dtype)
        if (weights := lookups.weights[c]) is not None:
            rows = rows * weights.to(dtype)[:, None]
        if (offsets := lookups.bags[c]) is not None:
            samples = torch.arange(size).repeat_interleave(offsets.diff())
            rows = torch.zeros(size, rows.shape[1], dtype=dtype).index_add_(0, samples, rows)
        for i in fields.order:
            field = declaration.fields[i]
            start = fields.columns.starts[i]
            if field.feature == f:
                column = declaration.parts[field.part][1].column
                sums[:, start : start + field.dim] = rows[:, column : column + field.dim]
    return sums


def has_sums(
    rank_prefetched_values: Sequence[PrefetchedValues], field_names: Collection[str]
) -> bool:
    """Return whether every rank had prefetched sums of all these fields."""
    return bool(rank_prefetched_values) and all(
        set(field_names)
        <= {name for fields, _ in _iterate_prefetched_sums(rank_values) for name in fields}
        for rank_values in rank_prefetched_values
    )


def gather_prefetched_sums(
    rank_prefetched_values: Sequence[PrefetchedValues],
    field_names: Sequence[str],
    field_columns: FieldColumns,
    num_samples: int,
) -> Tensor:
    """Return the sums (G, W) of these columns, called `field_names`, joined from all ranks' samples. Raises
    CheckpointError for another number of samples, or another width."""
    blocks = []
    for rank_values in rank_prefetched_values:
        by_name = {
            name: part
            for fields, parts in _iterate_prefetched_sums(rank_values)
            for name, part in zip(fields, parts, strict=False)
        }
        if set(field_names) <= set(by_name):
            blocks.append(torch.cat([by_name[name] for name in field_names], 1))
    sums = torch.cat(blocks) if len(blocks) == len(rank_prefetched_values) else torch.empty(0, 0)
    if sums.shape != (num_samples, field_columns.width):
        raise CheckpointError(
            f"the checkpoint has sums of shape {tuple(sums.shape)} that were read ahead, this batch wants "
            f"{(num_samples, field_columns.width)}; continue with the data, model and batch size of the checkpoint"
        )
    return sums


def _iterate_prefetched_sums(
    prefetched: PrefetchedValues,
) -> Iterator[tuple[list[str], Sequence[Tensor]]]:
    """Yield (names of fields, sums by field) of each exchange that had prefetched sums."""
    for key in prefetched:
        prefix, _, last = key.rpartition(".")
        if last != "sums":
            continue
        start = f"{prefix}." if prefix else ""
        fields = decode_names(prefetched[f"{start}fields"])
        sums = prefetched[key]
        dims = prefetched.get(f"{start}field_dims")
        # Older checkpoints have no dims; all their fields have the same.
        sizes = [sums.shape[1] // len(fields)] * len(fields) if dims is None else dims.tolist()
        yield fields, sums.split(sizes, 1)


# ---- sums gathered inside a tower


def export_gathered_sums(
    lookup: BagsLookup, layout: BagLayout, columns: FieldColumns, peers: Sequence[int]
) -> dict[str, Tensor]:
    """Return the sums gathered on this rank (M, W), their fields, and their samples' indices in the global batch."""
    gathered = lookup.evaluation.gathered
    names = dict(zip(layout.fields.order, _list_sum_keys(layout), strict=True))
    assert gathered is not None
    return {
        "gathered": torch.cat(gathered),
        "gathered fields": encode_names(names[int(i)] for i in columns.dims),
        "samples": _samples_of(peers, lookup.sizes),
        "of samples": torch.tensor(sum(lookup.sizes)),
    }


def restore_gathered_sums(
    lookup: BagsLookup,
    layout: BagLayout,
    last_hop: LastHop,
    peer_ranks: Sequence[int],
    rank_prefetched_values: Sequence[PrefetchedValues],
) -> None:
    """Restore sums (M, W) for this rank's peers' samples, before the last hop. Raises CheckpointError where no sums
    were prefetched."""
    sizes = lookup.sizes
    names = _list_sum_keys(layout)
    whole = layout.fields.columns
    if has_sums(rank_prefetched_values, names):
        all_samples = gather_prefetched_sums(rank_prefetched_values, names, whole, sum(sizes))
    elif all("gathered" in rank_values for rank_values in rank_prefetched_values):
        all_samples = gather_prefetched_columns(rank_prefetched_values, names, whole, sizes)
    else:
        raise build_other_exchange_error()
    samples = all_samples[_samples_of(peer_ranks, sizes)]
    gathered = torch.cat(
        [samples[:, whole.slice_of(i)] for i in last_hop.columns.dims] or [samples[:, :0]], dim=1
    )
    assert isinstance(last_hop.transport, PeerTransport)
    lookup.evaluation.gathered = list(last_hop.transport.split_by_chunk(gathered, sizes))


def _samples_of(ranks: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Return the indices of these ranks' samples in the global batch, (M,) int64."""
    ends = list(accumulate(sizes))
    return torch.cat([torch.arange(ends[rank] - sizes[rank], ends[rank]) for rank in ranks])


def gather_prefetched_columns(
    rank_prefetched_values: Sequence[PrefetchedValues],
    field_names: Sequence[str],
    field_columns: FieldColumns,
    rank_batch_sizes: Sequence[int],
) -> Tensor:
    """Return the sums (G, W) of all ranks' samples and `field_columns`, called `field_names`, joined from ranks of
    towers: each had gathered some samples of its tower's fields. rank_batch_sizes: samples by rank. Raises
    CheckpointError where a sum is missing."""
    key_of_name = dict(zip(field_names, field_columns.dims, strict=True))
    all_samples = torch.full(
        (sum(rank_batch_sizes), field_columns.width),
        float("nan"),
        dtype=rank_prefetched_values[0]["gathered"].dtype,
    )
    for rank_values in rank_prefetched_values:
        first = 0
        fields = decode_names(rank_values["gathered fields"])
        if not set(fields) <= set(field_names) or len(all_samples) != int(
            rank_values["of samples"]
        ):
            raise build_other_exchange_error()
        for name in fields:
            into = field_columns.slice_of(key_of_name[name])
            width = into.stop - into.start
            all_samples[rank_values["samples"], into] = rank_values["gathered"][
                :, first : first + width
            ]
            first += width
    if (
        sum(rank_values["gathered"].numel() for rank_values in rank_prefetched_values)
        != all_samples.numel()
    ):
        raise build_other_exchange_error()
    return all_samples


# ---- inputs of operators that owners evaluate


def export_operator_inputs(lookup: BagsLookup, layout: BagLayout, rank: int) -> dict[str, Tensor]:
    """Return the inputs of this rank's partials, (G, dim) by field: rows may have changed when gradients arrive."""
    pooled = lookup.evaluation.pooled
    columns = layout.pooled_columns(rank)
    assert pooled is not None
    return {
        _pooled_name(layout, i): pooled[:, columns.slice_of(i)].clone()
        for i in layout.shares[rank].order
    }


def restore_operator_inputs(
    lookup: BagsLookup,
    layout: BagLayout,
    rank: int,
    operators: Operators,
    last_hop: LastHop,
    prefetched: Sequence[PrefetchedValues],
) -> None:
    """Restore the prefetched inputs of operators, instead of a fetch; each field is summed over the ranks that had rows
    of it. Raises CheckpointError for values of another exchange, or of other consumers."""
    sizes = lookup.sizes
    whole = layout.fields.columns
    evaluation = lookup.evaluation
    is_same_world = [set(rank_values) for rank_values in prefetched] == [
        {_pooled_name(layout, i) for i in share.order} for share in layout.shares
    ]
    if is_same_world and last_hop.transport.routes:
        _restore_in_same_sharding(
            lookup, layout, rank, operators, last_hop.transport.routes, prefetched
        )
        return
    all_samples = torch.zeros(sum(sizes), whole.width, dtype=layout.declaration.compute_dtype)
    for i in layout.fields.order:
        name = _pooled_name(layout, i)
        if not (parts := [rank_values[name] for rank_values in prefetched if name in rank_values]):
            raise CheckpointError(
                "the checkpoint has values that another exchange had read ahead, or owners that evaluated other "
                "consumers; continue with the exchanges and the number of ranks of the checkpoint, or from a "
                "checkpoint without staleness"
            )
        all_samples[:, whole.slice_of(i)] = sum(parts[1:], parts[0])
    first = sum(sizes[:rank])
    own = all_samples[first : first + sizes[rank]]
    partials = operators.evaluate_partials(own, whole, False)
    lookup.reads = BagReads(
        total=operators.join_values_and_partials(own, whole, layout.arriving, partials)
    )
    # A sample's bag of a field is on one rank, or the operator is linear: whole fields give the same gradients.
    columns = layout.pooled_columns(rank)
    pooled = torch.cat(
        [all_samples[:, whole.slice_of(i)] for i in columns.dims] or [all_samples[:, :0]], dim=1
    )
    evaluation.partials = [operators.evaluate_partials(pooled, columns, True)]
    pooled = pooled.clone()  # partials may share its memory
    for i in layout.shares[rank].order:
        owners = [r for r, share in enumerate(layout.shares) if i in share.order]
        if owners[0] != rank:
            pooled[:, columns.slice_of(i)] = 0.0  # stored by one rank
    evaluation.pooled = pooled


def _restore_in_same_sharding(
    lookup: BagsLookup,
    layout: BagLayout,
    rank: int,
    operators: Operators,
    routes: Sequence[DirectRoute | HostRoute],
    prefetched: Sequence[PrefetchedValues],
) -> None:
    """Restore in a world sharded like the one that prefetched the values: every owner's message has the same bits."""
    sizes = lookup.sizes
    evaluation = lookup.evaluation
    first = sum(sizes[:rank])
    blocks: list[list[Tensor]] = [[] for _ in routes]
    for owner, (rank_values, share) in enumerate(zip(prefetched, layout.shares, strict=True)):
        parts = [rank_values[_pooled_name(layout, i)] for i in share.order]
        none = torch.zeros(sum(sizes), 0, dtype=layout.declaration.compute_dtype)
        pooled = torch.cat([none, *parts], dim=1)
        columns = share.columns
        partials = operators.evaluate_partials(pooled, columns, owner == rank)
        if owner == rank:
            evaluation.pooled = pooled
            evaluation.partials = [partials]
        for route, received in zip(routes, blocks, strict=True):
            sent = operators.join_values_and_partials(
                pooled, columns, route.columns_of(owner), partials
            )
            received.append(sent[first : first + sizes[rank]])
    arrived = [route.join_blocks(of) for route, of in zip(routes, blocks, strict=True)]
    lookup.reads = BagReads(combine_transfers(arrived))


# ---- names


def _list_sum_keys(layout: BagLayout) -> list[str]:
    """Return the keys of the fields' sums, in order of the fields."""
    averaged = layout.evaluated.averaged
    fields = [layout.declaration.fields[i] for i in layout.fields.order]
    return [
        f"averaged {field.name}" if field.feature in averaged else field.name for field in fields
    ]


def _pooled_name(layout: BagLayout, i: int) -> str:
    """Return the key of a field that owners pooled."""
    field = layout.declaration.fields[i]
    is_averaged = field.feature in layout.evaluated.averaged
    return f"{'averaged' if is_averaged else 'pooled'} {field.name}"


def encode_names(fields: Iterable[str]) -> Tensor:
    """Return names of fields as one uint8 tensor."""
    return torch.tensor(list(", ".join(fields).encode()), dtype=torch.uint8)


def decode_names(names: Tensor) -> list[str]:
    """Return the names that `encode_names` encoded."""
    return bytes(names.numpy()).decode().split(", ")
