from __future__ import annotations

import torch
from interaction import InteractionContract

from colonnade import FM, BiInteraction, Concat, Sum


class TestFM(InteractionContract):
    def make(self):
        return FM()

    def expected(self, fields):
        total = torch.zeros(len(fields), 1, dtype=fields.dtype)
        for i in range(fields.shape[1]):
            for j in range(i):
                total += (fields[:, i] * fields[:, j]).sum(1, keepdim=True)
        return total


class TestConcat(InteractionContract):
    def make(self):
        return Concat()

    def expected(self, fields):
        return torch.cat([fields[:, f] for f in range(fields.shape[1])], 1)


class TestSum(InteractionContract):
    def make(self):
        return Sum()

    def expected(self, fields):
        return sum(fields.unbind(1))


class TestBiInteraction(InteractionContract):
    def make(self):
        return BiInteraction()

    def expected(self, fields):
        total = torch.zeros(len(fields), fields.shape[2], dtype=fields.dtype)
        for i in range(fields.shape[1]):
            for j in range(i):
                total += fields[:, i] * fields[:, j]
        return total
