"""What a model's configuration says about the shape of its Keys.

Used by `bytes_held` and `outliers`. Reads the configuration and nothing else.
"""

from __future__ import annotations

from typing import Any


def kv_heads(config: Any) -> int:
    """Key and Value heads of a layer; as many as query heads where the model says nothing."""
    given = getattr(config, "num_key_value_heads", None)
    return int(given or config.num_attention_heads)


def head_dim(config: Any) -> int:
    """Channels of one head."""
    given = getattr(config, "head_dim", None)
    return int(given or config.hidden_size // config.num_attention_heads)
