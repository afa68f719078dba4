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
        ("evaluate",): "argument 'run'",
        ("evaluate", "nowhere"): "nowhere",
        ("evaluate", "nowhere", "--part", "exam"): "part",
        ("bench",): "argument 'name'",
        ("bench", "nothing"): "unknown bench",
        ("doctor", "--verbose"): "--verbose",
        ("report",): "argument 'run'",
        ("report", "nowhere"): "nowhere",
        ("compare", "nowhere", "nowhere"): "nowhere",
        ("inspect", "nowhere"): "nowhere",
        ("export", "nowhere", "there"): "nowhere",
        ("predict", "nowhere", "--path", "x.csv", "--output", "scores.csv"): "nowhere",
        ("predict", "nowhere", "--part", "test", "--output", "scores.xlsx"): "nowhere",
        ("towers",): "argument 'run'",
        ("towers", "nowhere"): "--towers",
        ("towers", "nowhere", "--towers", "2"): "nowhere",
        ("settings", "train.epcohs"): "train.epochs",
    }
    return [Case(" ".join(line), line, (word,)) for line, word in lines.items()]
