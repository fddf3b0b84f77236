"""The books of the key/value cache: who owns which page, and which pages hold which prefix.

The tensors themselves are in `pool.py`, which only the runner imports.
"""

from tokenmill.kvcache.cache import Cache, RowPages

__all__ = ["Cache", "RowPages"]
