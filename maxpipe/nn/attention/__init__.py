"""Attention backends, keyed by the value of `model.attention`."""

from __future__ import annotations

from collections.abc import Mapping

from maxpipe.models.layers.attention import AUTO
from maxpipe.nn.attention import blockwise, cudnn, splash, xla
from maxpipe.nn.attention.interface import AttentionBackend

BACKENDS: Mapping[str, AttentionBackend] = {
    AUTO: xla.attend,  # used if the platform is unknown
    "xla": xla.attend,
    "blockwise": blockwise.attend,
    "cudnn": cudnn.attend,
    "splash": splash.attend,
}
