"""Sections of a configuration that say where rows lie, what travels and how late reads may be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import Field, PlainSerializer, model_validator
from pydantic.functional_validators import AfterValidator, BeforeValidator, PlainValidator
from pydantic_core import PydanticKnownError

from colonnade.config.section import Section
from colonnade.sizes import Place, Said, absolute, parse_bytes, parse_place, positive_bytes

if TYPE_CHECKING:
    from colonnade.topology.sharding import Sharding


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _staleness(value: Any) -> Any:
    if not _is_count(value):
        raise ValueError(f"got {value!r}, wanted a number of steps, 0 or more")
    return value


def _lookahead(value: Any) -> Any:
    if not _is_count(value) and value != "auto":
        raise ValueError(f"got {value!r}, wanted a number of batches, 0 or more, or auto")
    return value


LEAST_RATE = 2**20
"""Bytes per second below which a run would seem to hang: a checkpoint waits for what is not written."""


def _rate(value: Any) -> Any:
    count = parse_bytes(value)
    is_number = isinstance(count, int | float) and not isinstance(count, bool)
    if not is_number or count < LEAST_RATE:
        raise ValueError(
            f"got {value!r}, wanted at least 1MiB, which is per second, such as 50MB; leave it out for no limit"
        )
    return count


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _distinct(texts: list[str]) -> list[str]:
    paths = [parse_place(text).path for text in texts]
    for path in paths:
        if paths.count(path) > 1:
            raise ValueError(f"got {path} twice, wanted directories that differ")
    return texts


Size = Annotated[int, BeforeValidator(positive_bytes), Said("bytes")]
Rate = Annotated[int, BeforeValidator(_rate), Said("bytes")]
PlaceText = Annotated[str, AfterValidator(absolute), Said("directory[:bytes]")]
CodecChoice = Literal["exact", "bf16", "fp16", "int8"]


class MemoryConfig(Section):
    """What each rank may use of each tier. A run whose rows all fit in memory needs none of it."""

    hbm: Size | None = None
    """GPU memory for rows, above dram, e.g. 40GiB; needs train.device=cuda. Default: no row is kept there."""
    dram: Size | None = None
    """Memory for rows, e.g. 2GiB; rows beyond it rest in files. Default: no limit."""
    mapped: PlaceText | None = None
    """Directory on byte-addressable memory (DAX, CXL), or any, /path:10GiB, for tables that DRAM has no room for."""
    ssd: Annotated[list[PlaceText], BeforeValidator(_listed), AfterValidator(_distinct)] = []
    """Where rows rest: /path:64GiB, or a list of such over which files are striped. Default: the run folder."""
    tables: dict[str, Size] = {}
    """Memory of single tables, by name, taken out of dram; the others share the rest."""

    @property
    def mapped_place(self) -> Place | None:
        return None if self.mapped is None else parse_place(self.mapped)

    @property
    def ssd_places(self) -> tuple[Place, ...]:
        return tuple(map(parse_place, self.ssd))

    @model_validator(mode="after")
    def _check(self) -> MemoryConfig:
        paths = [place.path for place in self.ssd_places]
        if self.mapped_place is not None and self.mapped_place.path in paths:
            raise ValueError(
                f"got {self.mapped_place.path} as mapped and as ssd, wanted one tier in a directory"
            )
        taken = sum(self.tables.values())
        if self.dram is not None and taken > self.dram:
            raise ValueError(
                f"got {taken:,} bytes for single tables out of dram={self.dram:,}; raise dram, or give them less"
            )
        return self


class CodecConfig(Section):
    """Anything but exact trades accuracy for bytes between ranks; a run on one rank is always exact."""

    values: CodecChoice = "exact"
    """Of rows on their way to the samples: exact, bf16, fp16 or int8 (a scale for each part of a row), to nearest."""
    gradients: CodecChoice = "exact"
    """Of gradients on their way to the rows, rounded at random so that sums are right on the mean."""
    dense: CodecChoice = "exact"
    """Of the dense network's gradients between hosts (on one host: between ranks); the next step makes up for what
    rounding took."""


ExchangeChoice = Literal["rows", "pooled", "partials", "towers", "tower_rows", "auto"]
ShardingChoice = Literal[
    "row_wise", "host_wise", "table_wise", "column_wise", "grid", "replicated", "auto"
]


def _read_sharding(value: Any) -> Any:
    """Return a kind of sharding or a `Sharding`; read the mapping that files hold of one. Raises ValueError."""
    if value is None or value in KINDS_OF_SHARDING:
        return value
    if isinstance(value, Mapping) or hasattr(value, "ranks"):
        from colonnade.topology.sharding import Sharding, sharding_from  # imports torch

        try:
            return value if isinstance(value, Sharding) else sharding_from(value)
        except (KeyError, TypeError, AttributeError):
            raise ValueError(f"got {value!r}, wanted its kind and ranks") from None
    raise PydanticKnownError("literal_error", {"expected": ", ".join(map(repr, KINDS_OF_SHARDING))})


def _write_sharding(value: Any) -> Any:
    """Return what files hold of a table's sharding."""
    return value if value is None or isinstance(value, str) else value.plain()


