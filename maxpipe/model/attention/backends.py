"""The backends of attention by their names, the values of `model.attention`."""

from __future__ import annotations

from collections.abc import Mapping

from maxpipe.model.attention import blockwise, cudnn, splash, xla
from maxpipe.model.attention.interface import Attend
from maxpipe.model.parts.attention import AUTO

BACKENDS: Mapping[str, Attend] = {
    AUTO: xla.attend,  # where the device is not known
    "xla": xla.attend,
    "blockwise": blockwise.attend,
    "cudnn": cudnn.attend,
    "splash": splash.attend,
}
