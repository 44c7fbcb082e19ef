"""The documents that `data.source=tokens` and `data.source=megatron` name."""

from __future__ import annotations

from maxpipe.config.data_schema import SourceConfig
from maxpipe.data.prepared.megatron import MegatronDocuments
from maxpipe.data.prepared.reader import PreparedDocuments
from maxpipe.data.tokenizer import Tokenizer

IDS = ("tokens", "megatron")
"""Values of `data.source` whose documents are ids already."""


def open_documents(
    config: SourceConfig, tokenizer: Tokenizer
) -> PreparedDocuments | MegatronDocuments:
    """The documents as ids of the tokenizer.

    Raises:
        ConfigError: no such files, or of another tokenizer.
        StorageError: files that are damaged or cannot be read.
    """
    if config.source == "megatron":
        return MegatronDocuments(config.path, tokenizer)
    return PreparedDocuments(config.path, tokenizer)
