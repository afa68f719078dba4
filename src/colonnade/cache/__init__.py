"""Copies of rows that their ranks keep: who has one, how old it is, what it has yet to tell its owner."""

from colonnade.cache.copies import Copies, DeviceCopies, NativeCopies, travelling_bytes

__all__ = ["Copies", "DeviceCopies", "NativeCopies", "travelling_bytes"]
