"""A run's configuration: typed, validated at birth, every field documented with its unit.

An unknown key is an error that names the nearest known one. `RunConfig` is also the run folder's
`config.yaml`, so a run can be repeated from its folder.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import Field, ValidationError, model_validator
from pydantic.functional_validators import AfterValidator, BeforeValidator, PlainValidator

from colonnade.errors import ConfigError
from colonnade.retention_config import AdmissionConfig, EvictionConfig, OpenTableConfig
from colonnade.section import Section
from colonnade.sizes import Place, Said, absolute, parse_bytes, parse_place, positive_bytes


def _lookahead(value: Any) -> Any:
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if not is_count and value != "auto":
        raise ValueError(f"got {value!r}, wanted a number of batches, 0 or more, or auto")
    return value


LEAST_RATE = 2**20
"""Bytes per second below which a run would seem to hang: a commit waits for what is not written."""


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


Width = Annotated[int, Field(ge=1)]
Size = Annotated[int, BeforeValidator(positive_bytes), Said("bytes")]
Rate = Annotated[int, BeforeValidator(_rate), Said("bytes")]
PlaceText = Annotated[str, AfterValidator(absolute), Said("directory[:bytes]")]


class DataConfig(Section):
    name: str = "synthetic"
    """The source: parquet, csv, criteo, movielens, movielens_retrieval, gowalla or synthetic."""
    path: str | None = None
    """File or folder; default: the source's folder in $COLONNADE_DATA."""
    options: dict[str, Any] = {}
    """What the source itself takes, by name (colonnade.data documents each)."""
    readers: int = Field(0, ge=0)
    """Processes per rank that read training batches ahead; 0: the lookahead's thread reads them."""
    next_use: bool = False
    """Read each epoch once before training on it: rows needed soonest stay in memory; fewer reads, the same bits."""


class ModelConfig(Section):
    """A setting that the chosen model does not have must be left out (none); its default is the model's own."""

    name: Literal[
        "lr", "fm", "nfm", "wide_deep", "deepfm", "dlrm", "dcn", "dcnv2", "two_tower", "sasrec"
    ] = "dlrm"
    """The network."""
    dim: int | None = Field(None, ge=1)
    """Width of every embedding row, in elements; default 16. Not of lr, whose rows hold one weight per label."""
    bottom: list[Width] | None = None
    """Hidden widths of the dense columns' MLP (dlrm)."""
    top: list[Width] | None = None
    """Hidden widths of the last MLP; of each tower's (two_tower)."""
    keep_fields: bool | None = None
    """Whether the last MLP also sees the field vectors beside their dots (dlrm)."""
    cross_layers: int | None = Field(None, ge=1)
    """Cross layers (dcn, dcnv2)."""
    cross_rank: int | None = Field(None, ge=1)
    """Rank of each cross layer's matrix (dcnv2); default: whole."""
    cross_experts: int | None = Field(None, ge=1)
    """Matrices of that rank that each cross layer mixes (dcnv2)."""
    structure: Literal["parallel", "stacked"] | None = None
    """Whether the MLP stands beside the cross layers or after them (dcnv2)."""
    item_columns: list[str] | None = None
    """Columns that say which item it is, its id first (two_tower); default: item."""
    query_columns: list[str] | None = None
    """Columns of who asks (two_tower); default: all that are not the item's."""
    temperature: float | None = Field(None, gt=0)
    """Scores are divided by it before the softmax (two_tower, sasrec)."""
    blocks: int | None = Field(None, ge=1)
    """Attention blocks (sasrec)."""
    heads: int | None = Field(None, ge=1)
    """Attention heads of a block (sasrec); they share `dim`."""
    max_length: int | None = Field(None, ge=1)
    """Newest items of a sequence that are looked at (sasrec)."""
    positions: bool | None = None
    """Whether places in the sequence have vectors of their own (sasrec); without, its order hardly matters."""
    dropout: float | None = Field(None, ge=0, lt=1)
    """Share of activations set to zero in training (sasrec). Above 0, worlds of several sizes agree only on average."""
    compile: bool = False
    """torch.compile the dense network: slower to start, then faster."""


