"""The devices that tests of rows in a device's memory run on: the same tests on each."""

from __future__ import annotations

import pytest
import torch

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU on this machine")
DEVICES = ["cpu", pytest.param("cuda", marks=CUDA)]
