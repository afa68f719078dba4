"""Towers of a run's features: where features lie in the plane, coloured by tower, and how good the towers are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from colonnade.errors import CheckpointError, ConfigError
from colonnade.formats import read_text
from colonnade.plan.towers.partition import Measures, TowerMap
from colonnade.report.figures import COLORS, Figure, chart
from colonnade.report.words import bytes_words, count_words

FILE_NAME = "towers.json"
"""In the run folder, where `colonnade towers` puts it."""
MAX_NAMED = 80
"""Of more features, names are left to the pointer."""
SYMBOLS = ("circle", "square", "diamond", "triangle-up")
LOAD_COLUMNS = ("tower", "features", "bytes", "lookups a sample")
AFFINITY_COLUMNS = ("towers", "within", "between")


def read_towers(folder: Path) -> TowerMap | None:
    """None where the run has no map. Raises CheckpointError naming the file."""
    path = folder / FILE_NAME
    try:
        return TowerMap.from_json(read_text(path))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        raise CheckpointError(f"{path}: {error}") from None


def plane(found: TowerMap) -> Figure:
    """One point for each feature. Axes have no meaning, so they have no numbers, and one scale for both."""
    names = found.partition.features
    data = []
    for number, tower in enumerate(found.partition.towers):
        places = [found.places[name] for name in tower]
        data.append(
            {
                "type": "scatter",
                "mode": "markers+text" if len(names) <= MAX_NAMED else "markers",
                "x": [x for x, _ in places],
                "y": [y for _, y in places],
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
    near = "alike" if found.distance == "coherent" else "unlike"
    note = (
        f"Features near each other are {near} ({found.distance} distance). Mean |cosine| of pooled vectors over "
        f"{count_words(found.made.get('samples'))} samples; the plane leaves {found.stress:.0%} of the squared "
        "distances out."
    )
    figure = chart("Features in the plane", note, data, x="")
    figure["layout"] |= {"height": 480, "hovermode": "closest"}
    figure["layout"]["xaxis"] |= {"showticklabels": False, "zeroline": False}
    figure["layout"]["yaxis"] |= {"showticklabels": False, "zeroline": False, "scaleanchor": "x"}
    return figure


def load_lines(found: TowerMap) -> list[list[str]]:
    """Words for LOAD_COLUMNS, tower by tower."""
    held = found.learned
    return [
        [str(number), count_words(count), bytes_words(size), count_words(round(lookups, 2))]
        for number, (count, size, lookups) in enumerate(
            zip(held.count, held.bytes, held.lookups, strict=True)
        )
    ]


def affinity_lines(found: TowerMap) -> list[list[str]]:
    """Words for AFFINITY_COLUMNS: the learned towers first."""
    named: Sequence[tuple[str, Measures]] = (
        ("learned", found.learned),
        ("striped", found.striped),
        ("random", found.random),
    )
    return [[name, _words(each.within), _words(each.between)] for name, each in named]


def _words(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
