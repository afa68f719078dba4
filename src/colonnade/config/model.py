"""Section `model` of a configuration: the network and its settings."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from colonnade.config.section import CHANGEABLE, Section

Width = Annotated[int, Field(ge=1)]


PairVariables = Literal["ids", "fields"]
CrossStructure = Literal["parallel", "stacked"]
LinkLoss = Literal["sigmoid", "softmax"]
MemoryAttention = Literal["softmax", "linear"]
NegativeRelation = Literal["own", "positive", "primary"]


class ModelConfig(Section):
    """Network and its settings. Leave out settings that the chosen model does not have (none); the model supplies
    their defaults."""

    name: Literal[
        "lr",
        "fm",
        "nfm",
        "wide_deep",
        "deepfm",
        "dlrm",
        "dcn",
        "dcnv2",
        "two_tower",
        "sasrec",
        "mrmn",
        "transe",
        "distmult",
        "complex",
        "rotate",
        "graphsage",
        "gplvmf",
    ] = "dlrm"
    """Model to train. `colonnade train --data NAME` has a default for each data set: deepfm for data in files
    (csv, parquet, ...), a model of the data's own kind for others."""
    dim: int | None = Field(None, ge=1)
    """Width of every embedding row, in elements; default 16. Not used by lr, whose rows hold one weight per label."""
    over: PairVariables | None = None
    """Variables whose pairs are multiplied (fm, nfm, deepfm): ids, each id of a sample (default); fields, the pooled
    vector of each column. The same where no column has several ids."""
    bottom: list[Width] | None = None
    """Hidden widths of the MLP over the dense columns (dlrm); default [64, 32]."""
    top: list[Width] | None = None
    """Hidden widths of the last MLP; default [128, 64], for dlrm, dcn and dcnv2 [32] on files of fewer than 200,000
    samples. For two_tower, of each tower's MLP; default []."""
    keep_fields: bool | None = None
    """Feed the last MLP the field vectors in addition to their dot products (dlrm); default: where the data has no
    numbers, and on files of fewer than 200,000 samples."""
    cross_layers: int | None = Field(None, ge=1)
    """Number of cross layers (dcn, dcnv2); default 3."""
    cross_rank: int | None = Field(None, ge=1)
    """Rank of each cross layer's low-rank matrix (dcnv2); default: full rank."""
    cross_experts: int | None = Field(None, ge=1)
    """Number of low-rank matrices (experts) that each cross layer mixes (dcnv2); default 1."""
    structure: CrossStructure | None = None
    """Position of the MLP: parallel to the cross layers or stacked after them (dcnv2); default: parallel."""
    towers: int | str | list[list[str]] | None = None
    """Partition of the features into towers (dlrm, dcnv2): lists of feature names, a file with them, the number of
    towers, to which features are assigned round-robin, or auto, that of the run given by --towers-from; default: no
    towers."""
    tower_dim: int | None = Field(None, ge=1)
    """Width of the vectors that a tower module outputs, one for each field (dlrm, dcnv2); default: no tower modules."""
    tower_ratio: float | None = Field(None, ge=1, allow_inf_nan=False)
    """Least ratio of the columns that enter a tower module to those that leave it, instead of tower_dim (dlrm, dcnv2);
    default: no tower modules."""
    tower_vectors: int | None = Field(None, ge=0)
    """Number of vectors that a tower module outputs for each of its fields (dlrm); default 1."""
    tower_summaries: int | None = Field(None, ge=0)
    """Number of vectors that a tower module outputs for all of its fields together (dlrm); default 0."""
    tower_layers: int | None = Field(None, ge=0)
    """Number of cross layers in a tower module (dcnv2); default 1."""
    item_columns: list[str] | None = None
    """Columns of the item tower, the item's id first (two_tower); default: [item]."""
    query_columns: list[str] | None = None
    """Columns of the query tower (two_tower); default: all columns that are not the item's."""
    temperature: float | None = Field(None, gt=0)
    """Temperature of the softmax. two_tower, sasrec and graphsage divide scores by it; default 0.1. Knowledge graph
    models multiply by it: under loss=sigmoid the softmax weighs the wrong candidates (0.5 to 1); default 1. mrmn has no
    softmax, and adds the log of an item's frequency times it to the scores that rank; default 0.1."""
    margin: float | None = None
    """Constant from which distances are subtracted to get scores; default 9 (transe, rotate), 0 (distmult, complex)."""
    norm: Literal[1, 2] | None = None
    """Norm of distances (transe, rotate): 1, the sum of absolute values or moduli (default); 2, the Euclidean norm,
    which is cheaper."""
    squared: bool | None = None
    """Square the Euclidean distance, which saves the root of norm=2 (transe, rotate, mrmn); default: false."""
    center: float | None = None
    """Constant added to each number of an entity's row (rotate); default 0. Values above 0, e.g. 0.3, learn sooner."""
    reciprocal: bool | None = None
    """Learn a second vector of each relation, for predicting heads (knowledge graph models); default: false."""
    loss: LinkLoss | None = None
    """Loss of knowledge graph models: sigmoid, whether each triple is true (default), or softmax, which entity is the
    answer."""
    penalty: float | None = Field(None, ge=0)
    """Weight of the N3 regularizer, the sum of the cubed absolute values of a triple's numbers (knowledge graph
    models); default 0."""
    slots: int | None = Field(None, ge=0)
    """Number of slots of the memory from which relations are made (mrmn); default 20. 0: no relations, as in CML."""
    attention: MemoryAttention | None = None
    """Weights of the slots (mrmn): softmax (default), or linear, the products themselves."""
    negatives: int | None = Field(None, ge=1)
    """Number of items, those of the next samples of the batch, of which the nearest is a sample's negative (mrmn);
    default 4. More of them are harder, and too many are too hard."""
    negative_relation: NegativeRelation | None = None
    """Relation by which a negative is scored (mrmn): its own (default), that of the positive pair, as in LRML, or
    primary, that of the positive pair and the strongest type."""
    margins: list[float] | None = None
    """Margins by which a positive is to be nearer than its nearest negative, for each type of feedback, the strongest
    first (mrmn); default: evenly from 0.5 to 0.2."""
    type_weights: list[float] | None = None
    """Factors of the loss for each type of feedback, the strongest first (mrmn); default: 1."""
    item_bias: bool | None = None
    """Add a learned number of the item to its scores (mrmn); default: true."""
    blocks: int | None = Field(None, ge=1)
    """Number of attention blocks (sasrec); default 2."""
    heads: int | None = Field(None, ge=1)
    """Number of attention heads of a block, which split `dim` (sasrec); default 1."""
    max_length: int | None = Field(None, ge=1)
    """Number of newest items of a sequence that the model reads (sasrec); default 50."""
    positions: bool | None = None
    """Learn a vector of each position in the sequence (sasrec); default: true. Without, order hardly matters."""
    dropout: float | None = Field(None, ge=0, lt=1)
    """Fraction of activations set to zero in training (sasrec); default 0. Above 0, results depend on the number of
    ranks and agree only on average."""
    prior: bool | None = None
    """Give the latent vectors of items and contexts a standard normal prior (gplvmf); default: true. False: GPFM."""
    compile: Annotated[bool, CHANGEABLE] = False
    """Compile the dense network with torch.compile: slower to start, then faster."""

    @property
    def has_tower_modules(self) -> bool:
        """True if towers change the model; else they only decide where rows are stored."""
        return self.tower_dim is not None or self.tower_ratio is not None
