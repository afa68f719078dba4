"""The exception tree. Every message says: got / wanted / do this.

ColonnadeError
+-- ConfigError          a setting or a model declaration that cannot work      (ValueError)
+-- DataError            input that does not fit the schema: file, row, column  (ValueError)
|   +-- IdRangeError     an id outside its vocabulary table
+-- ReaderLost           a process that reads ahead of training ended
+-- BudgetExceeded       the rows one window must hold do not fit in the memory budget
+-- StorageError         bytes at rest: full disk, torn or flipped record, wrong table  (OSError)
|   +-- CorruptionError  a checksum does not match; names file and record
|   +-- StoreLocked      another run has this store open
+-- CheckpointError      a checkpoint that does not belong to this model, version or world
+-- NonFiniteError       NaN or inf in input, loss, gradient or exported weights
+-- WorldError           ranks disagree
    +-- PeerLost         another rank ended or hangs
"""

from __future__ import annotations


class ColonnadeError(Exception):
    """Base of everything this package raises on purpose."""


class ConfigError(ColonnadeError, ValueError):
    """A setting, flag or declaration that cannot work."""


class DataError(ColonnadeError, ValueError):
    """Input that does not fit its schema; the message names file, row and column."""


class IdRangeError(DataError):
    """An id outside `0 .. rows - 1` of a vocabulary table."""


class ReaderLost(ColonnadeError, RuntimeError):
    """A process that reads ahead of training ended without a word."""


class BudgetExceeded(ColonnadeError):
    """The rows that must be resident together do not fit in the memory budget."""


class StorageError(ColonnadeError, OSError):
    """The disk or the bytes on it: full, unreadable, or not what was written."""


class CorruptionError(StorageError):
    """A checksum does not match; the message names the file and the record."""


class StoreLocked(StorageError):
    """Another run holds this store."""


class CheckpointError(ColonnadeError):
    """A checkpoint that does not belong to this model, version or world."""


class NonFiniteError(ColonnadeError, ArithmeticError):
    """NaN or inf in the input, the loss, a gradient or exported weights."""


class WorldError(ColonnadeError, RuntimeError):
    """Ranks disagree about what they run."""


class PeerLost(WorldError):
    """Another rank ended or hangs."""
