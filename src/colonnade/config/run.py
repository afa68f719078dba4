"""Configuration of a run: typed, validated when built, with unit and default of every setting.

An unknown key is an error that names the nearest known one. The run folder stores `RunConfig` as `config.yaml`, so a
run can be repeated from its folder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml
from pydantic import Field, PlainValidator, ValidationError, model_validator

from colonnade.config.model import ModelConfig
from colonnade.config.plan import CacheConfig, PlanConfig, TableCacheConfig, TablePlanConfig
from colonnade.config.problems import explain_errors, explain_unknown_setting
from colonnade.config.retention import AdmissionConfig, EvictionConfig, OpenTableConfig
from colonnade.config.section import FIXED, Section, iterate_fixed_settings
from colonnade.errors import CheckpointError, ConfigError
from colonnade.formats import (
    YamlDumper,
    check_format_version,
    make_format_stamp,
    parse_yaml,
    read_text_file,
)
from colonnade.optimizers import SPARSE_OPTIMIZERS

Width = Annotated[int, Field(ge=1)]
LastBatch = Literal["keep", "drop", "merge"]
MonitorMode = Literal["min", "max"]
DEFAULT_BATCH_SIZE = 4096
LONGEST_TEXT = 500
"""Number of characters of a setting in JSON beyond which its digest is compared and stored."""


OWN = "own"
"""data.name of a run whose model and data came from Python (`colonnade.fit`)."""


class DataConfig(Section):
    name: Annotated[str, FIXED] = "synthetic"
    """Data set, or format of the files with the samples: a name that `colonnade train --help` lists at --data."""
    path: str | None = None
    """File or folder of the data; default: the source's folder in $COLONNADE_DATA."""
    options: Annotated[dict[str, Any], FIXED] = {}
    """Options of the source, by name (`colonnade settings data.options` lists them)."""
    readers: int = Field(0, ge=0)
    """Number of processes per rank that read training batches ahead; 0: the lookahead thread reads them."""
    last_batch: Annotated[LastBatch, FIXED] = "keep"
    """Treatment of an epoch's last batch, of all ranks together, if it is smaller than the others: keep it, drop it, or
    merge it into the batch before it. BatchNorm needs two samples on every rank."""
    next_use_hints: bool = False
    """Read each epoch once before training on it, so that memory keeps the rows needed soonest. Fewer reads from files,
    the same results."""


CHANGEABLE_OPTIONS = ("threads", "validation", "test", "join")
"""Names in `data.options` that may change when a run resumes: they say where data is, as `data.path` does."""


class ScheduleConfig(Section):
    """Schedule that multiplies `lr` by a factor of the step. For others, pass torch schedulers to `colonnade.fit`."""

    name: Literal["constant", "linear", "cosine", "exponential"] = "constant"
    """Shape of the factor's decay from 1 to `final`."""
    warmup_steps: int = Field(0, ge=0)
    """Number of warm-up steps, in which the factor rises linearly to 1."""
    total_steps: int | None = Field(None, ge=1)
    """Step at which the factor reaches `final`; default: the last step of the run, if its length is known."""
    final: float = Field(0.0, ge=0)
    """Factor at the end (more than 0 for exponential)."""

    @model_validator(mode="after")
    def _check_schedule_settings(self) -> ScheduleConfig:
        if self.name == "exponential" and not self.final > 0:
            raise ValueError("got final=0, wanted more than 0 for exponential, e.g. 0.01")
        if self.total_steps is not None and self.total_steps <= self.warmup_steps:
            raise ValueError(
                f"got total_steps={self.total_steps}, wanted more than warmup_steps={self.warmup_steps}"
            )
        return self


if TYPE_CHECKING:
    RowOptimizerName = str
else:
    RowOptimizerName = Literal[tuple(SPARSE_OPTIMIZERS)]


class RowOptimizerConfig(Section):
    """Settings of an optimizer of rows; None: the optimizer's own default."""

    eps: float | None = Field(None, gt=0)
    """Number added to the square root of the accumulator, against division by zero."""
    initial_accumulator: float | None = Field(None, ge=0)
    """Initial value of the accumulator (adagrad, rowwise_adagrad, ftrl)."""
    weight_decay: float | None = Field(None, ge=0)
    """Factor of the weight that is added to the gradient of touched rows (adamw, lamb: decoupled from the gradient)."""
    momentum: float | None = Field(None, ge=0, lt=1)
    """Momentum of sgd."""
    betas: tuple[float, float] | None = None
    """Decay rates of the first and second moment (adam, rowwise_adam, adamw, lamb)."""
    l1: float | None = Field(None, ge=0)
    """Strength of the L1 regularization of ftrl."""
    l2: float | None = Field(None, ge=0)
    """Strength of the L2 regularization of ftrl."""
    beta: float | None = Field(None, ge=0)
    """Smoothing term beta of ftrl's learning rate."""
    nesterov: bool | None = None
    """Use Nesterov momentum (sgd with momentum)."""


