"""The declaration of the keys that say what a run reads, as `schema.py` has the others."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from maxpipe.io.typed_json import renamed_from

Packing = Literal["auto", "cut", "first_fit", "best_fit", "pad"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceConfig:
    """Documents, and how they become text."""

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
    """`corpus`: the source files of Python's standard library, on every machine. `text`: files,
    one document each. `jsonl`: one JSON object per line, perhaps compressed. `parquet`: a row each.
    `arrayrecord`: files of UTF-8 or JSON records. `huggingface`: a folder that `save_to_disk`
    wrote. `tfds`: a dataset prepared as ArrayRecord. `tokens`: a folder that `maxpipe data prepare`
    wrote. `megatron`: pairs of `.bin` and `.idx` files of token ids. `synthetic`: random tokens."""
    path: str = ""
    """File, folder or glob pattern, in a file system or `gs://BUCKET/...`; for `huggingface` a
    folder, for `tfds` the name of the dataset, e.g. `c4/en:3.1.0`."""
    paths: list[str] = dataclasses.field(default_factory=list, hash=False)  # a list has no hash
    """Several of them, in the order in which they are read, in place of `data.path`."""
    tfds_dir: str = ""
    """Folder in which `tfds` datasets were prepared. Empty means the tfds default."""
    text_field: str = dataclasses.field(default="text", metadata=renamed_from("field"))
    """Name of the column with the text in records of `jsonl`, `parquet`, JSON `arrayrecord`,
    `huggingface` and `tfds`; `a.b` is the part `b` of the column `a`."""
    template: str = ""
    """Text of several columns in place of `data.text_field`, such as `'{title}\\n\\n{text}'`: each name
    in braces is replaced by that column's text or number, `{{` and `}}` by braces, `\\n` and `\\t`
    by a line break and a tab. Nothing else is special."""
    bad_records: Literal["stop", "skip"] = dataclasses.field(
        default="stop", metadata=renamed_from("unreadable")
    )
    """What a record that is no document does, such as a broken line, other columns or text that is
    not UTF-8: `stop` the run, or `skip` it, as an empty document. Files that are missing, cut or
    damaged always stop."""
    max_bad_records: int = dataclasses.field(default=100, metadata=renamed_from("unreadable_limit"))
    """The most records that `data.bad_records=skip` may skip."""
    max_decompressed_bytes: int = dataclasses.field(
        default=2**36, metadata=renamed_from("largest_unpacked_bytes")
    )
    """The most that all compressed files together may hold. They are unpacked once, into
    `<run.dir>/.index`."""
    chat: Literal["off", "messages", "prompt", "pairs"] = "off"
    """Format of conversations in records; a chat template renders them as text. `messages`: a list
    of objects with `role` and `content`, ShareGPT's `from` and `value`, or `input` and `output`, or
    a list of texts in turns, in `data.messages_field`. `prompt`: a text or a list of messages in
    `data.prompt_field` and in `data.response_field`. `pairs`, for `train.objective=preference`: a
    prompt in `data.prompt_field`, and two responses in `data.chosen_field` and
    `data.rejected_field`. Each is such a list, or a text that is used without a template."""
    messages_field: str = "messages"
    """Name of the field of messages, with `data.chat=messages`. `conversations` is read where a
    record has no `messages`."""
    tools_field: str = "tools"
    """Name of the field of tools that the template is given: a list of objects, or its JSON. A
    record may lack it. Ignored unless `data.chat` is set."""
    chat_template_kwargs: dict[str, str] = dataclasses.field(default_factory=dict, hash=False)
    """Names and values that the chat template is given, such as `{enable_thinking: false}`.
    Numbers, `true`, `false` and JSON are read as such. The field `chat_template_kwargs` of a record
    takes precedence. Applies to training, samples, rollouts and `generate --chat`."""
    system_field: str = ""
    """Name of the field of the system message, or a template as in `data.prompt_field`. A record
    may lack it. Records whose messages begin with a system message keep that one. Empty means that
    only `system` of ShareGPT records is read. Ignored unless `data.chat` is set."""
    prompt_field: str = "prompt"
    """Field of the prompt, with `data.chat` `prompt` and `pairs`. With `pairs` it may be empty:
    both responses are full conversations, and their common beginning is the prompt. A value with
    braces is a template over several fields, as in `data.template`: `'{instruction}\\n{input}'`. A
    line of the template is left out if a record lacks its fields. Applies to `grpo.prompts` too."""
    response_field: str = "response"
    """Field of the response, with `data.chat=prompt`, or a template as in `data.prompt_field`."""
    chosen_field: str = "chosen"
    """Name of the field of the response that was preferred, with `data.chat=pairs`."""
    rejected_field: str = "rejected"
    """Name of the field of the other one, with `data.chat=pairs`."""
    long_pairs: Literal["truncate", "drop", "error"] = "truncate"
    """Treatment of pairs longer than a sequence, which holds prompt and chosen response, and prompt
    and rejected response. `truncate` removes tokens at the end of the longer half, or of both if
    they have equal lengths. It drops a pair when no token of a response is left. `drop` skips the
    pair, and `error` ends the run. The run prints the number of long pairs. Ignored unless
    `data.chat=pairs`."""
    chat_template: str = ""
    """File of the chat template, in Jinja. Empty means that of the tokenizer's folder."""
    chat_roles: list[str] = dataclasses.field(
        default_factory=lambda: ["system", "developer", "user", "assistant", "tool"]
    )
    """Roles that messages may have: another one is a mistake in a record."""
    trained_roles: list[str] = dataclasses.field(default_factory=lambda: ["assistant"])
    """Roles whose messages are trained on. What others say is read, and no loss is taken of it. Of
    `[assistant]` a template's own `{% generation %}` blocks say what is."""
    rewritten_history: Literal["last", "each_turn", "error"] = "last"
    """Training of messages that the template renders differently when others follow. Templates of
    reasoning models drop the reasoning of earlier answers. `last`: such a message is context and is
    not trained, so only the last answer is trained. `each_turn`: every trained message is a sample
    with the conversation before it as context. `error`: such a message ends the run. `last` and
    `error` are ignored for templates with `{% generation %}` blocks."""
    long_conversations: Literal["truncate", "drop", "split", "error"] = dataclasses.field(
        default="truncate", metadata={"before": "split"}
    )
    """Treatment of conversations longer than `train.sequence_length`. `truncate` removes tokens at
    the end, `drop` skips the conversation, and `error` ends the run. `split` divides the
    conversation between sequences, so an answer may be trained without its question. The run
    prints the number of long conversations. Ignored for texts; see `data.long_pairs` for pairs."""
    packing: Packing = dataclasses.field(default="auto", metadata={"before": "cut"})
    """Packing of documents into sequences. `auto`: `best_fit` for conversations and pairs, `cut`
    for texts. `cut`: documents are concatenated and split across sequences. The other values keep
    documents whole and pad the rest of a sequence. A document longer than a sequence fills whole
    sequences, and its remainder is placed like a document. `best_fit`: the longest document first,
    into the sequence with the least space that is enough; it needs the fewest sequences.
    `first_fit`: in shuffled order, into the first sequence with enough space. `pad`: one document
    per sequence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedSourceConfig(SourceConfig):
    """A source of `data.mixture`: its documents, and how much of each batch comes from them."""

    weight: float = 0.0
    """Its share of the sequences is its weight divided by the sum of all. Where no source has a
    weight or epochs, each is read in proportion to its size."""
    epochs: float = 0.0
    """In place of weights, for all sources or none: how often it is read while the others are read
    as often as theirs say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig(SourceConfig):
    """Where text comes from."""

    mixture: dict[str, MixedSourceConfig] = dataclasses.field(default_factory=dict)
    """Several sources in place of `data.source`, by name: `data.mixture.web.path=web/*.txt`. Each
    sequence is of one source. Weights may change when a run goes on; sources may not."""
    mixture_temperature: float = 1.0
    """Weights are raised to the power of 1 / this: more than 1 makes shares more alike, and what
    is near infinity makes them equal."""
    mixture_stages: list[str] = dataclasses.field(default_factory=list)
    """Other weights for the start of the run, one text for each stage, in their order: `NAME WEIGHT
    NAME WEIGHT ... for N steps`, or `... for N tokens`, such as `web 0.9 code 0.1 for 1000 steps`.
    A source that is not named is not read then. Behind the last stage come the weights of
    `data.mixture`."""
    end: Literal["repeat", "stop", "fail"] = "repeat"
    """What happens where the documents end before the run does. `repeat`: they are read again, in
    another order, as often as it takes. `stop`: the run ends there, evaluated and saved. `fail`:
    such a run is not started. A source of a mixture ends when it was read as often as its `epochs`
    say, else once; with `stop` the others share what was its, until all have ended."""
    max_pairs_per_sequence: int = dataclasses.field(
        default=16, metadata=renamed_from("pairs_per_row")
    )
    """The most pairs that one sequence holds, with `data.chat=pairs`. Every batch has room for as
    many; shorter pairs than `train.sequence_length` divided by this leave a sequence unfilled."""
    validation_fraction: float = 0.05
    """Share of the documents, drawn by the seed, that is only used for evaluation."""
    validation: dict[str, SourceConfig] = dataclasses.field(default_factory=dict)
    """Other documents for evaluation, by name: `data.validation.code.path=code/*.py`. Each set has
    losses of its own, `eval/code/loss`. `eval/loss` is that of `data.validation_fraction`, and of
    all sets together where that is 0."""
    validation_overlap: Literal["warn", "stop", "ignore"] = "warn"
    """What documents for evaluation do whose text is also among those that are trained on: their
    loss is not that of unseen text. They are found by a digest of the whole text; among more than a
    million prepared documents, of which all digests have to be read, only with `stop`."""
    allow_change: bool = False
    """Go on from the run's checkpoint although documents, seed, packing or tokenizer are others
    than when it was saved. Samples may be repeated or left out then."""
    prefetch_batches: int = 4
    """Batches made ready ahead of the step that needs them."""
    threads: int = 2
    """Threads that read and pack."""
