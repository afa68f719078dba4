"""Program of every rank: train the laws' model, leave what came of it in a file."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from scenario import train

from colonnade import close_mesh, open_mesh

SIZES = [24, 23, 3]


def main(folder: str) -> None:
    mesh = open_mesh()
    trained = train(mesh, sizes=SIZES, steps=len(SIZES))
    torch.save((trained, mesh.world), Path(folder) / f"rank-{mesh.rank}.pt")
    close_mesh(mesh)


if __name__ == "__main__":
    main(sys.argv[1])
