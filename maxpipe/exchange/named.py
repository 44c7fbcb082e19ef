"""What a user names as a model: a run, one of its checkpoints, or a Hugging Face folder. No jax."""

from __future__ import annotations

import os
from pathlib import Path

from maxpipe.boundary.files import full
from maxpipe.checkpoint.address import Address, parse
from maxpipe.exchange.sections import FILE
from maxpipe.exchange.source import folder_of


def named(text: str) -> Address | Path:
    """The address of a run or checkpoint, or the path of a Hugging Face folder.

    `hf:DIR` is one, and so is a folder with a config.json: that of a run is YAML.

    Raises:
        ConfigError: it is none of them.
    """
    if (folder := folder_of(text)) is not None:
        return full(folder)
    if os.path.isfile(os.path.join(os.path.expanduser(text), FILE)):
        return full(text)
    return parse(text)
