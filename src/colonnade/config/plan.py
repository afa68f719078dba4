"""Configuration section `plan`: where rows are stored, what ranks exchange, how late reads may be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import Field, PlainSerializer, model_validator
from pydantic.functional_validators import AfterValidator, BeforeValidator, PlainValidator
from pydantic_core import PydanticKnownError

from colonnade.config.section import Section
from colonnade.errors import ConfigError
from colonnade.hops.kinds import EXCHANGE_CHOICES
from colonnade.plan.names import (
    CacheTier,
    CodecName,
    DenseCodec,
    Thresholding,
)
from colonnade.sizes import (
    SettingWords,
    StorageLocation,
    make_location_absolute,
    parse_byte_size,
    parse_positive_bytes,
    parse_storage_location,
)
from colonnade.topology.world import ShardingKind

if TYPE_CHECKING:
    from colonnade.topology.sharding import Sharding


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _validate_staleness(value: Any) -> Any:
    if not _is_count(value):
        raise ValueError(f"got {value!r}, wanted a number of steps, 0 or more")
    return value


def _validate_count_or_auto(value: Any) -> Any:
    if not _is_count(value) and value != "auto":
        raise ValueError(f"got {value!r}, wanted a whole number, 0 or more, or auto")
    return value


LEAST_RATE = 2**20
"""Lowest write rate, in bytes per second. A checkpoint waits for writes; below this rate a run would seem to hang."""


def _validate_rate(value: Any) -> Any:
    count = parse_byte_size(value)
    is_number = isinstance(count, int | float) and not isinstance(count, bool)
    if not is_number or count < LEAST_RATE:
        raise ValueError(
            f"got {value!r}, wanted at least 1MiB (per second), such as 50MB; leave it out for no limit"
        )
    return count


def _wrap_in_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _validate_distinct_paths(texts: list[str]) -> list[str]:
    paths = [parse_storage_location(text).path for text in texts]
    for path in paths:
        if paths.count(path) > 1:
            raise ValueError(f"got {path} twice, wanted directories that differ")
    return texts


Size = Annotated[int, BeforeValidator(parse_positive_bytes), SettingWords("bytes")]
Rate = Annotated[int, BeforeValidator(_validate_rate), SettingWords("bytes")]
PlaceText = Annotated[
    str, AfterValidator(make_location_absolute), SettingWords("directory[:bytes]")
]


class MemoryConfig(Section):
    """Memory and storage that each rank may use for rows. Not needed if all rows fit in memory."""

    hbm: Size | None = None
    """GPU memory per rank for the most used rows, e.g. 40GiB; needs train.device=cuda. Default: none."""
    dram: Size | None = None
    """Memory per rank for rows, e.g. 2GiB; rows that do not fit are stored in files. Default: no limit."""
    mapped: PlaceText | None = None
    """Directory with a size, /path:10GiB, for tables that do not fit in dram and, in the bytes they leave, for evicted
    rows of the others; meant for byte-addressable memory (DAX, CXL), but any directory works. Without a size: whole
    tables only. Default: none."""
    ssd: Annotated[
        list[PlaceText], BeforeValidator(_wrap_in_list), AfterValidator(_validate_distinct_paths)
    ] = []
    """Directory with an optional size, /path:64GiB, for files of rows; a list stripes the files over several. Default:
    the run folder."""
    tables: dict[str, Size] = {}
    """Memory of single tables per rank, by table name, taken out of dram; the other tables share the rest."""

    @property
    def mapped_location(self) -> StorageLocation | None:
        """Storage location of `mapped`; None if it is not set."""
        return None if self.mapped is None else parse_storage_location(self.mapped)

    @property
    def ssd_locations(self) -> tuple[StorageLocation, ...]:
        """Storage locations of `ssd`."""
        return tuple(map(parse_storage_location, self.ssd))

    @model_validator(mode="after")
    def _check_memory_settings(self) -> MemoryConfig:
        paths = [location.path for location in self.ssd_locations]
        if self.mapped_location is not None and self.mapped_location.path in paths:
            raise ValueError(
                f"got {self.mapped_location.path} as mapped and as ssd, wanted one tier in a directory"
            )
        reserved = sum(self.tables.values())
        if self.dram is not None and reserved > self.dram:
            raise ValueError(
                f"got {reserved:,} bytes for single tables out of dram={self.dram:,}; raise dram, or give them less"
            )
        return self


class CodecConfig(Section):
    """Encoding of values in messages between ranks. All but exact trade accuracy for bytes; one rank sends nothing."""

    values: CodecName = "exact"
    """Encoding of row values sent to the samples' ranks: exact, bf16, fp16 or int8 (with a scale for each part of a
    row), rounded to nearest."""
    gradients: CodecName = "exact"
    """Encoding of row gradients sent to the owner ranks, rounded stochastically so that sums are unbiased."""
    dense: CodecName | Literal["thresholded"] = "exact"
    """Encoding of the dense network's gradients between hosts (on one host: between ranks): exact, bf16, fp16, int8, or
    thresholded, which sends the largest elements alone. What a message leaves out is added to the next step's gradients
    (error feedback)."""
    dense_keep: float = Field(0.01, gt=0, le=1)
    """Share of the elements that a thresholded message has. A run needs at least 50 / dense_keep steps."""
    dense_keep_steps: int | None = Field(None, ge=0)
    """Steps of the warm-up, in which the share falls from 25 % to dense_keep; default 10 / dense_keep."""

    def choose_dense_codec(self) -> DenseCodec:
        """Return the codec of dense gradients. If all elements are kept, thresholded sums are exact sums."""
        if self.dense != "thresholded":
            return self.dense
        if self.dense_keep == 1:
            return "exact"
        steps = self.dense_keep_steps
        return Thresholding(
            keep=self.dense_keep,
            keep_steps=round(10 / self.dense_keep) if steps is None else steps,
        )


if TYPE_CHECKING:
    ExchangeChoice = str
else:  # Settings list and check the names of the one table of exchanges.
    ExchangeChoice = Literal[EXCHANGE_CHOICES]
ShardingChoice = Literal[ShardingKind, "auto"]


def _parse_sharding_setting(value: Any) -> Any:
    """Return a kind of sharding or a `Sharding`, which files store as a mapping. Raises ValueError."""
    if value is None or value in KINDS_OF_SHARDING:
        return value
    if isinstance(value, Mapping) or hasattr(value, "ranks"):
        from colonnade.topology.sharding import Sharding, read_sharding  # imports torch

        try:
            return value if isinstance(value, Sharding) else read_sharding(value)
        except (KeyError, TypeError, AttributeError):
            raise ValueError(f"got {value!r}, wanted its kind and ranks") from None
    raise PydanticKnownError("literal_error", {"expected": ", ".join(map(repr, KINDS_OF_SHARDING))})


def _write_sharding(value: Any) -> Any:
    """Return a table's sharding in its form in files."""
    return value if value is None or isinstance(value, str) else value.to_dict()