class ScheduleConfig(Section):
    """The learning rate is `lr` times a factor of the step. For others, pass torch schedulers to `colonnade.fit`."""

    name: Literal["constant", "linear", "cosine", "exponential"] = "constant"
    """How the factor goes from 1 to `final`."""
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the factor first rises to 1, evenly."""
    total_steps: int | None = Field(None, ge=1)
    """Step from which the factor is `final`; default: the last of the run, where its length is known."""
    final: float = Field(0.0, ge=0)
    """Factor at the end (more than 0 for exponential)."""

    @model_validator(mode="after")
    def _check(self) -> ScheduleConfig:
        if self.name == "exponential" and not self.final > 0:
            raise ValueError("got final=0, wanted more than 0 for exponential, e.g. 0.01")
        if self.total_steps is not None and self.total_steps <= self.warmup_steps:
            raise ValueError(
                f"got total_steps={self.total_steps}, wanted more than warmup_steps={self.warmup_steps}"
            )
        return self


RowOptimizerName = Literal[
    "sgd", "adagrad", "rowwise_adagrad", "adam", "rowwise_adam", "adamw", "ftrl", "lamb"
]
OPTIMIZER_SETTINGS = (
    "eps", "initial_accumulator", "weight_decay", "momentum", "betas", "l1", "l2", "beta", "nesterov",
)  # fmt: skip


class RowOptimizerConfig(Section):
    """Settings of an optimizer of rows; None: the optimizer's own default."""

    eps: float | None = Field(None, gt=0)
    """Added to the root of the accumulator."""
    initial_accumulator: float | None = Field(None, ge=0)
    """First value of the accumulator (adagrad, rowwise_adagrad, ftrl)."""
    weight_decay: float | None = Field(None, ge=0)
    """Added to the gradient of touched rows, times the weight (adamw, lamb: apart from the gradient)."""
    momentum: float | None = Field(None, ge=0, lt=1)
    """Of sgd."""
    betas: tuple[float, float] | None = None
    """Decay of the moments (adam, rowwise_adam, adamw, lamb)."""
    l1: float | None = Field(None, ge=0)
    """Of ftrl."""
    l2: float | None = Field(None, ge=0)
    """Of ftrl."""
    beta: float | None = Field(None, ge=0)
    """Of ftrl."""
    nesterov: bool | None = None
    """Of sgd with momentum."""


class WideConfig(RowOptimizerConfig):
    """First-order weights (fm, nfm, wide_deep, deepfm). Without an optimizer of their own, they train as the rows."""

    optimizer: RowOptimizerName | None = None
    """Their optimizer, e.g. ftrl; default: the rows', with its settings."""
    lr: float | None = Field(None, ge=0)
    """Learning rate; default: the rows'."""
    init_scale: float = Field(0.0, ge=0)
    """New weights are uniform in +-init_scale."""


class RowsConfig(RowOptimizerConfig):
    optimizer: RowOptimizerName = "rowwise_adagrad"
    """The rows' optimizer."""
    lr: float = Field(0.02, ge=0)
    """Learning rate of rows."""
    init_scale: float | None = Field(None, ge=0)
    """New rows are uniform in +-init_scale; default 1/sqrt(dim)."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the rows' weights; 16-bit ones are rounded at random when they are updated."""
    master: bool = False
    """bfloat16: keep each weight's lower half beside the state, so that updates are those of float32."""
    max_norm: float | None = Field(None, gt=0)
    """Updated rows longer than this are shrunk to it."""
    wide: WideConfig = WideConfig()
    """First-order weights, where the model has them."""
    admission: AdmissionConfig = AdmissionConfig()
    """Of every open table's rows."""
    eviction: EvictionConfig = EvictionConfig()
    """Of every open table's rows; max_rows is of each of them."""
    tables: dict[str, OpenTableConfig] = {}
    """By name: open tables that have both of their own."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Of the rows' learning rate."""
    clip_norm: float | None = Field(None, gt=0)
    """All rows' summed gradients together are scaled down to this 2-norm, over all tables and ranks."""
    clip_value: float | None = Field(None, gt=0)
    """Every element of a row's summed gradient is first clamped to +-this."""


