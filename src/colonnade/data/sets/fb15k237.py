"""FB15k-237 knowledge graph (Toutanova and Chen 2015) in OpenKE's files, with the settings of its figures."""

from __future__ import annotations

from pathlib import Path

from colonnade.data.contract import Splits
from colonnade.data.lines import locate_data_file
from colonnade.data.sets.triples import MODEL_PRESETS, PRESET, open_triples

FOLDER = "fb15k237"

__all__ = ["MODEL_PRESETS", "PRESET", "open_fb15k237"]


def open_fb15k237(
    path: str | Path | None = None,
    *,
    seed: int = 0,
    candidates: int = 1,
    subsample: bool = True,
    max_validation: int | None = None,
    entity_names: str | None = None,
    relation_names: str | None = None,
) -> Splits:
    """Open the graph in the folder `path`; default `$COLONNADE_DATA/fb15k237`. The options are those of `triples`."""
    folder = locate_data_file(path, data_set_folder=FOLDER, file_name="train2id.txt").parent
    return open_triples(
        folder,
        seed=seed,
        candidates=candidates,
        subsample=subsample,
        max_validation=max_validation,
        entity_names=entity_names,
        relation_names=relation_names,
    )