OPTIMIZER_SETTINGS = tuple(RowOptimizerConfig.model_fields)


class WideConfig(RowOptimizerConfig):
    """First-order weights (fm, nfm, wide_deep, deepfm). Without an optimizer of their own they use that of the rows."""

    optimizer: Annotated[RowOptimizerName | None, FIXED] = None
    """Optimizer of the first-order weights, e.g. ftrl; default: embedding.optimizer with its settings."""
    lr: float | None = Field(None, ge=0)
    """Learning rate of the first-order weights; default: embedding.lr."""
    init_scale: Annotated[float, FIXED] = Field(0.0, ge=0)
    """Half-width of the uniform distribution of new first-order weights, +-init_scale."""


class TableEmbeddingConfig(RowOptimizerConfig):
    """Initial values and optimizer of one table's rows. Settings left out are those of all rows."""

    optimizer: Annotated[RowOptimizerName | None, FIXED] = None
    """Optimizer of the table's rows; default: embedding.optimizer with its settings, except those set for the table."""
    lr: float | None = Field(None, ge=0)
    """Learning rate of the table's rows; default: embedding.lr."""
    init_scale: Annotated[float | None, FIXED] = Field(None, ge=0)
    """Half-width of the uniform distribution of the table's new rows; default: embedding.init_scale."""
    max_norm: float | None = Field(None, gt=0)
    """Largest 2-norm of an updated row; longer rows are scaled down to it. Default: embedding.max_norm."""
    weight_bound: float | None = Field(None, gt=0)
    """Bound to which updated weights are clamped, +-weight_bound; default: embedding.weight_bound."""


class EmbeddingConfig(RowOptimizerConfig):
    optimizer: Annotated[RowOptimizerName, FIXED] = "rowwise_adagrad"
    """Optimizer of embedding rows."""
    lr: float | None = Field(None, ge=0)
    """Learning rate of embedding rows. Default: for data in files 1 / ids of a sample, 0.25 at most (0.05 without
    first-order weights); else 0.02."""
    init_scale: Annotated[float | None, FIXED] = Field(None, ge=0)
    """Half-width of the uniform distribution of new rows, +-init_scale; default 1/sqrt(dim)."""
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], FIXED] = "float32"
    """Data type of the rows' weights; updates of 16-bit weights are rounded stochastically."""
    master: Annotated[bool, FIXED] = False
    """Store the lower half of each bfloat16 weight with the optimizer state, so that updates are those of float32."""
    max_norm: float | None = Field(None, gt=0)
    """Largest 2-norm of an updated row; longer rows are scaled down to it. Default: no limit."""
    weight_bound: float | None = Field(None, gt=0)
    """Bound to which updated weights of rows are clamped, +-weight_bound. Default: no bound."""
    pooling: Annotated[Literal["sum", "mean", "sqrtn"] | None, FIXED] = None
    """Pooling of a bag's rows; sqrtn: their sum divided by the square root of their number. Default: mean, but sum in
    new runs on files."""
    by_table: dict[str, TableEmbeddingConfig] = {}
    """Optimizer, learning rate, initial values and bounds of single tables, by table name."""
    wide: WideConfig = WideConfig()
    """First-order weights, in models that have them."""
    admission: Annotated[AdmissionConfig, FIXED] = AdmissionConfig()
    """Admission of new rows to every open table."""
    eviction: Annotated[EvictionConfig, FIXED] = EvictionConfig()
    """Eviction of rows from every open table; max_rows counts each table by itself."""
    tables: Annotated[dict[str, OpenTableConfig], FIXED] = {}
    """Admission and eviction of single open tables, by table name."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Schedule of the rows' learning rate."""
    clip_norm: float | None = Field(None, gt=0)
    """Largest 2-norm of all rows' summed gradients, over all tables and ranks; larger gradients are scaled down.
    Default: no clipping."""
    clip_value: float | None = Field(None, gt=0)
    """Bound to which every element of a row's summed gradient is clamped first, +-clip_value. Default: no clipping."""

    @property
    def learning_rate(self) -> float:
        """Learning rate `lr`, or 0.02 if it is not set."""
        return 0.02 if self.lr is None else self.lr


