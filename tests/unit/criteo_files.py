"""Small Criteo files with every shape of field that the real ones have."""

from __future__ import annotations

import random
from pathlib import Path


def criteo_line(rng: random.Random) -> str:
    label = str(int(rng.random() < 0.25))
    counts = [rng.choice(["", "0", "1", "-2", str(rng.randrange(10**6))]) for _ in range(13)]
    words = [f"{rng.randrange(20) * 0x9E3779B1 % 2**32:08x}" for _ in range(26)]
    categories = [rng.choice(["", word, word, word]) for word in words]
    return "\t".join([label, *counts, *categories])


def criteo_lines(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return [criteo_line(rng) for _ in range(count)]


def write_criteo(folder: Path, count: int) -> Path:
    """`folder`, with a train.txt of `count` lines."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.txt").write_text("".join(f"{line}\n" for line in criteo_lines(count)))
    return folder
