"""Configuration lemmas (Zou et al. 2017): a short run measures the noise of its gradients; then ranks, servers and a
batch are advised for it.

    python recipes/lemmas.py [FOLDER]

The steps of one process are timed on this machine; those on several hosts are predicted, for links as declared.
"""

import subprocess
import sys


def colonnade(*words: str) -> str:
    command = [sys.executable, "-m", "colonnade", *words]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else "runs/lemmas"
    settings = {
        "data.options": "{num_train: 28000, num_test: 500, cardinalities: [2000, 2000, 500, 90]}",
        "model.dim": "16", "model.bottom": "[32, 16]", "model.top": "[64, 32]",
        "train.batch_size": "256", "train.accumulate": "2",
    }  # fmt: skip
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    colonnade("train", "--data", "synthetic", *words, "--run", folder)
    links = ["--world", "4x1", "--uplink", "1Gbit", "--hosts-up-to", "16"]
    print(colonnade("plan", "--data", "synthetic", *words, "--run", folder, *links, "--advise"))
