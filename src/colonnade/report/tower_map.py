"""Report of a run's towers: a chart of the features in the plane, coloured by tower, and tables of the towers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from colonnade.errors import CheckpointError, ConfigError
from colonnade.formats import read_text_file
from colonnade.plan.towers.partition import Measures, TowerMap
from colonnade.report.figures import COLORS, Figure, build_chart
from colonnade.report.formatting import format_bytes, format_count

FILE_NAME = "towers.json"
"""Name of the map in the run folder, written by `colonnade towers`."""
MIN_AGREEMENT = 0.6
"""Agreement of the halves of the samples below which towers are uncertain. No run below it recovered all planted
groups; of those above it, only runs of models that had hardly learned did not (docs/howto/partition.md)."""
MAX_NAMED = 80
"""Number of features up to which names are drawn; beyond it they appear under the pointer."""
SYMBOLS = ("circle", "square", "diamond", "triangle-up")
LOAD_COLUMNS = ("tower", "features", "bytes", "lookups a sample")
AFFINITY_COLUMNS = ("towers", "within", "between")


def read_tower_map(folder: Path) -> TowerMap | None:
    """Read the run's map of towers; None if there is none. Raises CheckpointError naming the file."""
    path = folder / FILE_NAME
    try:
        return TowerMap.from_json(read_text_file(path))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        raise CheckpointError(f"{path}: {error}") from None


def draw_feature_chart(tower_map: TowerMap) -> Figure:
    """Draw one point per feature. The axes have no meaning, so they have one scale and no numbers."""
    names = tower_map.partition.features
    data = []
    for number, tower in enumerate(tower_map.partition.towers):
        points = [tower_map.places[name] for name in tower]
        data.append(
            {
                "type": "scatter",
                "mode": "markers+text" if len(names) <= MAX_NAMED else "markers",
                "x": [x for x, _ in points],
                "y": [y for _, y in points],
                "text": list(tower),
                "textposition": "top center",
                "textfont": {"size": 10},
                "name": f"tower {number}",
                "marker": {
                    "size": 10,
                    "color": COLORS[number % len(COLORS)],
                    "symbol": SYMBOLS[number // len(COLORS) % len(SYMBOLS)],
                },
                "hovertemplate": f"%{{text}}<extra>tower {number}</extra>",
            }
        )
    near = "similar" if tower_map.distance == "coherent" else "dissimilar"
    note = (
        f"Features near each other are {near} ({tower_map.distance} distance): {describe_affinity(tower_map)} over "
        f"{format_count(tower_map.made.get('samples'))} samples; the plane does not show "
        f"{tower_map.stress:.0%} of the squared distances."
    )
    note = " ".join([note, *list_doubts(tower_map)])
    figure = build_chart("Features in the plane", note, data, x="")
    figure["layout"] |= {"height": 480, "hovermode": "closest"}
    figure["layout"]["xaxis"] |= {"showticklabels": False, "zeroline": False}
    figure["layout"]["yaxis"] |= {"showticklabels": False, "zeroline": False, "scaleanchor": "x"}
    return figure


def describe_affinity(tower_map: TowerMap) -> str:
    """Describe what the affinity of two features is, in words that "of two features" can follow."""
    return "mean |cosine|" if tower_map.affinity == "cosine" else "mean interaction"


def list_doubts(tower_map: TowerMap) -> list[str]:
    """Return sentences about what makes the towers uncertain; none where nothing does."""
    doubts = []
    if tower_map.silent:
        what = "vector in any sample" if tower_map.affinity == "cosine" else "interaction"
        names = ", ".join(tower_map.silent)
        doubts.append(f"No {what}, so no affinity to other features: {names}.")
    if tower_map.agreement is not None and tower_map.agreement < MIN_AGREEMENT:
        doubts.append(
            f"These towers are uncertain: {tower_map.agreement:.0%} of the pairs in one tower are the same in towers "
            "from each half of the samples. Train longer, or measure more samples (--batches)."
        )
    return doubts


def format_load_lines(tower_map: TowerMap) -> list[list[str]]:
    """Return the cells of LOAD_COLUMNS, one line per tower."""
    loads = tower_map.learned
    return [
        [str(number), format_count(count), format_bytes(size), format_count(round(lookups, 2))]
        for number, (count, size, lookups) in enumerate(
            zip(loads.count, loads.bytes, loads.lookups, strict=True)
        )
    ]


def format_affinity_lines(tower_map: TowerMap) -> list[list[str]]:
    """Return the cells of AFFINITY_COLUMNS, the learned towers first."""
    partitions: Sequence[tuple[str, Measures]] = (
        ("learned", tower_map.learned),
        ("striped", tower_map.striped),
        ("random", tower_map.random),
    )
    return [
        [name, _format_affinity(measures.within), _format_affinity(measures.between)]
        for name, measures in partitions
    ]


def _format_affinity(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