def _parse_replicated_rows(value: Any) -> Any:
    """Return a number of rows, or ids in any order as an ascending tuple. Raises ValueError."""
    if isinstance(value, Iterable) and not isinstance(value, str | Mapping):
        return tuple(sorted({int(row_id) for row_id in value}))
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if not _is_count(value):
        raise ValueError(f"got {value!r}, wanted a number of rows, 0 or more")
    return value


def _write_replicated_rows(value: Any) -> Any:
    """Return a number of rows, or their ids, in its form in files."""
    return list(value) if isinstance(value, tuple) else value


KINDS_OF_SHARDING = get_args(ShardingChoice)
if TYPE_CHECKING:
    TableSharding = ShardingChoice | Sharding | None
    ReplicatedRows = int | tuple[int, ...]
else:  # Settings files hold text or numbers; Python code may also pass a Sharding, or ids.
    TableSharding = Annotated[
        ShardingChoice | None,
        PlainValidator(_parse_sharding_setting),
        PlainSerializer(_write_sharding),
    ]
    ReplicatedRows = Annotated[
        int, PlainValidator(_parse_replicated_rows), PlainSerializer(_write_replicated_rows)
    ]


class TablePlanConfig(Section):
    """Plan of one table. Settings left out are those of plan.sharding, plan.exchange and plan.staleness_steps."""

    sharding: TableSharding = None
    """Kind of sharding of the table; Python code may also pass a `Sharding`. Default: plan.sharding."""
    exchange: ExchangeChoice | None = None
    """Exchange of the table between ranks; leave it out for a replicated table, which exchanges gradients only.
    Default: plan.exchange."""
    ranks: list[Annotated[int, Field(ge=0)]] | None = None
    """Owner ranks of the table: one for table_wise, those of one host for host_wise, one for each slice for
    column_wise, those of several hosts for grid. Default: the ranks with the most free memory; slices use all ranks."""
    replicated_rows: ReplicatedRows = 0
    """Number of rows to copy to the memory of every rank: the most used rows of a sample of the data. No effect on one
    rank. Python code may also pass the ids of these rows."""
    staleness_steps: int | None = Field(None, ge=0)
    """Number of steps that reads of the table are late, e.g. 0 for hot tables; default: plan.staleness_steps."""

    @property
    def kind(self) -> ShardingChoice | None:
        """Kind of the table's sharding; None if it is not set."""
        sharding = self.sharding
        return sharding if sharding is None or isinstance(sharding, str) else sharding.kind

    @model_validator(mode="after")
    def _check_table_settings(self) -> TablePlanConfig:
        kind = self.kind
        if self.replicated_rows and kind in ("replicated", "column_wise", "grid"):
            raise ValueError(
                f"got replicated_rows={self.replicated_rows} with sharding={kind}, wanted "
                "sharding=row_wise, host_wise or table_wise, which can copy single rows to every rank"
            )
        if self.ranks is None:
            return self
        if self.sharding not in ("table_wise", "host_wise", "column_wise", "grid"):
            raise ValueError(
                f"got ranks={self.ranks} with sharding={self.sharding}, wanted sharding=table_wise, host_wise, "
                "column_wise or grid"
            )
        if len(set(self.ranks)) != len(self.ranks) or not self.ranks:
            raise ValueError(f"got ranks={self.ranks}, wanted at least one, each once")
        if self.sharding == "table_wise" and len(self.ranks) > 1:
            raise ValueError(f"got ranks={self.ranks}, wanted the one rank of a table_wise table")
        return self