class DenseConfig(Section):
    optimizer: Literal["adam", "sgd", "adagrad"] = "adam"
    """The dense network's torch.optim optimizer."""
    lr: float = Field(1e-3, ge=0)
    """Learning rate of the dense network."""
    weight_decay: float = Field(0.0, ge=0)
    """torch's weight_decay of that optimizer."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Of the dense network's learning rate."""
    clip_norm: float | None = Field(None, gt=0)
    """The dense gradients together are scaled down to this 2-norm."""


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


class WireConfig(Section):
    """Anything but exact trades accuracy for bytes between ranks; a run on one rank is always exact."""

    values: CodecChoice = "exact"
    """Of rows on their way to the samples: exact, bf16, fp16 or int8 (a scale for each part of a row), to nearest."""
    gradients: CodecChoice = "exact"
    """Of gradients on their way to the rows, rounded at random so that sums are right on the mean."""


ExchangeChoice = Literal["rows", "pooled", "replicated", "auto"]
ShardingChoice = Literal[
    "row_wise", "host_wise", "table_wise", "column_wise", "grid", "replicated", "auto"
]


def _same_copies(exchange: str | None, sharding: str | None) -> None:
    """Raises ValueError where one says that every rank has all rows, and the other that not."""
    if exchange == "replicated" and sharding not in (None, "row_wise", "replicated", "auto"):
        raise ValueError(
            f"got exchange=replicated with sharding={sharding}; replicated rows are on every rank: leave sharding out"
        )
    if sharding == "replicated" and exchange not in (None, "rows", "replicated", "auto"):
        raise ValueError(
            f"got sharding=replicated with exchange={exchange}; of replicated rows only gradients travel: leave "
            "exchange out"
        )


class TablePlanConfig(Section):
    """Of one table; what is left out is as plan.sharding and plan.exchange say."""

    sharding: ShardingChoice | None = None
    """Which ranks have its rows."""
    exchange: ExchangeChoice | None = None
    """What of it travels between ranks."""
    ranks: list[Annotated[int, Field(ge=0)]] | None = None
    """The rank of table_wise, those of one host for host_wise, each one's for column_wise, those of several hosts for
    grid; default: where most room is, and slices on all."""

    @model_validator(mode="after")
    def _check(self) -> TablePlanConfig:
        _same_copies(self.exchange, self.sharding)
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


