"""Config keys of one document source, source formats, and templates that combine record fields."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from maxpipe.io.typed_json import legacy_value, renamed_from

SourceName = Literal[
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
]
"""Data sources of this package."""

SOURCES: dict[str, Callable[[list[str], int], Sequence[Any]]] = {}
"""Data sources from plug-ins, keyed by name: functions of the files of a source and `run.seed` that
return the documents."""

Packing = Literal["auto", "concatenate", "first_fit", "best_fit", "pad"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceConfig:
    """Document source, and how its records are converted to text."""

    source: str = "corpus"
    """Format of the documents. `corpus`: the source files of Python's standard library, which
    require no download. `text`: text files, one document per file. `jsonl`: one JSON object per
    line, optionally compressed. `parquet`: one document per row. `arrayrecord`: ArrayRecord files
    with UTF-8 or JSON records. `huggingface`: a Hugging Face dataset saved with `save_to_disk`.
    `tfds`: a TensorFlow dataset, prepared as ArrayRecord files. `tokens`: a folder written by
    `maxpipe data prepare`. `megatron`: pairs of `.bin` and `.idx` files with token ids.
    `synthetic`: random tokens. Plug-ins add further sources; see the section `plugins`."""
    path: str = ""
    """File, folder or glob pattern, local or in a store such as `s3://BUCKET/...`; for `tfds`, the
    name of a dataset, e.g. `c4/en:3.1.0`. `huggingface` requires a folder."""
    paths: list[str] = dataclasses.field(default_factory=list, hash=False)  # a list has no hash
    """Several paths, which are read in this order. Replaces `data.path`."""
    tfds_dir: str = ""
    """Folder that contains the prepared `tfds` datasets. If empty, TFDS's default data directory is
    used."""
    text_field: str = dataclasses.field(default="text", metadata=renamed_from("field"))
    """Name of the text column in records of `jsonl`, `parquet`, JSON `arrayrecord`, `huggingface`
    and `tfds`. `a.b` denotes the field `b` of the column `a`."""
    template: str = ""
    """Template that builds each document's text from several columns, such as
    `'{title}\\n\\n{text}'`. Replaces `data.text_field`. A column name in braces is replaced by the
    text or number in that column. `{{` and `}}` are literal braces, `\\n` is a line break, and
    `\\t` is a tab. Other escape sequences are not supported."""
    bad_records: Literal["stop", "skip"] = dataclasses.field(
        default="stop", metadata=renamed_from("unreadable")
    )
    """Handling of invalid records, such as malformed lines, missing columns or text that is not
    UTF-8. `stop` ends the run. `skip` treats the record as an empty document. Missing, truncated or
    corrupted files always stop the run."""
    max_bad_records: int = dataclasses.field(default=100, metadata=renamed_from("unreadable_limit"))
    """Maximum number of records that `data.bad_records=skip` may skip."""
    max_decompressed_bytes: int = dataclasses.field(
        default=2**36, metadata=renamed_from("largest_unpacked_bytes")
    )
    """Maximum total size in bytes of all compressed files after decompression. Compressed files are
    decompressed once, into `<run.dir>/.index`."""
    chat: Literal["off", "messages", "prompt", "pairs"] = "off"
    """Format of the conversations in records. A chat template renders the conversations as text.
    `messages`: a list of messages in `data.messages_field`. The messages are objects with `role`
    and `content`, ShareGPT objects with `from` and `value`, objects with `input` and `output`, or
    strings that alternate between user and assistant. `prompt`: a prompt in `data.prompt_field` and
    a response in `data.response_field`, each a string or a list of messages. `pairs`, for
    `train.objective=preference`: a prompt in `data.prompt_field`, and two responses in
    `data.chosen_field` and `data.rejected_field`. Strings in these three fields are used without
    the chat template."""
    messages_field: str = "messages"
    """Name of the field that contains the messages. If a record has no field `messages`, the field
    `conversations` is read. Ignored unless `data.chat=messages`."""
    tools_field: str = "tools"
    """Name of the field that contains the tools for the chat template, as a list of objects or as a
    JSON string. Records may omit this field. Ignored unless `data.chat` is set."""
    chat_template_kwargs: dict[str, str] = dataclasses.field(default_factory=dict, hash=False)
    """Variables that are passed to the chat template, keyed by name, such as `{enable_thinking:
    false}`. Values that parse as a number, `true`, `false` or JSON are converted; all other values
    are kept as strings. The field `chat_template_kwargs` of a record takes precedence. Applies to
    training, samples, rollouts and `generate --chat`."""
    system_field: str = ""
    """Name of the field that contains the system message, or a template as in `data.prompt_field`.
    Records may omit this field. The field does not override a system message that is already at the
    start of the conversation. If this key is empty, only the `system` field of ShareGPT records is
    read. Ignored unless `data.chat` is set."""
    prompt_field: str = "prompt"
    """Name of the field that contains the prompt, if `data.chat` is `prompt` or `pairs`. A value
    with braces is a template over several fields, as in `data.template`:
    `'{instruction}\\n{input}'`. A line of the template is omitted if the record has none of the
    fields in that line. With `pairs`, this key may be empty: each response is then a full
    conversation, and the common prefix of the two conversations is the prompt. The key also applies
    to `grpo.prompts`."""
    response_field: str = "response"
    """Name of the field that contains the response, or a template as in `data.prompt_field`.
    Ignored unless `data.chat=prompt`."""
    chosen_field: str = "chosen"
    """Name of the field that contains the chosen response. Ignored unless `data.chat=pairs`."""
    rejected_field: str = "rejected"
    """Name of the field that contains the rejected response. Ignored unless `data.chat=pairs`."""
    long_pairs: Literal["truncate", "drop", "error"] = "truncate"
    """Handling of pairs that are too long for one sequence. A pair has two halves: the prompt with
    the chosen response, and the prompt with the rejected response. `truncate` removes tokens at the
    end of the longer half, or of both halves if they have equal lengths. If no token of a response
    remains, `truncate` drops the pair. `drop` skips the pair, and `error` ends the run. The number
    of pairs that are too long is printed at startup. Ignored unless `data.chat=pairs`."""
    chat_template: str = ""
    """File that contains the Jinja chat template. If empty, the template in the tokenizer's folder
    is used."""
    chat_roles: list[str] = dataclasses.field(
        default_factory=lambda: ["system", "developer", "user", "assistant", "tool"]
    )
    """Roles that messages are allowed to have. Records with other roles are invalid."""
    trained_roles: list[str] = dataclasses.field(default_factory=lambda: ["assistant"])
    """Roles whose messages contribute to the loss. Messages with other roles are used only as
    context. With `[assistant]`, `{% generation %}` blocks of the chat template select the tokens
    that contribute to the loss."""
    rewritten_history: Literal["last", "each_turn", "error"] = "last"
    """Handling of messages that the chat template renders differently when more messages follow.
    For example, templates of reasoning models remove the reasoning from earlier responses. `last`:
    use these messages as context only, so that the model is trained only on the last response.
    `each_turn`: every message that contributes to the loss becomes a separate sample, with the
    preceding conversation as context. `error`: end the run at the first such message. `last` and
    `error` are ignored for templates with `{% generation %}` blocks."""
    long_conversations: Literal["truncate", "drop", "split", "error"] = dataclasses.field(
        default="truncate", metadata=legacy_value("split")
    )
    """Handling of conversations longer than `train.sequence_length`. `truncate` removes tokens at
    the end, `drop` skips the conversation, and `error` ends the run. `split` splits the
    conversation across sequences, so the model may be trained on a response without its prompt. The
    number of long conversations is printed at startup. Ignored for plain text. For pairs, see
    `data.long_pairs`."""
    packing: Packing = dataclasses.field(
        default="auto",
        metadata=renamed_from(values={"cut": "concatenate"}) | legacy_value("concatenate"),
    )
    """Packing of documents into sequences. `auto`: `best_fit` for conversations and preference
    pairs, `concatenate` for plain text. `concatenate`: documents are concatenated and split across
    sequences. The other methods never split a document that fits in one sequence; they pad the
    remaining positions instead. A document longer than a sequence fills complete sequences, and its
    remainder is packed like a separate document. `best_fit`: the longest documents are packed
    first, each into the sequence with the least remaining space that still fits the document.
    `best_fit` needs the fewest sequences. `first_fit`: documents are packed in shuffled order, each
    into the first sequence with enough space. `pad`: one document per sequence."""


COLUMNS = ("jsonl", "parquet", "arrayrecord", "tfds", "huggingface")
"""Values of `data.source` for which records can have columns."""


def has_columns(source: str) -> bool:
    """Return True if records of this `data.source` can have columns."""
    return source in COLUMNS or source in SOURCES


FILES = ("text", "jsonl", "parquet", "arrayrecord", "huggingface")
"""Values of `data.source` that read documents from files."""


ONE_PATH = ("tfds", "tokens", "megatron")
"""Values of `data.source` that accept only one path or dataset name."""


_TEMPLATE = re.compile(r"\{\{|\}\}|\{(?P<name>[^{}]*)\}|[{}]|\\[nt\\]")


_ESCAPES = {"{{": "{", "}}": "}", r"\n": "\n", r"\t": "\t", "\\\\": "\\"}


def paths_of(config: SourceConfig) -> list[str]:
    """Return all paths of a source, in the order in which they are read."""
    return [config.path] if config.path else list(config.paths)


def parse_template_kwargs(texts: Mapping[str, str]) -> dict[str, Any]:
    """Parse the values of `data.chat_template_kwargs`, which are JSON or plain text."""
    return {name: _parse_template_kwarg(text) for name, text in texts.items()}


def _parse_template_kwarg(text: str) -> Any:
    words = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
    if text.strip().lower() in words:
        return words[text.strip().lower()]
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    is_number = isinstance(value, float)
    return text if is_number and not math.isfinite(value) else value


def is_template(field: str) -> bool:
    """Return True if the value of a field key is a template rather than the name of one field."""
    return "{" in field


def split_template(template: str) -> list[tuple[str, str]]:
    r"""Split a template into pairs (literal text, name of the column that follows it).

    The column name in the last pair is empty. `{name}` denotes a column, `{{` and `}}` denote
    braces, and `\n` and `\t` denote a line break and a tab.

    Raises:
        ValueError: a brace is unmatched, or a column has no name.
    """
    pieces, fixed, end = [], "", 0
    for match in _TEMPLATE.finditer(template):
        fixed += template[end : match.start()]
        end = match.end()
        if (name := match["name"]) is not None:
            if not name or name != name.strip():
                raise ValueError(f"{match[0]} is not a column name")
            pieces.append((fixed, name))
            fixed = ""
        elif match[0] in _ESCAPES:
            fixed += _ESCAPES[match[0]]
        else:
            raise ValueError(f"the {match[0]} at character {match.start() + 1} is unmatched")
    return [*pieces, (fixed + template[end:], "")]
