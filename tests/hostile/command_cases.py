"""Command lines that cannot work."""

from __future__ import annotations

from case import Case


def cases() -> list[Case]:
    lines = {
        ("tarin",): "train",
        ("train", "--dta", "synthetic"): "--data",
        ("train", "--data"): "--data",
        ("train", "--data", "netflix"): "choose from",
        ("train", "--ranks", "0"): "--ranks",
        ("train", "--ranks", "two"): "--ranks",
        ("train", "--at", "now"): "--at",
        ("train", "a.yaml", "b.yaml"): "b.yaml",
        ("demo", "--samples", "10"): "--samples",
        ("demo", "--samples", "x"): "--samples",
        ("demo", "extra"): "extra",
        ("evaluate",): "RUN",
        ("evaluate", "nowhere"): "nowhere",
        ("evaluate", "nowhere", "--part", "exam"): "part",
        ("bench",): "NAME",
        ("bench", "nothing"): "unknown bench",
        ("doctor", "--verbose"): "--verbose",
    }
    return [Case(" ".join(line), line, (word,)) for line, word in lines.items()]