class DenseConfig(Section):
    optimizer: Annotated[Literal["adam", "sgd", "adagrad"], FIXED] = "adam"
    """Optimizer of the dense network, from torch.optim."""
    lr: float | None = Field(None, ge=0)
    """Learning rate of the dense network. Default: for data in files by the number of training samples; else 0.001."""
    weight_decay: float | None = Field(None, ge=0)
    """Weight decay of the dense optimizer, as torch defines it. Default: for data in files by the number of training
    samples; else 0."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Schedule of the dense network's learning rate."""
    clip_norm: float | None = Field(None, gt=0)
    """Largest 2-norm of all dense gradients together; larger gradients are scaled down. Default: no clipping."""

    @property
    def learning_rate(self) -> float:
        """Learning rate `lr`, or 0.001 if it is not set."""
        return 1e-3 if self.lr is None else self.lr


def _validate_loss_scale(value: Any) -> Any:
    if value is None or value == "dynamic":
        return value
    try:
        number = float("nan") if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = float("nan")
    # Within these limits float32 holds the scale and its inverse. Beyond, 0 times inf would put NaN into weights.
    if not 1e-20 <= number <= 1e20:
        raise ValueError(
            f"got {value!r}, wanted dynamic, or a number from 1e-20 to 1e20, e.g. 1024"
        )
    return number