def _read_replicated_rows(value: Any) -> Any:
    """Return a number of rows, or ids in any order as an ascending tuple. Raises ValueError."""
    if isinstance(value, Iterable) and not isinstance(value, str | Mapping):
        return tuple(sorted({int(row_id) for row_id in value}))
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if not _is_count(value):
        raise ValueError(f"got {value!r}, wanted a number of rows, 0 or more")
    return value


def _write_replicated_rows(value: Any) -> Any:
    """Return what files hold of a number of rows, or of their ids."""
    return list(value) if isinstance(value, tuple) else value


KINDS_OF_SHARDING = get_args(ShardingChoice)
if TYPE_CHECKING:
    TableSharding = ShardingChoice | Sharding | None
    ReplicatedRows = int | tuple[int, ...]
else:  # what people type; code may give a Sharding, or ids, too
    TableSharding = Annotated[
        ShardingChoice | None, PlainValidator(_read_sharding), PlainSerializer(_write_sharding)
    ]
    ReplicatedRows = Annotated[
        int, PlainValidator(_read_replicated_rows), PlainSerializer(_write_replicated_rows)
    ]


class TablePlanConfig(Section):
    """Of one table; what is left out is as plan.sharding and plan.exchange say."""

    sharding: TableSharding = None
    """Ranks that have its rows, by kind; in Python, a `Sharding` too."""
    exchange: ExchangeChoice | None = None
    """What of it travels between ranks; leave it out for a replicated table, of which only gradients travel."""
    ranks: list[Annotated[int, Field(ge=0)]] | None = None
    """The rank of table_wise, those of one host for host_wise, each one's for column_wise, those of several hosts for
    grid; default: where most room is, and slices on all."""
    replicated_rows: ReplicatedRows = 0
    """Number of rows, the most popular of a sample, that are replicated: every rank has them in memory. On one rank it
    does nothing. In Python, ids of such rows too."""
    staleness_steps: int | None = Field(None, ge=0)
    """How late its reads are, instead of plan.staleness_steps: 0 for hot tables."""

    @property
    def kind(self) -> ShardingChoice | None:
        """Kind of its sharding."""
        sharding = self.sharding
        return sharding if sharding is None or isinstance(sharding, str) else sharding.kind

    @model_validator(mode="after")
    def _check(self) -> TablePlanConfig:
        kind = self.kind
        if self.replicated_rows and kind in ("replicated", "column_wise", "grid"):
            raise ValueError(
                f"got replicated_rows={self.replicated_rows} with sharding={kind}, wanted "
                "sharding=row_wise, host_wise or table_wise, of whose rows some can be copied to every rank"
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
    """One of them: rows, a part of the table's, or bytes."""

    text: str
    rows: int | None = None
    part: float | None = None
    num_bytes: int | None = None

    def __str__(self) -> str:
        return self.text


def _cache_size(value: Any) -> CacheSize:
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
            return CacheSize(text, num_bytes=positive_bytes(text))
    except ValueError:
        pass
    raise ValueError(
        f"got {value!r}, wanted a part of a table's rows such as 10%, bytes such as 64MiB, or a number of rows"
    )


def _cache_staleness(value: Any) -> Any:
    if value is not None and not (_is_count(value) and value < 2**31 - 1):
        raise ValueError(f"got {value!r}, wanted a number of batches, 0 .. {2**31 - 2}")
    return value


Bound = Annotated[int, Field(ge=0, le=2**31 - 2)]
Staleness = Annotated[int | None, PlainValidator(_cache_staleness)]
SizeOfCache = Annotated[
    CacheSize, PlainValidator(_cache_size), PlainSerializer(str), Said("part, bytes or rows")
]
CachePolicy = Literal["lru", "lfu", "lookahead"]
CacheTier = Literal["dram", "hbm"]


class TableCacheConfig(Section):
    """Of one table; what is left out is as plan.cache says: of the three bounds, where all three are."""

    size: SizeOfCache | None = None
    """Rows of it that each rank keeps copies of: a part of its rows such as 10%, bytes such as 64MiB, or a number."""
    staleness: Staleness = None
    """Batches of each other rank that a read misses at most: read_bound + write_bound."""
    read_bound: Bound | None = None
    """Batches that a copy is used for without asking its owner. Default: half of the staleness."""
    write_bound: Bound | None = None
    """Batches whose gradients of a row wait at its copy until their sum is sent. Default: the rest of the staleness."""
    policy: CachePolicy | None = None
    """Which copy leaves: used longest ago (lru), least often of late (lfu), or again last, as coming batches say
    (lookahead)."""


class CacheConfig(Section):
    """Copies of rows on the ranks that use them (exchange rows): between ranks alone, one rank has no use for it."""

    size: SizeOfCache | None = CacheSize("10%", part=0.1)
    """Rows of each table that each rank keeps copies of: a part of its rows, bytes such as 64MiB, or a number; none:
    only tables with a size of their own have copies."""
    staleness: Staleness = None
    """Batches of each other rank that a read misses at most: read_bound + write_bound. Default: 0."""
    window: Annotated[int, Field(ge=1)] | None = None
    """Batches that a rank reads beyond the one it decides about, for policy=lookahead. Default: 64."""
    read_bound: Bound | None = None
    """Batches that a copy is used for without asking its owner. Default: half of the staleness."""
    write_bound: Bound | None = None
    """Batches whose gradients of a row wait at its copy until their sum is sent. Default: the rest of the staleness."""
    policy: CachePolicy = "lru"
    """Which copy leaves: used longest ago (lru), least often of late (lfu), or again last, as coming batches say
    (lookahead)."""
    tier: CacheTier = "dram"
    """Where copies lie: in memory (dram), or in the GPU's that the network computes on (hbm; needs
    train.device=cuda)."""
    tables: dict[str, TableCacheConfig] = {}
    """By name: tables with a size, bounds or policy of their own."""


class PlanConfig(Section):
    memory: MemoryConfig = MemoryConfig()
    """What each rank may use of each tier."""
    placement: Literal["even", "profiled"] = "even"
    """Which tables get the memory: all alike, or those whose rows are read most, by a profile of a sample."""
    lookahead: Annotated[int | Literal["auto"], PlainValidator(_lookahead)] = 2
    """Batches whose ids travel and whose rows become resident ahead of training; auto: as deep as reads are slow."""
    write_budget: Rate | None = None
    """Bytes per second that rows may be written to files with, on each rank. Default: no limit."""
    staleness_steps: Annotated[int, PlainValidator(_staleness)] = 0
    """0: synchronous. k: every read misses exactly the newest k updates of rows."""
    exchange: ExchangeChoice = "rows"
    """What travels between ranks: rows, what owners pool of them (pooled), partials of the model's first operators
    where those are less (partials), what owners pool by way of a rank of their tower (towers), what such a rank pools
    of rows that come to it (tower_rows); auto: the fastest by prediction, by towers only for a model's tower modules.
    Of replicated tables only gradients travel, whatever this says."""
    sharding: ShardingChoice = "row_wise"
    """Which ranks have a table's rows: all, one host's, one, some columns on each (of hosts: grid), each a copy; auto:
    as is foretold to be fastest."""
    codec: CodecConfig = CodecConfig()
    """What rows and gradients look like while they travel."""
    towers: Annotated[int, Field(ge=1)] | str | None = None
    """For exchanges towers and tower_rows: how many groups of neighbouring ranks, over which tables are dealt, or a
    file that says which features stand together; default: one for each host."""
    servers: int = Field(0, ge=0)
    """Ranks of each host, its last ones, that have rows and nothing else; 0: the ranks that train have the rows."""
    tables: dict[str, TablePlanConfig] = {}
    """By name: tables with a sharding, exchange, ranks or staleness of their own."""
    cache: CacheConfig | None = None
    """Copies of rows on the ranks that use them, as old as bounds allow. Default: none."""

    @property
    def is_late(self) -> bool:
        """Whether reads of some table may miss updates."""
        return self.staleness_steps != 0 or any(
            each.staleness_steps for each in self.tables.values()
        )

    @model_validator(mode="after")
    def _check(self) -> PlanConfig:
        if self.cache is not None and self.is_late:
            raise ValueError(
                "got plan.cache with staleness_steps, of the plan or of a table; copies are what is late already: set "
                "staleness_steps=0, or leave plan.cache out"
            )
        if self.servers and self.memory.hbm is not None:
            raise ValueError(
                f"got plan.memory.hbm with plan.servers={self.servers}; devices belong to the ranks that train, which "
                "have no rows then: leave one of them out"
            )
        return self