class PlanConfig(Section):
    memory: MemoryConfig = MemoryConfig()
    """What each rank may use of each tier."""
    placement: Literal["even", "profiled"] = "even"
    """Which tables get the memory: all alike, or those whose rows are read most, by a profile of a sample."""
    lookahead: Annotated[int | Literal["auto"], PlainValidator(_lookahead)] = 2
    """Batches whose ids travel and whose rows become resident ahead of training; auto: as deep as reads are slow."""
    write_budget: Rate | None = None
    """Bytes per second that rows may be written to files with, on each rank. Default: no limit."""
    staleness_steps: int = Field(0, ge=0)
    """0: synchronous. k: every read misses exactly the newest k updates of rows."""
    exchange: ExchangeChoice = "rows"
    """What travels between ranks: rows, what owners pool of them, gradients alone; auto: the fastest by prediction."""
    sharding: ShardingChoice = "row_wise"
    """Which ranks have a table's rows: all, one host's, one, some columns on each (of hosts: grid), each a copy; auto:
    as is foretold to be fastest."""
    wire: WireConfig = WireConfig()
    """What rows look like while they travel."""
    servers: int = Field(0, ge=0)
    """Ranks of each host, its last ones, that have rows and nothing else; 0: the ranks that train have the rows."""
    tables: dict[str, TablePlanConfig] = {}
    """By name: tables with a sharding, exchange or ranks of their own."""

    @model_validator(mode="after")
    def _check(self) -> PlanConfig:
        _same_copies(self.exchange, self.sharding)
        if self.servers and self.memory.hbm is not None:
            raise ValueError(
                f"got plan.memory.hbm with plan.servers={self.servers}; devices belong to the ranks that train, which "
                "have no rows then: leave one of them out"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _refuse_old_names(cls, values: Any) -> Any:
        if isinstance(values, Mapping):
            for old in RENAMED.keys() & {f"plan.{name}" for name in values}:
                raise ValueError(_renamed(old))
        return values


RENAMED = {"plan.dram": "plan.memory.dram"}


class TrainConfig(Section):
    batch_size: int = Field(4096, ge=1)
    """Samples per step over all ranks: the same number trains the same model on any number of ranks."""
    epochs: int = Field(1, ge=0)
    """Passes over the training data."""
    max_steps: int | None = Field(None, ge=0)
    """Stop after this many steps even if the epochs are not over."""
    accumulate: int = Field(1, ge=1)
    """Micro-batches per step, of batch_size / accumulate samples each: less memory, the same model to rounding."""
    evaluate_steps: int = Field(0, ge=0)
    """Steps between evaluations; 0: at the end of each epoch only."""
    patience: int = Field(0, ge=0)
    """Stop early after this many evaluations without a better score on the validation part; 0: never."""
    min_delta: float = Field(0.0, ge=0)
    """A score is better only if it is so by more than this."""
    progressive: bool = False
    """Epoch e trains on day e of the data set's days, and is tested on the next day before training on it."""
    commit_steps: int = Field(0, ge=0)
    """Steps between commits; 0: at the end of each epoch, and at each best score."""
    keep_commits: int = Field(2, ge=1)
    """Newest commits kept, beside the best."""
    mirror: str | None = None
    """URL (s3://, gs://, file:// ...) that commits are copied to; a run folder without commits is fetched from it."""
    warm_start: str | None = None
    """Run folder, or FOLDER@best, @last or @step, whose weights a new run starts from where names and widths agree."""
    warm_start_skip: list[str] = []
    """Tables and dense parameters that start anew although the other run has some of that name."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Of rows, dense weights and the readers' order."""
    on_non_finite: Literal["stop", "skip"] = "stop"
    """What NaN or inf in a loss or gradient does: end the run, or skip that step on every rank."""
    autocast: Literal["none", "bfloat16"] = "none"
    """Of the dense network's products; rows, and what is pooled of them, keep their dtype."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the dense network computes, with plan.memory.hbm rows too. cuda: ranks of a host share its GPUs in turn."""
    timeout: float = Field(300.0, gt=0)
    """Seconds that a rank which does not come is waited for before it is lost; for commits and starts 12 times that."""
    threads: int = Field(0, ge=0)
    """Threads per rank, torch's and Colonnade's; 0: the machine's processors shared among its ranks."""

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"got accumulate={self.accumulate}, wanted a divisor of batch_size={self.batch_size}"
            )
        if self.progressive and self.epochs > 1:
            raise ValueError(
                f"got epochs={self.epochs} with progressive, which trains on each day once; leave epochs out"
            )
        if self.progressive and self.patience:
            raise ValueError("got patience with progressive, which has no score to wait for")
        return self


class RunConfig(Section):
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    rows: RowsConfig = RowsConfig()
    dense: DenseConfig = DenseConfig()
    plan: PlanConfig = PlanConfig()
    train: TrainConfig = TrainConfig()

    @model_validator(mode="after")
    def _check(self) -> RunConfig:
        if self.train.accumulate > 1 and self.plan.staleness_steps:
            raise ValueError(
                "got train.accumulate with plan.staleness_steps; bounded staleness counts batches: "
                "leave one of them out"
            )
        if self.plan.memory.hbm is not None and self.train.device == "cpu":
            raise ValueError(
                "got plan.memory.hbm with train.device=cpu, which has no memory of its own; set train.device=cuda on a "
                "machine with a GPU, or leave hbm out"
            )
        if self.plan.memory.hbm is not None and "auto" in (self.plan.exchange, self.plan.sharding):
            raise ValueError(
                "got plan.exchange or plan.sharding=auto with plan.memory.hbm, whose rows are not foretold; name an "
                "exchange and a sharding, or leave hbm out"
            )
        if self.plan.memory.hbm is not None and self.plan.placement == "profiled":
            raise ValueError(
                "got plan.placement=profiled with plan.memory.hbm, whose rows it does not foretell; leave placement "
                "out, or hbm"
            )
        return self