class CodistillConfig(Section):
    """Codistillation: two groups of ranks train the same model with other seeds, each also on what the other one's
    published checkpoints predict for its batches."""

    groups: Literal[1, 2] = 1
    """Number of groups that one command starts, each with the ranks of --ranks: in RUN/group-0 and RUN/group-1, with
    train.seed and train.seed + 1."""
    peer: str | None = None
    """Run folder of the other group, if you start each group yourself; a relative path begins at this run's folder."""
    weight: Annotated[float, FIXED] = Field(1.0, ge=0)
    """Weight of the peer's predictions beside the labels' 1 in the loss, which is divided by the sum of both."""
    every_steps: Annotated[int, FIXED] = Field(100, ge=1)
    """Number of steps between publications for the peer, each of which needs a checkpoint. The teacher of a step is
    between one and two of these intervals old."""
    burn_in_steps: Annotated[int | None, FIXED] = Field(None, ge=0)
    """Number of steps on labels alone, rounded up to a multiple of every_steps; then the weight grows for as many
    steps. Default: a tenth of the run's steps."""
    on_lost: Literal["stop", "alone"] = "stop"
    """Reaction to a peer that has not run for train.timeout while this group waits for it: stop with an error, or go
    on with the labels alone."""

    def choose_teacher_step(self, step: int) -> int:
        """Return the peer's step that teaches the step after `step` updates; 0: none does."""
        first_step = -(-(self.burn_in_steps or 0) // self.every_steps) * self.every_steps
        if self.weight == 0 or step < first_step:
            return 0
        return max(0, self.every_steps * (step // self.every_steps - 1))

    def compute_weight(self, step: int) -> float:
        """Compute the weight of a taught step: it grows linearly over as many steps as the burn-in has."""
        burn_in_steps = self.burn_in_steps or 0
        return self.weight * min(1.0, (step - burn_in_steps + 1) / max(burn_in_steps, 1))


class TrainConfig(Section):
    batch_size: Annotated[int | None, FIXED] = Field(None, ge=1)
    """Number of samples per step over all ranks. The same number trains the same model on any number of ranks. Default:
    for data in files by the number of training samples; else 4096."""
    epochs: int | None = Field(None, ge=0)
    """Number of passes over the training data. Default: for data in files by the number of training samples; else 1."""
    max_steps: int | None = Field(None, ge=0)
    """Number of steps after which training stops even if the epochs are not over. Default: no limit."""
    accumulate: int = Field(1, ge=1)
    """Number of micro-batches per step, of batch_size / accumulate samples each: less memory, the same model up to
    rounding."""
    evaluate_steps: int = Field(0, ge=0)
    """Number of steps between evaluations; 0: at the end of each epoch only."""
    test_at: Literal["end", "evaluations"] = "end"
    """Evaluations of the test part: one, at the end, of the best step; or one at every evaluation. Weights of an
    earlier step that cannot be read back at the end (without a run folder, or in `colonnade.fit`) are tested at
    each best score so far."""
    monitor: str | None = None
    """Metric of the validation part that selects the best step and decides early stopping, e.g. auc, log_loss. Default:
    log_loss for data in files (csv, parquet, ...) with a validation part; else the metric of the objective
    (auc, ndcg@20, mrr, loss)."""
    monitor_mode: MonitorMode | None = None
    """Better values of the monitor: lower (min) or higher (max). Default: known by its name."""
    patience: int | None = Field(None, ge=0)
    """Number of evaluations without a better monitor on the validation part after which training stops early; 0: never.
    Default: 3 for data in files (csv, parquet, ...) with a validation part; 2 or 3 for data sets with one of their own;
    else 0. A default is raised to span 500 steps, so that no run stops before its model has begun to learn."""
    min_delta: float = Field(0.0, ge=0)
    """Smallest improvement of the monitor that counts as better."""
    progressive: Annotated[bool, FIXED] = False
    """Train epoch e on day e of the data, and test on each day before training on it."""
    checkpoint_steps: int = Field(0, ge=0)
    """Number of steps between checkpoints; 0: at the end of each epoch and at each best score."""
    checkpoint_seconds: float = Field(0.0, ge=0)
    """Seconds between checkpoints, in addition to those by steps; 0: none by time."""
    keep_checkpoints: int = Field(2, ge=1)
    """Number of newest checkpoints to keep, in addition to the best one."""
    mirror: str | None = None
    """URL (s3://, gs://, file:// ...) to copy checkpoints to; a run folder without checkpoints is fetched from it.
    Default: none."""
    publish: str | None = None
    """Folder or URL to publish checkpoints to for predictors, as changes since the checkpoint before. Default: none."""
    publish_at: Literal["best", "last"] = "best"
    """Checkpoints to publish if there is a validation part: only those with the best score so far, or all (last)."""
    codistill: CodistillConfig = CodistillConfig()
    """Codistillation with a second group of ranks."""
    warm_start: str | None = None
    """Run folder, or FOLDER@best, @last or @step, that supplies initial weights where names and widths agree. Default:
    none."""
    warm_start_skip: list[str] = []
    """Names of tables and dense parameters that warm_start does not load."""
    seed: Annotated[int, FIXED] = Field(0, ge=0, lt=2**63)
    """Seed of initial rows, initial dense weights and the order of samples."""
    on_non_finite: Literal["stop", "skip"] = "stop"
    """Reaction to NaN or inf in a loss or gradient: stop the run, or skip the step on every rank."""
    autocast: Literal["none", "bfloat16", "float16"] = "none"
    """Data type of the dense network's matrix products; rows and pooled vectors keep their dtype. float16: see
    loss_scale."""
    loss_scale: Annotated[
        float | Literal["dynamic"] | None, PlainValidator(_validate_loss_scale)
    ] = None
    """Factor of the loss before backward, so that small gradients do not vanish in float16. dynamic: start at 65536,
    halve it and skip the step if a gradient is not finite, double it after 2,000 applied steps. Default: none."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device of the dense network, and of rows under plan.memory.hbm. cuda: ranks of a host use its GPUs
    round-robin."""
    timeout: float = Field(300.0, gt=0)
    """Seconds to wait for a rank that does not respond before it counts as lost; 12 times that for checkpoints and the
    start."""
    threads: int = Field(0, ge=0)
    """Number of threads per rank, of torch and of Colonnade. 0: OMP_NUM_THREADS (torchrun sets it to 1 unless you do);
    else the usable processors (affinity and control group quotas), divided among the ranks of the machine."""

    @model_validator(mode="after")
    def _check_train_settings(self) -> TrainConfig:
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
        """Number of samples per step: `batch_size`, or 4096 rounded up to a multiple of `accumulate`."""
        if self.batch_size is not None:
            return self.batch_size
        return -(-DEFAULT_BATCH_SIZE // self.accumulate) * self.accumulate

    @property
    def num_epochs(self) -> int:
        """Number of epochs: `epochs`, or 1 if it is not set."""
        return 1 if self.epochs is None else self.epochs


class RunConfig(Section):
    data: DataConfig = DataConfig()
    model: Annotated[ModelConfig, FIXED] = ModelConfig()
    embedding: EmbeddingConfig = EmbeddingConfig()
    dense: DenseConfig = DenseConfig()
    plan: PlanConfig = PlanConfig()
    train: TrainConfig = TrainConfig()

    @model_validator(mode="after")
    def _check_run_settings(self) -> RunConfig:
        if self.train.accumulate > 1 and self.plan.is_late:
            raise ValueError(
                "got train.accumulate with staleness_steps, of the plan or of a table; bounded staleness counts "
                "batches: leave one of them out"
            )
        if self.plan.cache is not None:
            if self.train.accumulate > 1:
                raise ValueError(
                    f"got train.accumulate={self.train.accumulate} with plan.cache, which counts every batch as one "
                    "step; set train.accumulate=1, or leave plan.cache out"
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
                "got plan.exchange or plan.sharding=auto with plan.memory.hbm, which predictions do not cover; name an "
                "exchange and a sharding, or leave hbm out"
            )
        return self


def list_fixed_settings(config: RunConfig) -> dict[str, Any]:
    """Return the settings that a run keeps for life by dotted name, as JSON has them; digests of long values.

    The others may change when it resumes: learning rates, the plan, and others that decide no scores.
    """
    texts = {
        name: json.dumps(value, sort_keys=True, default=str)
        for name, value in iterate_fixed_settings(config)
        if name.removeprefix("data.options.").split(".")[0] not in CHANGEABLE_OPTIONS
        and (name != "model.towers" or config.model.has_tower_modules)
    }
    return {
        name: json.loads(text)
        if len(text) <= LONGEST_TEXT
        else f"blake2b {hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"
        for name, text in texts.items()
    }


FORMAT = "colonnade config"
OPEN_SECTIONS = (
    ["data", "options"],
    ["plan", "memory", "tables"],
    ["plan", "tables"],
    ["plan", "cache", "tables"],
    ["embedding", "tables"],
    ["embedding", "by_table"],
)
"""Sections that accept any key: names of tables or of a source's options."""
SECTIONS_BY_TABLE: Mapping[str, type[Section]] = {
    "plan.tables": TablePlanConfig,
    "plan.cache.tables": TableCacheConfig,
    "embedding.tables": OpenTableConfig,
    "embedding.by_table": TableEmbeddingConfig,
}
"""Section class of one table, by the setting that maps table names to such sections."""


def build_config(values: Mapping[str, Any]) -> RunConfig:
    """Build and validate a configuration from nested mappings.

    Raises ConfigError with one line per problem and the nearest known name of each unknown key; CheckpointError if the
    values state another format version.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"got a {type(values).__name__}, wanted sections such as `train:`")
    check_format_version("config", values, FORMAT, is_needed=False)
    settings = {
        name: value for name, value in values.items() if name not in make_format_stamp(FORMAT)
    }
    try:
        return RunConfig.model_validate(settings)
    except ValidationError as error:
        raise ConfigError(explain_errors(error, RunConfig)) from None


def load_config(path: str | Path) -> RunConfig:
    """Read a configuration from a YAML file. Raises ConfigError with the file's name."""
    path = Path(path)
    try:
        values = parse_yaml(read_text_file(path))
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


def override_settings(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """Return `config` with settings changed by dotted name, such as `{"train.epochs": 3}`.

    Raises ConfigError for an unknown name.
    """
    values = config.model_dump()
    for name, value in settings.items():
        *sections, key = name.split(".")
        node = values
        for depth, section in enumerate(sections):
            if table_section := SECTIONS_BY_TABLE.get(".".join(sections[:depth])):
                node.setdefault(section, table_section().model_dump())
            if sections[:depth] == ["data", "options"]:
                node.setdefault(section, {})
            if sections[: depth + 1] == ["plan", "cache"] and node[section] is None:
                node[section] = CacheConfig().model_dump()
            if not isinstance(node.get(section), dict):
                raise ConfigError(
                    explain_unknown_setting(".".join(sections[: depth + 1]), node, name)
                )
            node = node[section]
        is_open = sections in OPEN_SECTIONS or sections[:2] == ["data", "options"]
        if key not in node and not is_open:
            raise ConfigError(explain_unknown_setting(name, node, name))
        node[key] = value
    return build_config(values)


def dump_config(config: RunConfig) -> str:
    values = {**make_format_stamp(FORMAT), **config.model_dump()}
    return yaml.dump(values, Dumper=YamlDumper, sort_keys=False)
