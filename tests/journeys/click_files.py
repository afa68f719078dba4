"""Files of made clicks, and the configuration that trains on them."""

from __future__ import annotations

import random

from shell import Shell

CONFIG = """
data: {name: csv, path: clicks.csv, options: {test: test.csv}}
model: {name: deepfm, dim: 4, top: [8]}
embedding: {optimizer: adagrad, lr: 0.05, initial_accumulator: 0.01}
dense: {optimizer: sgd, lr: 0.05, weight_decay: 0}
train: {batch_size: 20, epochs: 2, checkpoint_steps: 25, threads: 1, timeout: 120}
"""
"""Optimizers that do not amplify rounding, so that runs on other numbers of ranks can be compared closely."""
LAST_STEP = 540
ROUNDING = 2e-4
"""Largest difference of two probabilities that only differ by the order in which sums were computed."""


def write_clicks(shell: Shell, name: str, count: int, seed: int) -> None:
    """Write a CSV file of clicks: who saw what, at which price, and whether it was clicked."""
    draw = random.Random(seed)

    def sample() -> tuple[object, ...]:
        user, item = draw.randrange(300), draw.randrange(100)
        clicked = draw.random() < (0.8 if (user + item) % 2 else 0.2)
        return int(clicked), f"u{user}", f"i{item}", f"{draw.random() * 9:.2f}"

    shell.write_table(name, "label,user,item,price", (sample() for _ in range(count)))


def write_shop(shell: Shell, count: int = 6_000) -> None:
    """Write clicks.csv and test.csv, and clicks.yaml that trains on them.

    A tenth of the clicks is the validation part; the others are 270 steps an epoch.
    """
    write_clicks(shell, "clicks.csv", count, seed=1)
    write_clicks(shell, "test.csv", 500, seed=2)
    shell.write("clicks.yaml", CONFIG)
