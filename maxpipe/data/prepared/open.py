"""The documents that `data.source=tokens` and `data.source=megatron` name."""

from __future__ import annotations

from maxpipe.config.schema import DataConfig
from maxpipe.data.prepared.megatron import MegatronDocuments
from maxpipe.data.prepared.reader import PreparedDocuments
from maxpipe.data.tokenizer import Tokenizer

IDS = ("tokens", "megatron")
"""Values of `data.source` whose documents are ids already."""


def open_documents(data: DataConfig, tokenizer: Tokenizer) -> PreparedDocuments | MegatronDocuments:
    """The documents as ids of the tokenizer.

    Raises:
        ConfigError: no such files, or of another tokenizer.
        StorageError: files that are damaged or cannot be read.
    """
    if data.source == "megatron":
        return MegatronDocuments(data.path, tokenizer)
    return PreparedDocuments(data.path, tokenizer)
