"""What tower modules save and cost, in words: what leaves a tower of what enters it, weights, work of a sample."""

from __future__ import annotations

from torch import nn

from colonnade.embedding import EmbeddingCollection
from colonnade.interaction import TowerModule


def words_of(model: nn.Module, collection: EmbeddingCollection) -> str:
    """One line; nothing where there are no tower modules."""
    modules = [each for each in collection.interactions.values() if isinstance(each, TowerModule)]
    if not modules:
        return ""
    enter, leave = (
        sum(sum(each.dims) for each in modules),
        sum(each.out for each in modules),
    )
    weights = sum(weight.numel() for each in modules for weight in each.parameters())
    fields = "+".join(str(len(each.dims)) for each in modules)
    said = (
        f"{len(modules)} tower modules ({fields} fields): {leave:,} floats of a sample leave them of {enter:,} (CR "
        f"{enter / leave:.2f}); {weights:,} parameters"
    )
    work, flat = getattr(model, "work", None), getattr(model, "flat_work", None)
    if work is None or flat is None:
        return said
    return (
        f"{said}. The dense network takes {work.flops / 1e6:.2f} MFLOP a sample and has {work.parameters:,} "
        f"parameters; without them {flat.flops / 1e6:.2f} and {flat.parameters:,}"
    )
