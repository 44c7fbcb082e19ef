"""Declarations of the data keys: sources of documents, mixtures, packing and validation sets."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from maxpipe.config.former_items import upgrade_mixture_stages
from maxpipe.config.items import MixtureStageConfig
from maxpipe.io.typed_json import legacy_value, renamed_from

Packing = Literal["auto", "cut", "first_fit", "best_fit", "pad"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceConfig:
    """A source of documents, and the conversion of its records to text."""

    source: Literal[
        "corpus",
        "text",
        "jsonl",
        "parquet",
        "arrayrecord",
        "huggingface",
        "tfds",
        "tokens",
        "megatron",
        "synthetic",
    ] = "corpus"
    """Format of the documents. `corpus`: the source files of Python's standard library, which
    require no download. `text`: text files, one document per file. `jsonl`: one JSON object per
    line, optionally compressed. `parquet`: one document per row. `arrayrecord`: ArrayRecord files
    with UTF-8 or JSON records. `huggingface`: a folder written by `save_to_disk`. `tfds`: a
    TensorFlow dataset, prepared as ArrayRecord files. `tokens`: a folder written by `maxpipe data
    prepare`. `megatron`: pairs of `.bin` and `.idx` files with token ids. `synthetic`: random
    tokens."""
    path: str = ""
    """File, folder or glob pattern, local or in `gs://BUCKET/...`; for `tfds`, the name of a
    dataset, e.g. `c4/en:3.1.0`. `huggingface` requires a folder."""
    paths: list[str] = dataclasses.field(default_factory=list, hash=False)  # a list has no hash
    """List of paths, which are read in this order. Replaces `data.path`."""
    tfds_dir: str = ""
    """Folder of the prepared `tfds` datasets. If empty, the default data folder of `tfds` is
    used."""
    text_field: str = dataclasses.field(default="text", metadata=renamed_from("field"))
    """Name of the text column in records of `jsonl`, `parquet`, JSON `arrayrecord`, `huggingface`
    and `tfds`. `a.b` denotes the field `b` of the column `a`."""
    template: str = ""
    """Text template over several columns, such as `'{title}\\n\\n{text}'`. Replaces
    `data.text_field`. A column name in braces is replaced by the text or number in that column.
    `{{` and `}}` are literal braces, `\\n` is a line break, and `\\t` is a tab. Other escape
    sequences are not supported."""
    bad_records: Literal["stop", "skip"] = dataclasses.field(
        default="stop", metadata=renamed_from("unreadable")
    )
    """Handling of invalid records, such as malformed lines, missing columns or text that is not
    UTF-8. `stop` ends the run. `skip` treats the record as an empty document. Missing, truncated or
    damaged files always stop the run."""
    max_bad_records: int = dataclasses.field(default=100, metadata=renamed_from("unreadable_limit"))
    """Maximum number of records that `data.bad_records=skip` may skip."""
    max_decompressed_bytes: int = dataclasses.field(
        default=2**36, metadata=renamed_from("largest_unpacked_bytes")
    )
    """Maximum total size in bytes of all compressed files after decompression. Compressed files are
    decompressed once, into `<run.dir>/.index`."""
    chat: Literal["off", "messages", "prompt", "pairs"] = "off"
    """Format of the conversations in records, which a chat template renders as text. `messages`: a
    list of messages in `data.messages_field`. The messages are objects with `role` and `content`,
    ShareGPT objects with `from` and `value`, objects with `input` and `output`, or texts with
    alternating speakers. `prompt`: a prompt in `data.prompt_field` and a response in
    `data.response_field`, each a text or a list of messages. `pairs`, for
    `train.objective=preference`: a prompt in `data.prompt_field`, and two responses in
    `data.chosen_field` and `data.rejected_field`. Texts in these three fields are used without the
    chat template."""
    messages_field: str = "messages"
    """Name of the field that contains the messages. If a record has no field `messages`, the field
    `conversations` is read. Ignored unless `data.chat=messages`."""
    tools_field: str = "tools"
    """Name of the field that contains the tools for the chat template, as a list of objects or as
    JSON text. Records may omit this field. Ignored unless `data.chat` is set."""
    chat_template_kwargs: dict[str, str] = dataclasses.field(default_factory=dict, hash=False)
    """Variables that are passed to the chat template, by name, such as `{enable_thinking: false}`.
    Values that are numbers, `true`, `false` or JSON are parsed. The field `chat_template_kwargs` of
    a record takes precedence. Applies to training, samples, rollouts and `generate --chat`."""
    system_field: str = ""
    """Name of the field that contains the system message, or a template as in `data.prompt_field`.
    Records may omit this field. The field does not replace a system message at the beginning of the
    messages. If this key is empty, only the field `system` of ShareGPT records is read. Ignored
    unless `data.chat` is set."""
    prompt_field: str = "prompt"
    """Name of the field that contains the prompt, if `data.chat` is `prompt` or `pairs`. A value
    with braces is a template over several fields, as in `data.template`:
    `'{instruction}\\n{input}'`. A line of the template is omitted if a record lacks the fields in
    that line. With `pairs`, the value may be empty: both responses are then full conversations, and
    their common beginning is the prompt. Also applies to `grpo.prompts`."""
    response_field: str = "response"
    """Name of the field that contains the response, or a template as in `data.prompt_field`.
    Ignored unless `data.chat=prompt`."""
    chosen_field: str = "chosen"
    """Name of the field that contains the chosen response. Ignored unless `data.chat=pairs`."""
    rejected_field: str = "rejected"
    """Name of the field that contains the rejected response. Ignored unless `data.chat=pairs`."""
    long_pairs: Literal["truncate", "drop", "error"] = "truncate"
    """Handling of pairs that do not fit into one sequence. A pair has two halves: the prompt with
    the chosen response, and the prompt with the rejected response. `truncate` removes tokens at the
    end of the longer half, or of both halves if they have equal lengths. It drops the pair if no
    token of a response remains. `drop` skips the pair, and `error` ends the run. The run prints the
    number of such pairs. Ignored unless `data.chat=pairs`."""
    chat_template: str = ""
    """File that contains the chat template, in Jinja. If empty, the template in the tokenizer's
    folder is used."""
    chat_roles: list[str] = dataclasses.field(
        default_factory=lambda: ["system", "developer", "user", "assistant", "tool"]
    )
    """Allowed roles of messages. Records with other roles are invalid."""
    trained_roles: list[str] = dataclasses.field(default_factory=lambda: ["assistant"])
    """Roles whose messages contribute to the loss. All other messages are only context. With
    `[assistant]`, `{% generation %}` blocks of the chat template select the trained tokens."""
    rewritten_history: Literal["last", "each_turn", "error"] = "last"
    """Handling of messages that the chat template renders differently when more messages follow.
    For example, templates of reasoning models remove the reasoning from earlier responses. `last`:
    such a message is only context, so the model is trained only on the last response. `each_turn`:
    every trained message becomes a separate sample, with the preceding conversation as context.
    `error`: such a message ends the run. `last` and `error` are ignored for templates with `{%
    generation %}` blocks."""
    long_conversations: Literal["truncate", "drop", "split", "error"] = dataclasses.field(
        default="truncate", metadata=legacy_value("split")
    )
    """Handling of conversations longer than `train.sequence_length`. `truncate` removes tokens at
    the end, `drop` skips the conversation, and `error` ends the run. `split` splits the
    conversation across sequences, so the model may be trained on a response without its prompt. The
    run prints the number of long conversations. Ignored for plain texts. For pairs, see
    `data.long_pairs`."""
    packing: Packing = dataclasses.field(default="auto", metadata=legacy_value("cut"))
    """Packing of documents into sequences. `auto`: `best_fit` for conversations and pairs, `cut`
    for plain texts. `cut`: documents are concatenated and split across sequences. All other values
    keep documents that fit into a sequence together, and pad the remaining positions of each
    sequence. A document longer than a sequence fills complete sequences, and its remainder is
    packed like a separate document. `best_fit`: the longest documents are packed first, each into
    the sequence with the least remaining space that is sufficient. `best_fit` needs the fewest
    sequences. `first_fit`: documents are packed in shuffled order, each into the first sequence
    with enough space. `pad`: one document per sequence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedSourceConfig(SourceConfig):
    """A source of documents in `data.mixture`, and its share of the sequences."""

    weight: float = 0.0
    """Relative share of the sequences: the weight divided by the sum of all weights. If no source
    has a weight or epochs, shares are proportional to the sizes of the sources."""
    epochs: float = 0.0
    """Number of passes over this source, relative to the passes over the other sources. Epochs
    replace weights, and must be set for all sources or for none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig(SourceConfig):
    """Training and validation documents, mixtures, and the data loader."""

    mixture: dict[str, MixedSourceConfig] = dataclasses.field(default_factory=dict)
    """Named sources that replace `data.source`, such as `data.mixture.web.path=web/*.txt`. Each
    sequence contains documents of only one source. When a run resumes, weights may change, but
    sources may not."""
    mixture_temperature: float = 1.0
    """Sampling temperature of the mixture. Weights are raised to the power of 1 / temperature, so
    values above 1 make the shares more equal."""
    mixture_stages: list[MixtureStageConfig] = dataclasses.field(
        default_factory=list, metadata=renamed_from(values=upgrade_mixture_stages)
    )
    """Stages with different mixture weights at the start of the run, such as `[{weights: {web: 0.9,
    code: 0.1}, steps: 1000}]`. A source that a stage does not list has weight 0 in that stage.
    After the last stage, the weights in `data.mixture` apply."""
    end: Literal["repeat", "stop", "fail"] = "repeat"
    """Behavior when the documents are exhausted before the end of the run. `repeat` reads them
    again in a new order, any number of times. `stop` ends the run with an evaluation and a
    checkpoint. `fail` rejects such a run at the start. A source of a mixture is exhausted after its
    `epochs`, or after one pass. With `stop`, the share of an exhausted source is divided among the
    remaining sources, until all are exhausted."""
    max_pairs_per_sequence: int = dataclasses.field(
        default=16, metadata=renamed_from("pairs_per_row")
    )
    """Maximum number of pairs per sequence, which determines the number of pairs in a batch. If
    pairs are shorter than `train.sequence_length` divided by this number, sequences are padded.
    Ignored unless `data.chat=pairs`."""
    validation_fraction: float = 0.05
    """Fraction of the documents that is reserved for evaluation. The documents are selected at
    random with `run.seed`."""
    validation: dict[str, SourceConfig] = dataclasses.field(default_factory=dict)
    """Additional validation sets by name, such as `data.validation.code.path=code/*.py`. Each set
    has a separate loss metric, such as `eval/code/loss`. `eval/loss` is the loss on the documents
    of `data.validation_fraction`, or on all sets together if that fraction is 0."""
    validation_overlap: Literal["warn", "stop", "ignore"] = "warn"
    """Handling of validation documents whose text also occurs in the training documents. Such an
    overlap makes the validation loss too low. `warn` prints a warning, `stop` ends the run, and
    `ignore` disables the check. Documents are compared by a digest of their full text. More than a
    million prepared documents are compared only with `stop`, because all digests must be read."""
    allow_change: bool = False
    """Allow a run to resume if the documents, seed, packing or tokenizer have changed since the
    checkpoint was saved. Samples may then be repeated or skipped."""
    prefetch_batches: int = 4
    """Number of batches that are prepared in advance."""
    threads: int = 2
    """Number of threads that read and pack documents."""