OPEN_SECTIONS = (["data", "options"], ["plan", "memory", "tables"], ["plan", "tables"])
"""Whose keys are the user's."""


def build_config(values: Mapping[str, Any]) -> RunConfig:
    """Raises ConfigError: one line per problem, unknown keys with the nearest known one."""
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(problem) for problem in error.errors())) from None


def load_config(path: str | Path) -> RunConfig:
    """Read a YAML file. Raises ConfigError naming the file."""
    path = Path(path)
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config {path}: {error.strerror}; give an existing YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        detail = " ".join(str(error).split())
        raise ConfigError(f"config {path}: not YAML: {detail}") from None
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ConfigError(
            f"config {path}: got a {type(values).__name__}, wanted sections such as `train:`"
        )
    try:
        return build_config(values)
    except ConfigError as error:
        raise ConfigError(f"config {path}: {error}") from None


def override(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """`{"train.epochs": 3}` on top of `config`. Raises ConfigError for an unknown name."""
    values = config.model_dump()
    for name, value in settings.items():
        *sections, key = name.split(".")
        if name in RENAMED:
            raise ConfigError(_renamed(name))
        place = values
        for depth, section in enumerate(sections):
            if sections[:depth] == ["plan", "tables"]:
                place.setdefault(section, TablePlanConfig().model_dump())
            if not isinstance(place.get(section), dict):
                raise ConfigError(_unknown(".".join(sections[: depth + 1]), place, name))
            place = place[section]
        if key not in place and sections not in OPEN_SECTIONS:
            raise ConfigError(_unknown(name, place, name))
        place[key] = value
    return build_config(values)


def dump_config(config: RunConfig) -> str:
    return yaml.safe_dump(config.model_dump(), sort_keys=False)


def _explain(problem: Any) -> str:
    where = [str(part) for part in problem["loc"]]
    name = ".".join(where)
    if problem["type"] == "extra_forbidden":
        section: Any = RunConfig
        for part in where[:-1]:
            by_name = get_args(section)  # of a setting by table: (str, section)
            section = by_name[1] if by_name else section.model_fields[part].annotation
        return _unknown(name, section.model_fields, name)
    said = problem["msg"].removeprefix("Value error, ")
    if not name or said.startswith("unknown setting"):  # a check of several settings together
        return said
    return (
        f"{name}: {said}"
        if said.startswith("got ")
        else f"{name}: got {problem['input']!r}: {said}"
    )


def _renamed(name: str) -> str:
    return f"unknown setting {name!r}; it is now {RENAMED[name]}"


def _unknown(name: str, known: Mapping[str, Any], path: str) -> str:
    key = name.split(".")[-1]
    prefix = name[: len(name) - len(key)]
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    inner = {
        inside: f"{section}.{inside}"
        for section, value in known.items()
        for inside in (value if isinstance(value, Mapping) else _fields(value))
    }
    if not near and (inside := difflib.get_close_matches(key, inner, n=1, cutoff=0.7)):
        near = [inner[inside[0]]]
    hint = f"did you mean {prefix}{near[0]}?" if near else f"known here: {', '.join(known)}"
    return f"unknown setting {path!r}; {hint}"


def _fields(field: Any) -> Mapping[str, Any]:
    """Of a field that is a section: its settings."""
    return getattr(getattr(field, "annotation", None), "model_fields", {})
