"""The documents that `data.source=tokens` and `data.source=megatron` name."""

from __future__ import annotations

from maxpipe.config.data_schema import SourceConfig
from maxpipe.data.formats.digests import Digests
from maxpipe.data.formats.source import Moved
from maxpipe.data.prepared.megatron import MegatronDocuments
from maxpipe.data.prepared.reader import PreparedDocuments
from maxpipe.data.tokenizer import Tokenizer

IDS = ("tokens", "megatron")
"""Values of `data.source` whose documents are ids already."""


def open_documents(
    config: SourceConfig,
    tokenizer: Tokenizer,
    digests: Digests | None = None,
    moved: Moved | None = None,
) -> PreparedDocuments | MegatronDocuments:
    """The documents as ids of the tokenizer.

    `digests` are for files that have none of their own: see `MegatronDocuments`.

    Raises:
        ConfigError: no such files, or of another tokenizer.
        StorageError: files that are damaged or cannot be read.
    """
    if config.source == "megatron":
        return MegatronDocuments(config.path, tokenizer, digests, moved)
    return PreparedDocuments(config.path, tokenizer)
