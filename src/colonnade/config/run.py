"""A run's configuration: typed, validated at birth, every field documented with its unit.

An unknown key is an error that names the nearest known one. `RunConfig` is also the run folder's
`config.yaml`, so a run can be repeated from its folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, PlainValidator, ValidationError, model_validator

from colonnade.config.model import ModelConfig
from colonnade.config.plan import (
    CacheConfig,
    PlanConfig,
    TableCacheConfig,
    TablePlanConfig,
)
from colonnade.config.problems import explain_errors, explain_unknown
from colonnade.config.retention import AdmissionConfig, EvictionConfig, OpenTableConfig
from colonnade.config.section import Section
from colonnade.errors import CheckpointError, ConfigError
from colonnade.formats import check_stamp, parse_yaml, read_text, stamp

Width = Annotated[int, Field(ge=1)]
DEFAULT_BATCH_SIZE = 4096


class DataConfig(Section):
    name: str = "synthetic"
    """The source: parquet, csv, criteo, movielens, movielens_retrieval, gowalla, fb15k237,
    power_law or synthetic."""
    path: str | None = None
    """File or folder; default: the source's folder in $COLONNADE_DATA."""
    options: dict[str, Any] = {}
    """What the source itself takes, by name (colonnade.data documents each)."""
    readers: int = Field(0, ge=0)
    """Processes per rank that read training batches ahead; 0: the lookahead's thread reads them."""
    next_use_hints: bool = False
    """Read each epoch once before training on it: rows needed soonest stay in memory; fewer reads, the same bits."""


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


class TableEmbeddingConfig(RowOptimizerConfig):
    """How one table's rows start and are updated. Without an optimizer of their own, they train as all rows do."""

    optimizer: RowOptimizerName | None = None
    """Their optimizer; default: all rows', with its settings but for those given here."""
    lr: float | None = Field(None, ge=0)
    """Learning rate; default: all rows'."""
    init_scale: float | None = Field(None, ge=0)
    """New rows are uniform in +-init_scale; default: as all rows."""
    max_norm: float | None = Field(None, gt=0)
    """Updated rows longer than this are shrunk to it; default: as all rows."""
    weight_bound: float | None = Field(None, gt=0)
    """Updated weights are clamped to +-this; default: as all rows."""


class EmbeddingConfig(RowOptimizerConfig):
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
    weight_bound: float | None = Field(None, gt=0)
    """Updated weights of rows are clamped to +-this."""
    by_table: dict[str, TableEmbeddingConfig] = {}
    """By name: tables whose rows have an optimizer, a learning rate, first values or bounds of their own."""
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
    lr: float | None = Field(None, ge=0)
    """Learning rate of the dense network. Default: by the number of training samples for files; else
    0.001."""
    weight_decay: float | None = Field(None, ge=0)
    """torch's weight_decay of that optimizer. Default: by the number of training samples for files;
    else 0."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Of the dense network's learning rate."""
    clip_norm: float | None = Field(None, gt=0)
    """The dense gradients together are scaled down to this 2-norm."""

    @property
    def learning_rate(self) -> float:
        """`lr`, or what it is where nothing says it."""
        return 1e-3 if self.lr is None else self.lr


def _loss_scale(value: Any) -> Any:
    if value is None or value == "dynamic":
        return value
    try:
        number = float("nan") if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = float("nan")
    # float32 has it, and what gradients are divided by it with: beyond, 0 times inf would come into weights.
    if not 1e-20 <= number <= 1e20:
        raise ValueError(
            f"got {value!r}, wanted dynamic, or a number from 1e-20 to 1e20, e.g. 1024"
        )
    return number


