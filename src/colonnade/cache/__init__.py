"""Row caches: which remote rows a rank stores copies of, their ages, and gradients not yet sent to their owners."""

from colonnade.cache.cached_rows import (
    CachedRows,
    DeviceCachedRows,
    NativeCachedRows,
    count_sent_record_bytes,
)

__all__ = ["CachedRows", "DeviceCachedRows", "NativeCachedRows", "count_sent_record_bytes"]
