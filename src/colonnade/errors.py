"""Exceptions of Colonnade. Every message has the form: got / wanted / do this.

ColonnadeError
+-- ConfigError          a setting or a model declaration that cannot work      (ValueError)
+-- DataError            input that does not fit the schema: file, row, column  (ValueError)
|   +-- IdRangeError     an id outside its vocabulary table
+-- ReaderLost           a process that reads batches ahead of training ended
+-- BudgetExceeded       the rows of the batches in flight do not fit in the memory budget
+-- StorageError         stored bytes: full disk, torn or flipped record, wrong table  (OSError)
|   +-- CorruptionError  a checksum does not match; names file and record
|   +-- StoreLocked      another run has this store open
+-- CheckpointError      a checkpoint that does not belong to this model, version or world
+-- NonFiniteError       NaN or inf in input, loss, gradient or exported weights
+-- CallbackError        a callback or metric of the user raised; names it
+-- WorldError           ranks disagree
    +-- PeerLost         another rank ended or hangs
"""

from __future__ import annotations


class ColonnadeError(Exception):
    """Base class of the exceptions that this package raises deliberately."""


class ConfigError(ColonnadeError, ValueError):
    """Setting, flag or declaration that cannot work."""


class DataError(ColonnadeError, ValueError):
    """Input that does not fit its schema; the message names file, row and column."""


class IdRangeError(DataError):
    """Id outside `0 .. rows - 1` of a vocabulary table."""


class ReaderLost(ColonnadeError, RuntimeError):
    """Process that reads batches ahead of training ended without an error message."""


class BudgetExceeded(ColonnadeError):
    """Memory budget too small for the rows that must be resident together."""


class StorageError(ColonnadeError, OSError):
    """Storage failure: the disk is full or unreadable, or its bytes are not those that were written."""


class CorruptionError(StorageError):
    """Checksum mismatch; the message names the file and the record."""


class StoreLocked(StorageError):
    """Store that another run has open."""


class CheckpointError(ColonnadeError):
    """Checkpoint that does not belong to this model, version or world."""


class NonFiniteError(ColonnadeError, ArithmeticError):
    """NaN or inf in the input, the loss, a gradient or exported weights."""


class CallbackError(ColonnadeError, RuntimeError):
    """Exception of a callback or metric of the user; `__cause__` is what it raised."""


class WorldError(ColonnadeError, RuntimeError):
    """World whose ranks run different programs or settings."""


class PeerLost(WorldError):
    """Peer rank that ended or hangs."""
