"""The course's reference KV cache: mixed axes, packed, append-only, inside a real transformer.

Called by `matrix`, `quality` and `cache_bench`. Never rewrites what it has quantized, and never hides
bytes: `nbytes` is what the tokens take, `allocated_nbytes` what their storage takes.
"""

from kvlab.cache.layer import MixedAxisLayer
from kvlab.cache.mixed import MixedAxisCache
from kvlab.cache.packing import AXES, BITS
from kvlab.cache.settings import CacheSettings

__all__ = [
    "AXES",
    "BITS",
    "CacheSettings",
    "MixedAxisCache",
    "MixedAxisLayer",
]