class TrainConfig(Section):
    batch_size: int | None = Field(None, ge=1)
    """Samples per step over all ranks: the same number trains the same model on any number of ranks. Default: by the
    number of training samples for files; else 4096."""
    epochs: int | None = Field(None, ge=0)
    """Passes over the training data. Default: by the number of training samples for files; else 1."""
    max_steps: int | None = Field(None, ge=0)
    """Stop after this many steps even if the epochs are not over."""
    accumulate: int = Field(1, ge=1)
    """Micro-batches per step, of batch_size / accumulate samples each: less memory, the same model to rounding."""
    evaluate_steps: int = Field(0, ge=0)
    """Steps between evaluations; 0: at the end of each epoch only."""
    monitor: str | None = None
    """Metric of the validation part that chooses the best step and ends the run by patience, e.g. auc, log_loss.
    Default: the objective's (auc, ndcg@20, mrr, loss)."""
    patience: int | None = Field(None, ge=0)
    """Stop early after this many evaluations without a better monitor on the validation part; 0: never. Default: 3 for
    csv, parquet and criteo where a part validates; else 0."""
    min_delta: float = Field(0.0, ge=0)
    """A value of the monitor is better only if it is so by more than this."""
    progressive: bool = False
    """Epoch e trains on day e of the data set's days, and is tested on the next day before training on it."""
    checkpoint_steps: int = Field(0, ge=0)
    """Steps between checkpoints; 0: at the end of each epoch, and at each best score."""
    checkpoint_seconds: float = Field(0.0, ge=0)
    """Seconds between checkpoints, beside those by steps; 0: none by the clock."""
    keep_checkpoints: int = Field(2, ge=1)
    """Newest checkpoints kept, beside the best."""
    mirror: str | None = None
    """URL (s3://, gs://, file:// ...) that checkpoints are copied to; a run folder without checkpoints is fetched
    from it."""
    publish: str | None = None
    """Folder or URL that checkpoints are published to, as what changed since the one before, for predictors."""
    publish_at: Literal["best", "last"] = "best"
    """Which checkpoints are published where a validation part chooses: the best so far, or each (last)."""
    warm_start: str | None = None
    """Run folder, or FOLDER@best, @last or @step, whose weights a new run starts from where names and widths agree."""
    warm_start_skip: list[str] = []
    """Tables and dense parameters that start anew although the other run has some of that name."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Of rows, dense weights and the readers' order."""
    on_non_finite: Literal["stop", "skip"] = "stop"
    """What NaN or inf in a loss or gradient does: end the run, or skip that step on every rank."""
    autocast: Literal["none", "bfloat16", "float16"] = "none"
    """Of the dense network's products; rows, and what is pooled of them, keep their dtype. float16: see loss_scale."""
    loss_scale: Annotated[float | Literal["dynamic"] | None, PlainValidator(_loss_scale)] = None
    """What losses are multiplied by before backward, so that small gradients do not vanish in float16. dynamic: 65536,
    halved where a gradient is not finite, whose step is skipped, and doubled after 2,000 steps that were applied."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the dense network computes, with plan.memory.hbm rows too. cuda: ranks of a host share its GPUs in turn."""
    timeout: float = Field(300.0, gt=0)
    """Seconds that a rank which does not come is waited for before it is lost; for checkpoints and starts 12 times
    that."""
    threads: int = Field(0, ge=0)
    """Threads per rank, torch's and Colonnade's; 0: OMP_NUM_THREADS, which torchrun sets to 1 if nobody did, else the
    machine's usable processors (affinity and control groups' quotas) shared among its ranks."""

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        if (self.batch_size or 0) % self.accumulate:
            raise ValueError(
                f"got accumulate={self.accumulate}, wanted a divisor of batch_size={self.batch_size}"
            )
        if self.progressive and (self.epochs or 0) > 1:
            raise ValueError(
                f"got epochs={self.epochs} with progressive, which trains on each day once; leave epochs out"
            )
        if self.progressive and self.patience:
            raise ValueError("got patience with progressive, which has no score to wait for")
        return self

    @property
    def samples_per_step(self) -> int:
        """`batch_size`, or what it is where nothing says it: a multiple of `accumulate`."""
        if self.batch_size is not None:
            return self.batch_size
        return -(-DEFAULT_BATCH_SIZE // self.accumulate) * self.accumulate

    @property
    def num_epochs(self) -> int:
        """`epochs`, or 1 where nothing says it."""
        return 1 if self.epochs is None else self.epochs


class RunConfig(Section):
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    embedding: EmbeddingConfig = EmbeddingConfig()
    dense: DenseConfig = DenseConfig()
    plan: PlanConfig = PlanConfig()
    train: TrainConfig = TrainConfig()

    @model_validator(mode="after")
    def _check(self) -> RunConfig:
        if self.train.accumulate > 1 and self.plan.is_late:
            raise ValueError(
                "got train.accumulate with staleness_steps, of the plan or of a table; bounded staleness counts "
                "batches: leave one of them out"
            )
        if self.plan.cache is not None:
            for name, got, wanted in (
                ("accumulate", self.train.accumulate, 1),
                ("on_non_finite", self.train.on_non_finite, "stop"),
            ):
                if got != wanted:
                    raise ValueError(
                        f"got train.{name}={got} with plan.cache, whose copies hear of every batch, one a step; set "
                        f"train.{name}={wanted}, or leave plan.cache out"
                    )
            if self.train.loss_scale is not None:
                raise ValueError(
                    f"got train.loss_scale={self.train.loss_scale} with plan.cache, where gradients of several steps "
                    "wait to be applied, and no step may be skipped; train in bfloat16, which needs no scale, or leave "
                    "plan.cache out"
                )
            if self.plan.cache.tier == "hbm" and self.train.device == "cpu":
                raise ValueError(
                    "got plan.cache.tier=hbm with train.device=cpu, which has no memory of its own; set "
                    "train.device=cuda on a machine with a GPU, or leave tier out"
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


FORMAT = "colonnade config"
OPEN_SECTIONS = (
    ["data", "options"],
    ["plan", "memory", "tables"],
    ["plan", "tables"],
    ["plan", "cache", "tables"],
    ["embedding", "tables"],
    ["embedding", "by_table"],
)
"""Whose keys are the user's."""
BY_NAME: Mapping[str, type[Section]] = {
    "plan.tables": TablePlanConfig,
    "plan.cache.tables": TableCacheConfig,
    "embedding.tables": OpenTableConfig,
    "embedding.by_table": TableEmbeddingConfig,
}
"""Sections by a table's name: what one is that has not been named before."""


def build_config(values: Mapping[str, Any]) -> RunConfig:
    """Raises ConfigError: one line per problem, unknown keys with the nearest known one; CheckpointError for another
    version of a file that states one."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"got a {type(values).__name__}, wanted sections such as `train:`")
    check_stamp("config", values, FORMAT, is_needed=False)
    settings = {name: value for name, value in values.items() if name not in stamp(FORMAT)}
    try:
        return RunConfig.model_validate(settings)
    except ValidationError as error:
        raise ConfigError(explain_errors(error, RunConfig)) from None


def load_config(path: str | Path) -> RunConfig:
    """Read a YAML file. Raises ConfigError naming the file."""
    path = Path(path)
    try:
        values = parse_yaml(read_text(path))
    except OSError as error:
        raise ConfigError(f"config {path}: {error.strerror}; give an existing YAML file") from None
    except ValueError as error:  # UnicodeDecodeError too
        raise ConfigError(f"config {path}: not YAML: {error}") from None
    if values is None:
        values = {}
    try:
        return build_config(values)
    except (ConfigError, CheckpointError) as error:
        raise type(error)(f"config {path}: {error}") from None


def override(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """`{"train.epochs": 3}` on top of `config`. Raises ConfigError for an unknown name."""
    values = config.model_dump()
    for name, value in settings.items():
        *sections, key = name.split(".")
        place = values
        for depth, section in enumerate(sections):
            if named := BY_NAME.get(".".join(sections[:depth])):
                place.setdefault(section, named().model_dump())
            if sections[: depth + 1] == ["plan", "cache"] and place[section] is None:
                place[section] = CacheConfig().model_dump()
            if not isinstance(place.get(section), dict):
                raise ConfigError(explain_unknown(".".join(sections[: depth + 1]), place, name))
            place = place[section]
        if key not in place and sections not in OPEN_SECTIONS:
            raise ConfigError(explain_unknown(name, place, name))
        place[key] = value
    return build_config(values)


def dump_config(config: RunConfig) -> str:
    return yaml.safe_dump({**stamp(FORMAT), **config.model_dump()}, sort_keys=False)
