"""What a user names as a model: a run, one of its checkpoints, or a Hugging Face folder. No jax."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from maxpipe.checkpoint.address import Address, parse
from maxpipe.errors import ConfigError
from maxpipe.huggingface.sections import FILE
from maxpipe.huggingface.source import folder_of
from maxpipe.io.files import full


def named(text: str, *, average: bool = False, where: str = "", runs: str = "") -> Address | Path:
    """The address of a run or checkpoint, or the path of a Hugging Face folder.

    `hf:DIR` is one, and so is a folder with a config.json: that of a run is YAML. `average`: the
    averaged parameters are meant. `where` and `runs` are those of `parse`.

    Raises:
        ConfigError: it is none of them, or a folder, which has no averages.
    """
    folder = folder_of(text)
    if folder is None and os.path.isfile(os.path.join(os.path.expanduser(text), FILE)):
        folder = text
    if folder is None:
        return dataclasses.replace(parse(text, where, runs), average=average)
    if average:
        rule = "is a Hugging Face folder, which holds no averages."
        raise ConfigError.one("command line: --average", text, rule, "Leave --average out.")
    return full(folder, where) if where else full(folder)
