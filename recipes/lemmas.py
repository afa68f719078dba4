"""Configuration lemmas (Zou et al. 2017): a short run measures the noise of its gradients; then ranks, servers and a
batch are advised for it.

    python recipes/lemmas.py [FOLDER]

Seconds on several hosts are predicted from steps that are timed here, and from the links as declared.
"""

import sys

from colonnade.cli.app import run_command

if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else "runs/lemmas"
    settings = {
        "data.options": "{num_train: 40000, num_test: 500, cardinalities: [2000, 2000, 500, 90]}",
        "model.dim": "16", "model.bottom": "[32, 16]", "model.top": "[64, 32]",
        "train.batch_size": "256", "train.accumulate": "2",
    }  # fmt: skip
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    run_command(["train", "--data", "synthetic", *words, "--run", folder])
    links = ["--world", "4x1", "--uplink", "1Gbit", "--hosts-up-to", "16"]
    run_command(["plan", "--data", "synthetic", *words, "--run", folder, *links, "--advise"])
