"""Section `model` of a configuration: which network, and its settings."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from colonnade.config.section import Section

Width = Annotated[int, Field(ge=1)]


class ModelConfig(Section):
    """A setting that the chosen model does not have must be left out (none); its default is the model's own."""

    name: Literal[
        "lr", "fm", "nfm", "wide_deep", "deepfm", "dlrm", "dcn", "dcnv2", "two_tower", "sasrec", "transe",
        "distmult", "complex", "rotate", "graphsage",
    ] = "dlrm"  # fmt: skip
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
    towers: int | str | list[list[str]] | None = None
    """Features that stand together (dlrm, dcnv2): a partition, its file, or how many, dealt in turn; default: none."""
    tower_dim: int | None = Field(None, ge=1)
    """Of the vectors that leave a tower's module, one for each field (dlrm, dcnv2); default: no modules."""
    tower_vectors: int | None = Field(None, ge=0)
    """Vectors that leave a tower for each of its fields (dlrm); default 1."""
    tower_summaries: int | None = Field(None, ge=0)
    """Vectors that leave a tower for all of its fields together (dlrm); default 0."""
    tower_layers: int | None = Field(None, ge=0)
    """Cross layers in a tower (dcnv2); default 1."""
    item_columns: list[str] | None = None
    """Columns that say which item it is, its id first (two_tower); default: item."""
    query_columns: list[str] | None = None
    """Columns of who asks (two_tower); default: all that are not the item's."""
    temperature: float | None = Field(None, gt=0)
    """Scores are divided by it before the softmax (two_tower, sasrec, graphsage); of knowledge graphs, multiplied: with
    loss sigmoid the softmax says how much each wrong candidate counts, 0.5 to 1."""
    margin: float | None = None
    """What scores start from, of which distances are taken off (transe, rotate: 9; distmult, complex: 0)."""
    norm: Literal[1, 2] | None = None
    """Of distances: 1, sums of absolute differences, or moduli; 2, Euclid's, which is cheaper (transe, rotate)."""
    squared: bool | None = None
    """Whether norm 2 is without its root (transe, rotate); default: false."""
    center: float | None = None
    """What an entity's numbers are before its row is added (rotate); default 0. Above 0, e.g. 0.3, learns sooner."""
    reciprocal: bool | None = None
    """Of knowledge graphs: whether a relation has a second vector, for the question "which head?"; default: false."""
    loss: Literal["sigmoid", "softmax"] | None = None
    """Of knowledge graphs: whether a triple is true, or which of all entities is the answer."""
    penalty: float | None = Field(None, ge=0)
    """Of knowledge graphs: times the sum of the cubes of a triple's numbers, added to its loss; default 0."""
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
