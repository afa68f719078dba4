from colonnade.models.dcn import DCN as DCN, DCNv2 as DCNv2
from colonnade.models.dlrm import DLRM as DLRM
from colonnade.models.gplvmf import GPLVMF as GPLVMF
from colonnade.models.graphsage import GraphSAGE as GraphSAGE
from colonnade.models.knowledge import (
    ComplEx as ComplEx,
    DistMult as DistMult,
    RotatE as RotatE,
    TransE as TransE,
)
from colonnade.models.linear import (
    LR as LR,
    NFM as NFM,
    DeepFM as DeepFM,
    FactorizationMachine as FactorizationMachine,
    WideDeep as WideDeep,
)
from colonnade.models.mrmn import MRMN as MRMN
from colonnade.models.retriever import (
    RetrievalObjective as RetrievalObjective,
    Retriever as Retriever,
)
from colonnade.models.sasrec import SASRec as SASRec
from colonnade.models.split import Scorer as Scorer, SplitModel as SplitModel
from colonnade.models.tower_modules import describe_tower_modules as describe_tower_modules
from colonnade.models.two_tower import TwoTower as TwoTower
