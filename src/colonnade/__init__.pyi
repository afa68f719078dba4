from collections.abc import Callable
from typing import Any

from colonnade.batch import Batch as Batch, Ids as Ids
from colonnade.comm.mesh import Mesh as Mesh
from colonnade.comm.process_groups import close_mesh as close_mesh, open_mesh as open_mesh
from colonnade.config.plan import PlanConfig as PlanConfig
from colonnade.embedding import EmbeddingCollection as EmbeddingCollection
from colonnade.errors import (
    BudgetExceeded as BudgetExceeded,
    CallbackError as CallbackError,
    CheckpointError as CheckpointError,
    ColonnadeError as ColonnadeError,
    ConfigError as ConfigError,
    DataError as DataError,
    NonFiniteError as NonFiniteError,
    StorageError as StorageError,
    WorldError as WorldError,
)
from colonnade.interaction import (
    FM as FM,
    BiInteraction as BiInteraction,
    Concat as Concat,
    FieldsLinear as FieldsLinear,
    Interaction as Interaction,
    LowRankCross as LowRankCross,
    NormalizedLinear as NormalizedLinear,
    Sum as Sum,
    TargetAttention as TargetAttention,
    TowerModule as TowerModule,
)
from colonnade.lookup.stacking import stacked_rows as stacked_rows
from colonnade.models.ranking import (
    average_metrics as average_metrics,
    evaluation_mode as evaluation_mode,
)
from colonnade.optimizers import (
    FTRL as FTRL,
    LAMB as LAMB,
    SGD as SGD,
    Adagrad as Adagrad,
    Adam as Adam,
    AdamW as AdamW,
    RowWiseAdagrad as RowWiseAdagrad,
    RowWiseAdam as RowWiseAdam,
    SparseOptimizer as SparseOptimizer,
)
from colonnade.plan.build import build_plan as build_plan
from colonnade.plan.constraints import shard_in_towers as shard_in_towers
from colonnade.plan.plan import Plan as Plan
from colonnade.predict.churn import measure_churn as measure_churn
from colonnade.predict import Predictor as Predictor
from colonnade.processors import count_usable_processors as count_usable_processors
from colonnade.publish.model_writer import export_run as export_run
from colonnade.publish.mirror import fetch_run as fetch_run
from colonnade.publish.transfer import (
    load_export as load_export,
    load_rows as load_rows,
    to_embedding as to_embedding,
    trained_ids as trained_ids,
)
from colonnade.retention import (
    AgeEviction as AgeEviction,
    CountMinAdmission as CountMinAdmission,
    MaxRowsEviction as MaxRowsEviction,
    RandomAdmission as RandomAdmission,
)
from colonnade.row_optimizer import RowOptimizer as RowOptimizer
from colonnade.row_state import (
    dense_state_dict as dense_state_dict,
    load_dense_state_dict as load_dense_state_dict,
)
from colonnade.run.fit import FitResult as FitResult, fit as fit, load_checkpoint as load_checkpoint
from colonnade.serve.links import rank_answers as rank_answers
from colonnade.serve.recommend import Recommender as Recommender
from colonnade.serve.records import build_encoder as build_encoder
from colonnade.staleness import RowClock as RowClock, TableCache as TableCache
from colonnade.table import Feature as Feature, Table as Table, Uniform as Uniform
from colonnade.topology.sharding import (
    HotRows as HotRows,
    Sharding as Sharding,
    column_wise as column_wise,
    grid as grid,
    host_wise as host_wise,
    replicated as replicated,
    row_wise as row_wise,
    table_wise as table_wise,
)
from colonnade.topology.towers import Partition as Partition
from colonnade.topology.world import World as World
from colonnade.train.callbacks import Callback as Callback, RunEvent as RunEvent
from colonnade.train.metrics import best_possible_metrics as best_possible_metrics
from colonnade.train.objective import Objective as Objective, weighted_loss as weighted_loss

__version__: str

def _attach_stub(
    package: str, init_file: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]: ...