@dataclass(frozen=True, slots=True)
class CacheSize:
    """Size of a row cache: a number of rows, a fraction of the table's rows, or bytes; exactly one is set."""

    text: str
    rows: int | None = None
    part: float | None = None
    num_bytes: int | None = None

    def __str__(self) -> str:
        return self.text


def _parse_cache_size(value: Any) -> CacheSize:
    if isinstance(value, CacheSize):
        return value
    if _is_count(value):
        return CacheSize(str(value), rows=value)
    text = str(value).strip()
    try:
        if text.endswith("%"):
            part = float(text[:-1]) / 100
            if 0 <= part <= 1:
                return CacheSize(text, part=part)
        elif text.isdigit():
            return CacheSize(text, rows=int(text))
        else:
            return CacheSize(text, num_bytes=parse_positive_bytes(text))
    except ValueError:
        pass
    raise ValueError(
        f"got {value!r}, wanted a part of a table's rows such as 10%, bytes such as 64MiB, or a number of rows"
    )


def _validate_cache_staleness(value: Any) -> Any:
    if value is not None and not (_is_count(value) and value < 2**31 - 1):
        raise ValueError(f"got {value!r}, wanted a number of batches, 0 .. {2**31 - 2}")
    return value


Bound = Annotated[int, Field(ge=0, le=2**31 - 2)]
Staleness = Annotated[int | None, PlainValidator(_validate_cache_staleness)]
SizeOfCache = Annotated[
    CacheSize,
    PlainValidator(_parse_cache_size),
    PlainSerializer(str),
    SettingWords("part, bytes or rows"),
]
WriteShare = Annotated[float, Field(ge=0, le=1)]
StepBound = Annotated[int, Field(ge=1, le=2**31 - 2)]
CachePolicy = Literal["lru", "lfu", "lookahead"]


class TableCacheConfig(Section):
    """Row cache of one table. Settings left out are those of plan.cache; the three bounds count as one setting."""

    size: SizeOfCache | None = None
    """Size of the table's cache on each rank: a fraction of its rows such as 10%, bytes such as 64MiB, or a number of
    rows. Default: plan.cache.size."""
    staleness: Staleness = None
    """Largest number of batches of each other rank that a read misses: read_bound + write_bound. Default:
    plan.cache.staleness."""
    read_bound: Bound | None = None
    """Number of batches that use a cached row before it is fetched again from its owner. Default: half of the
    staleness."""
    write_bound: Bound | None = None
    """Number of batches that add their gradients to a cached row before the sum is sent to its owner. Default: the rest
    of the staleness."""
    write_share: WriteShare | None = None
    """Largest part of the batches that used a row so far whose gradients wait in one sum. Default:
    plan.cache.write_share."""
    step_bound: StepBound | None = None
    """Number of batches after which a row that every batch uses is sent and read again. Default:
    plan.cache.step_bound."""
    policy: CachePolicy | None = None
    """Cached row to evict first: least recently used (lru), least frequently used of late (lfu), or used furthest in
    the future by the batches read ahead (lookahead). Default: plan.cache.policy."""


