from colonnade.data.batches import open_batches as open_batches
from colonnade.data.contract import (
    Column as Column,
    Position as Position,
    Schema as Schema,
    Source as Source,
    Splits as Splits,
    num_steps as num_steps,
)
from colonnade.data.graph import open_graph as open_graph
from colonnade.data.interactions.columns import Interactions as Interactions
from colonnade.data.interactions.files import (
    FileOptions as FileOptions,
    read_interactions as read_interactions,
)
from colonnade.data.interactions.samples import (
    group_items_by_user as group_items_by_user,
    open_interaction_splits as open_interaction_splits,
)
from colonnade.data.interactions.splits import (
    InteractionSplit as InteractionSplit,
    SplitOptions as SplitOptions,
    assign_parts as assign_parts,
    build_split as build_split,
)
from colonnade.data.processes import ProcessSource as ProcessSource
from colonnade.data.sets.criteo import open_criteo as open_criteo
from colonnade.data.sets.edges import open_edges as open_edges
from colonnade.data.sets.fb15k237 import open_fb15k237 as open_fb15k237
from colonnade.data.sets.gowalla import open_gowalla as open_gowalla
from colonnade.data.sets.interactions import open_interactions as open_interactions
from colonnade.data.sets.movielens import open_movielens as open_movielens
from colonnade.data.sets.movielens_retrieval import (
    open_movielens_retrieval as open_movielens_retrieval,
)
from colonnade.data.sets.power_law import open_power_law as open_power_law
from colonnade.data.sets.synthetic import open_synthetic as open_synthetic
from colonnade.data.sets.triples import open_triples as open_triples
from colonnade.data.sources import SOURCES as SOURCES, open_source as open_source
from colonnade.data.tabular.arrow import open_arrow as open_arrow
from colonnade.data.tabular.csv import open_csv as open_csv
from colonnade.data.tabular.declaration import (
    FileSchema as FileSchema,
    load_file_schema as load_file_schema,
)
from colonnade.data.tabular.fields import (
    Bag as Bag,
    Bucket as Bucket,
    Category as Category,
    Cross as Cross,
    Group as Group,
    Key as Key,
    Label as Label,
    Number as Number,
    Sequence as Sequence,
    Time as Time,
    Weight as Weight,
)
from colonnade.data.tabular.libsvm import open_libsvm as open_libsvm
from colonnade.data.tabular.parquet import open_parquet as open_parquet
from colonnade.data.tabular.tables import infer_schema as infer_schema
from colonnade.data.tabular.tfrecord import masked_crc as masked_crc, open_tfrecord as open_tfrecord
from colonnade.data.tensors import TensorSource as TensorSource, open_tensors as open_tensors
from colonnade.data.triples import open_triple_tensors as open_triple_tensors
