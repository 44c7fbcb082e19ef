"""The declaration of the keys that say what a run reads, as `schema.py` has the others."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Where text comes from."""

    source: Literal[
        "corpus", "text", "jsonl", "arrayrecord", "tfds", "tokens", "megatron", "synthetic"
    ] = "corpus"
    """`corpus`: the source files of Python's standard library, on every machine. `text`: files,
    one document each. `jsonl`: one JSON object per line. `arrayrecord`: files of UTF-8 or JSON
    records. `tfds`: a dataset prepared as ArrayRecord. `tokens`: a folder that `maxpipe data
    prepare` wrote. `megatron`: pairs of `.bin` and `.idx` files of token ids. `synthetic`: random
    tokens."""
    path: str = ""
    """File, folder or glob pattern; for `tfds` the name of the dataset, e.g. `c4/en:3.1.0`. Of
    `tokens`, and a pair of `megatron` files, also `gs://BUCKET/PATH`."""
    tfds_dir: str = ""
    """Folder in which `tfds` datasets were prepared. Empty means the tfds default."""
    field: str = "text"
    """Name of the text field in `jsonl`, JSON `arrayrecord` and `tfds` records."""
    chat: Literal["off", "messages", "prompt"] = "off"
    """Whether records are conversations that a chat template makes a text of. `messages`: a list of
    objects with `role` and `content` in `data.messages_field`. `prompt`: `data.prompt_field` and
    `data.response_field`, each a text or such a list."""
    messages_field: str = "messages"
    """Name of the field of messages, with `data.chat=messages`."""
    prompt_field: str = "prompt"
    """Name of the field of what a user says, with `data.chat=prompt`."""
    response_field: str = "response"
    """Name of the field of what an assistant answers, with `data.chat=prompt`."""
    chat_template: str = ""
    """File of the chat template, in Jinja. Empty means that of the tokenizer's folder."""
    chat_roles: list[str] = dataclasses.field(
        default_factory=lambda: ["system", "developer", "user", "assistant", "tool"]
    )
    """Roles that messages may have: another one is a mistake in a record."""
    trained_roles: list[str] = dataclasses.field(default_factory=lambda: ["assistant"])
    """Roles whose messages are trained on. What others say is read, and no loss is taken of it. Of
    `[assistant]` a template's own `{% generation %}` blocks say what is."""
    validation_fraction: float = 0.05
    """Share of the documents, drawn by the seed, that is only used for evaluation."""
    allow_change: bool = False
    """Go on from the run's checkpoint although documents, seed, packing or tokenizer are others
    than when it was saved. Samples may be repeated or left out then."""
    prefetch_batches: int = 4
    """Batches made ready ahead of the step that needs them."""
    threads: int = 2
    """Threads that read and pack."""
