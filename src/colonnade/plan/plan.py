"""Plan of one run: a frozen value with each table's storage, sharding, exchange and staleness.

Values alone, below all that builds or reads them: a plan is built by `plan.build`, and chosen by `plan.search`.
Building, printing and comparing a plan touches no device and no file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from colonnade.errors import ColonnadeError, ConfigError, CorruptionError
from colonnade.formats import make_format_stamp, parse_stamped_json
from colonnade.hops.kinds import EXCHANGES
from colonnade.plan.comparison import PlanComparison, describe_exchanges
from colonnade.plan.names import CacheTier, CodecName, DenseCodec, Thresholding, Tier
from colonnade.sizes import StorageLocation
from colonnade.staleness import RowClock, TableCache
from colonnade.topology.sharding import HotRows, Sharding


@dataclass(frozen=True, slots=True)
class Codecs:
    """Codecs of row values, of row gradients, and of the dense network's gradients."""

    values: CodecName = "exact"
    gradients: CodecName = "exact"
    dense: DenseCodec = "exact"

    @property
    def is_exact(self) -> bool:
        """True if values and gradients of rows are exact, whatever the dense gradients."""
        return self.values == self.gradients == "exact"


EXACT = Codecs()


@dataclass(frozen=True, kw_only=True, slots=True)
class TablePlan:
    """Plan of one table: sharding, memory, exchange and staleness."""

    name: str
    sharding: Sharding
    """Owner ranks of the table's rows."""
    capacity_rows: int
    """Number of rows of the table that fit in memory on each of its ranks; the fullest rank decides."""
    fits: bool
    """True if every row of each owner fits in memory, so that no row is ever evicted."""
    tier: Tier = "dram"
    """Memory of the resident rows."""
    hbm_rows: int = 0
    """Number of rows that fit in device memory, as copies above main memory; 0: no such tier."""
    mapped_rows: int = 0
    """Number of rows evicted from memory that fit in byte-addressable memory, above the files; 0: no such tier."""
    exchange: str = "rows"
    """Exchange between ranks: a key of `hops.kinds.EXCHANGES`."""
    staleness_steps: int | None = None
    """Number of steps that reads are late; None: that of the plan."""
    cache: TableCache | None = None
    """Row cache on each rank, under exchange "cached"."""
    has_own_budget: bool = False
    """True if its memory is a setting of its own, which no placement changes."""

    def __post_init__(self) -> None:
        if self.exchange not in EXCHANGES:
            raise ConfigError(
                f"table {self.name!r}: got exchange {self.exchange!r}, wanted one of {', '.join(EXCHANGES)}"
            )
        late = self.staleness_steps
        if late is not None and (not isinstance(late, int) or isinstance(late, bool) or late < 0):
            raise ConfigError(
                f"table {self.name!r}: got staleness_steps={late!r}, wanted a number of steps, 0 or more, or None"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Storage, sharding, exchange and staleness of every table for one run: one choice per axis.

    `build_plan` builds a plan. Plans can be printed, compared and converted to and from JSON.
    """

    num_ranks: int
    dram_bytes: int | None
    """Memory for rows on each rank; None: no limit."""
    lookahead: int | Literal["auto"]
    """Number of batches to prefetch ahead of training; "auto": adjusted while training."""
    staleness_steps: int
    """Number of steps that reads are late, for tables without a number of their own."""
    tables: tuple[TablePlan, ...]
    mapped: StorageLocation | None = None
    """Directory on byte-addressable memory for tables of tier "mapped", and for evicted rows of the others."""
    ssd: tuple[StorageLocation, ...] = ()
    """Directories over which files of rows are striped; empty: the run folder."""
    write_budget: int | None = None
    """Largest rate of writes on each rank, in bytes per second; None: no limit."""
    hbm_bytes: int | None = None
    """Device memory for rows on each rank; None: rows are in main memory only."""
    codecs: Codecs = EXACT
    """Encoding of rows and gradients in messages."""
    servers: tuple[int, ...] = ()
    """Ranks that only store rows; empty: the ranks that train store the rows."""
    towers: int | None = None
    """Number of towers, groups of neighbouring ranks, for exchange by towers; None: one for each host."""
    cache_tier: CacheTier = "dram"
    """Memory of row caches: main memory, or that of each rank's device."""
    placement: str = "even"
    """Division of memory among tables: "even", or "profiled" by the reads that a sample predicts."""
    prediction: Mapping[str, Any] | None = None
    """`plan.cost.prediction.Prediction` as plain values, if the plan was made from a profile."""
    comparison: PlanComparison | None = None
    """Plans that the run chose from, if its settings left shardings or exchanges open."""

    def check_world(self, num_ranks: int, servers: Sequence[int]) -> None:
        """Raise ConfigError if the plan is for another world."""
        if self.num_ranks != num_ranks:
            raise ConfigError(
                f"the plan is for {self.num_ranks} ranks, this world has {num_ranks}; build the plan for this world"
            )
        if self.servers != tuple(servers):
            raise ConfigError(
                f"the plan has servers {list(self.servers)}, this world has {list(servers)}; build the plan for "
                "this world"
            )

    def check_tables(self, names: Sequence[str]) -> None:
        """Raise ConfigError if the plan is for other tables, or for the same tables in another order."""
        if (planned := [table.name for table in self.tables]) != list(names):
            raise ConfigError(
                f"the plan is for tables {', '.join(planned)}, this collection has {', '.join(names)}; build the plan "
                "from the collection's tables"
            )

    @property
    def needs_backing(self) -> bool:
        """True if some rows do not fit in memory and are stored in files."""
        return not all(table.fits for table in self.tables)

    @property
    def shardings(self) -> tuple[Sharding, ...]:
        """Sharding of each table."""
        return tuple(table.sharding for table in self.tables)

    @property
    def staleness_by_table(self) -> tuple[int, ...]:
        """Number of steps that reads of each table are late."""
        return tuple(
            self.staleness_steps if table.staleness_steps is None else table.staleness_steps
            for table in self.tables
        )

    @property
    def max_staleness_steps(self) -> int:
        """Largest number of steps that reads of any table are late."""
        return max(self.staleness_by_table)

    @property
    def exchanges(self) -> tuple[str, ...]:
        """Distinct exchanges of the tables, sorted."""
        return tuple(sorted({table.exchange for table in self.tables}))

    def describe_exchanges(self) -> str:
        """Describe exchanges and shardings of the tables in words."""
        return describe_exchanges((table.exchange, table.sharding.kind) for table in self.tables)

    def to_json(self) -> str:
        """Return the text of `plan.json`."""
        return json.dumps({**make_format_stamp("colonnade plan"), **asdict(self)}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read the text of `plan.json`. Raises CorruptionError for fields that no plan has, ConfigError for settings
        that cannot work, CheckpointError for another format version."""
        values = parse_stamped_json("plan.json", text, "colonnade plan")
        try:
            return cls._from_fields(values)
        except ColonnadeError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CorruptionError(
                f"plan.json: got fields that no plan has ({type(error).__name__}: {error}), wanted those that "
                "Colonnade writes; restore it from a copy"
            ) from None

    @classmethod
    def _from_fields(cls, values: dict[str, Any]) -> Plan:
        tables = tuple(
            TablePlan(
                **{
                    **table,
                    "sharding": _read_sharding(table["sharding"]),
                    "cache": _read_cache(table.get("cache")),
                }
            )
            for table in values.pop("tables")
        )
        mapped = values.pop("mapped", None)
        comparison = values.pop("comparison", None)
        return cls(
            tables=tables,
            mapped=None if mapped is None else StorageLocation(**mapped),
            ssd=tuple(StorageLocation(**location) for location in values.pop("ssd", ())),
            codecs=_read_codecs(**values.pop("codecs", {})),
            servers=tuple(values.pop("servers", ())),
            comparison=None if comparison is None else PlanComparison.from_dict(comparison),
            **values,
        )


def _read_codecs(dense: CodecName | Mapping[str, Any] = "exact", **names: CodecName) -> Codecs:
    return Codecs(dense=Thresholding(**dense) if isinstance(dense, Mapping) else dense, **names)


def _read_sharding(fields: dict[str, Any]) -> Sharding:
    hot = fields.get("hot")
    if hot is not None:
        hot = HotRows(tuple(hot["ids"]), hot["num_ranks"])
    return Sharding(fields["kind"], tuple(fields["ranks"]), fields.get("slices", 1), hot)


def _read_cache(fields: dict[str, Any] | None) -> TableCache | None:
    if fields is None:
        return None
    return TableCache(**{**fields, "clock": RowClock(**fields["clock"])})
