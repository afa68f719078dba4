"""Codistillation (Anil et al. 2018): two groups of ranks with other seeds, each taught by what the other one published.

    python recipes/codistill.py [FOLDER]

Each group is one rank here. The last lines say how much the two disagree on the test samples.
"""

import subprocess
import sys


def colonnade(*words: str) -> str:
    command = [sys.executable, "-m", "colonnade", *words]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else "runs/codistill"
    settings = {
        "data.options": "{num_train: 20000, num_test: 4000, cardinalities: [1000, 500, 200]}",
        "model.dim": "8", "model.bottom": "[16, 8]", "model.top": "[16]", "dense.lr": "0.01",
        "embedding.lr": "0.1", "train.batch_size": "125", "train.threads": "1",
        "train.codistill": "{groups: 2, every_steps: 16, burn_in_steps: 64, weight: 2}",
    }  # fmt: skip
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    print(colonnade("train", "--data", "synthetic", *words, "--run", folder))
    print(colonnade("churn", f"{folder}/group-0", f"{folder}/group-1"))
