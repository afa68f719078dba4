"""*When* a row may be read relative to updates. What travels is `exchange/`; where rows rest is `store/`."""

from __future__ import annotations

from typing import Protocol


class Consistency(Protocol):
    """A pure value. Only row values may be stale: dense weights are always those of the step."""

    @property
    def name(self) -> str: ...

    @property
    def reads_ahead(self) -> int:
        """Steps between a batch's read and its use; also the number of fetched batches held in between."""
        ...

    def newest_visible(self, step: int) -> int:
        """The newest update (by step) that the read for `step` sees; below 0: none. It sees every older one. With a row
        clock it may see newer ones."""
        ...