class CacheConfig(Section):
    """Cache of other ranks' rows on each rank, with exchange rows; with exchange auto, of the tables for which it is
    faster. One rank alone has no use for it."""

    size: SizeOfCache | None = CacheSize("100%", part=1.0)
    """Size of each table's cache on each rank: a fraction of its rows, bytes such as 64MiB, or a number of rows; none:
    only tables with a size of their own are cached. Rows that a rank never uses take no memory."""
    staleness: Staleness = None
    """Largest number of batches of each other rank that a read misses: read_bound + write_bound. Default: 100, unless
    one of the two is set."""
    window: Annotated[int, Field(ge=1)] | None = None
    """Number of batches that a rank reads ahead to decide evictions, for policy=lookahead. Default: 64."""
    read_bound: Bound | None = None
    """Number of batches that use a cached row before it is fetched again from its owner. Default: half of the
    staleness."""
    write_bound: Bound | None = None
    """Number of batches that add their gradients to a cached row before the sum is sent to its owner. Default: the rest
    of the staleness."""
    write_share: WriteShare = 0.05
    """Largest part of the batches that used a row so far whose gradients wait in one sum, so that the gradients of rows
    that few batches use reach their owners, too; 1: no limit but write_bound."""
    step_bound: StepBound | None = 4
    """Number of batches after which a row that every batch uses is sent and read again, because its owner adds up the
    steps of all ranks' copies; a row that every second batch uses, after twice as many uses. null: no limit."""
    policy: CachePolicy = "lru"
    """Cached row to evict first: least recently used (lru), least frequently used of late (lfu), or used furthest in
    the future by the batches read ahead (lookahead)."""
    tier: CacheTier = "dram"
    """Memory of cached rows: main memory (dram), or that of the GPU that computes the network (hbm; needs
    train.device=cuda)."""
    tables: dict[str, TableCacheConfig] = {}
    """Size, bounds and policy of single tables' caches, by table name."""


class PlanConfig(Section):
    memory: MemoryConfig = MemoryConfig()
    """Memory and storage that each rank may use for rows."""
    placement: Literal["profiled", "even"] = "profiled"
    """Division of dram and hbm among tables if not all rows fit: most for the tables with the most used rows, by a
    profile of the run's first batches (profiled); or the same share for every table, by the settings alone (even)."""
    lookahead: Annotated[int | Literal["auto"], PlainValidator(_validate_count_or_auto)] = 2
    """Number of batches to prefetch ahead of training (their ids are sent and their rows read into memory); auto:
    enough to hide the reads."""
    write_budget: Rate | None = None
    """Largest rate of writing rows to files on each rank, in bytes per second. Default: no limit."""
    staleness_steps: Annotated[int, PlainValidator(_validate_staleness)] = 0
    """Number of newest updates of rows that every read misses; 0: synchronous training."""
    exchange: ExchangeChoice = "rows"
    """Values that ranks exchange: rows; bags pooled by the owners (pooled); partial results of the model's first
    operators where those are smaller (partials); bags pooled by the owners and relayed through a rank of their tower
    (towers); bags pooled by such a rank from rows it fetches (tower_rows). auto: the fastest, by prediction and by
    timing the best plans, with towers only for models with tower modules. Replicated tables always exchange gradients
    only."""
    sharding: ShardingChoice = "row_wise"
    """Distribution of a table over ranks: rows over all ranks (row_wise), over the ranks of one host (host_wise) or on
    one rank (table_wise); columns over ranks (column_wise) or over hosts, whose ranks share the rows (grid); a copy on
    every rank (replicated). auto: the fastest, as with exchange."""
    codec: CodecConfig = CodecConfig()
    """Encoding of rows and gradients in messages."""
    towers: Annotated[int, Field(ge=1)] | str | None = None
    """Number of towers (groups of neighbouring ranks) for exchanges towers and tower_rows, over which tables are
    distributed, or a file that lists the features of each tower. Default: one tower for each host."""
    servers: Annotated[int | Literal["auto"], PlainValidator(_validate_count_or_auto)] = 0
    """Number of ranks of each host, its last ones, that only store rows and do not train; 0: the ranks that train store
    the rows; auto: the smallest number whose predicted step is about the shortest, which a run records."""
    tables: dict[str, TablePlanConfig] = {}
    """Sharding, exchange, ranks and staleness of single tables, by table name."""
    cache: CacheConfig | None = None
    """Cache of other ranks' rows on each rank, with bounded staleness. Default: none."""

    @property
    def num_servers(self) -> int:
        """Number of servers of each host. Raises ConfigError for auto, which a run settles before it builds a plan."""
        if self.servers == "auto":
            raise ConfigError(
                "got plan.servers=auto, which runs and `colonnade plan` choose; give a number to build a plan"
            )
        return self.servers

    @property
    def is_late(self) -> bool:
        """True if reads of any table may miss updates."""
        return self.staleness_steps != 0 or any(
            table.staleness_steps for table in self.tables.values()
        )

    @model_validator(mode="after")
    def _check_plan_settings(self) -> PlanConfig:
        if self.cache is not None and self.is_late:
            raise ValueError(
                "got plan.cache with staleness_steps, of the plan or of a table; cached rows are late already: set "
                "staleness_steps=0, or leave plan.cache out"
            )
        if self.servers and self.memory.hbm is not None:
            raise ValueError(
                f"got plan.memory.hbm with plan.servers={self.servers}; devices belong to the ranks that train, which "
                "have no rows then: leave one of them out"
            )
        return self
