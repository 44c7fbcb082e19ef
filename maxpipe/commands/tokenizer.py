"""`maxpipe tokenizer`: train a tokenizer on a corpus, and inspect tokenizers."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from maxpipe.commands.data_inspect import expand_data_files, is_config, resolve_run_inputs
from maxpipe.commands.parser import (
    DATA_PREFIX,
    Commands,
    add_inputs,
    count,
    read_data_config,
    subcommands,
)
from maxpipe.errors import Code, ConfigError, ExitCode
from maxpipe.io import redact
from maxpipe.io.files import expand_path
from maxpipe.telemetry.console import ProgressBar

if TYPE_CHECKING:
    from maxpipe.data.sources import Source
    from maxpipe.data.tokenizer import Tokenizer

_MOST_SHOWN = 40
_SAMPLE = "The quick brown fox jumps over 12345 lazy dogs.\n    naïve 語 😀"


def _train(options: argparse.Namespace) -> int:
    from maxpipe.checkpoint.address import check_outside_checkpoints
    from maxpipe.data import train_tokenizer
    from maxpipe.data.tokenizer import open_tokenizer

    smallest, largest = train_tokenizer.MIN_VOCAB_SIZE, train_tokenizer.MAX_VOCAB_SIZE
    size = options.vocab_size
    if not smallest <= size <= largest:
        rule = f"must be between {smallest} (the bytes and three control tokens) and {largest}."
        raise ConfigError.one(
            Code.CLI_VALUE, "command line: --vocab-size", size, rule, "Set --vocab-size 32768."
        )
    folder = expand_path(options.out, "command line: --out")
    check_outside_checkpoints(folder, "command line: --out")
    train_tokenizer.check_free(folder)
    sources = _sources(options)
    progress = ProgressBar()
    try:
        content = train_tokenizer.train(sources, options.kind, size, progress.report)
    except KeyboardInterrupt:
        # No file has been written yet. Library threads that are still running would abort Python
        # during a normal exit.
        progress.close()
        os._exit(ExitCode.INTERRUPTED)
    finally:
        progress.close()
    train_tokenizer.write(folder, content)
    from maxpipe.config.sections.tokenizer import TokenizerConfig

    made = open_tokenizer(TokenizerConfig(kind="huggingface", path=str(folder)))
    print(redact.redact_for_terminal(f"wrote {folder}: {made.vocab_size} token IDs"))
    if made.vocab_size < size:
        print(f"the corpus has too little text for {size} token IDs")
    where = shlex.quote(f"tokenizer.path={folder}")
    shown = f"tokenizer.kind=huggingface {where} model.vocab_size={made.vocab_size}"
    print(redact.redact_for_terminal(f"train with it: {shown}"))
    return ExitCode.DONE


def _sources(options: argparse.Namespace) -> list[Source]:
    """Open the sources selected by data files, or by the `data.*` keys of a config and its
    overrides.
    """
    from maxpipe.checkpoint.storage import runs_folder
    from maxpipe.config.sections.data import all_sources
    from maxpipe.data.mixture import seed_of
    from maxpipe.data.sources import open_source, wrap_section_errors
    from maxpipe.data.train_tokenizer import open_training_files

    inputs, _ = resolve_run_inputs(options.inputs)
    if not inputs:
        rule = "must include data files, a config or data.* keys."
        action = "Specify a file, such as `maxpipe tokenizer train docs.jsonl`."
        raise ConfigError.one(Code.CLI_USAGE, "command line: FILE", None, rule, action)
    if not any(map(is_config, inputs)):
        return open_training_files(inputs, options.field or "text")
    given = [f"data.text_field={options.field}"] if options.field else []
    config = read_data_config([*expand_data_files(inputs), *given]).config
    index = str(runs_folder(config.run) / ".index")
    sources = []
    for name, source in all_sources(config.data).items():
        with wrap_section_errors(name):
            if source.chat != "off":
                rule = "must be off: a tokenizer is trained on plain text, not on conversations."
                action = "Set data.chat=off, and set data.text_field or data.template to the text "
                action += "columns."
                raise ConfigError.one(Code.CFG_CONFLICT, "data.chat", source.chat, rule, action)
            seed = seed_of(name, config.run.seed)
            sources.append(open_source(source, seed, cache_dir=index))
    return sources


def _show(options: argparse.Namespace) -> int:
    from maxpipe.config.sections.tokenizer import TokenizerConfig
    from maxpipe.data.tokenizer import open_tokenizer
    from maxpipe.data.tokenizers.files import locate

    config = TokenizerConfig(kind=options.kind, path=options.path, preset=options.preset)
    kind, path = locate(config)
    found = _tokenizer_info(open_tokenizer(config), options.text)
    found = {"kind": kind, "file": path, **found}
    if options.json:
        print(json.dumps(found, indent=2))
        return ExitCode.DONE
    width = max(map(len, found))
    for name, value in found.items():
        print(redact.redact_for_terminal(f"{name.replace('_', ' '):<{width}}  {_line(value)}"))
    return ExitCode.DONE


def _tokenizer_info(tokenizer: Tokenizer, text: str) -> dict[str, Any]:
    names = {i: name for name, i in tokenizer.special_tokens.items()}

    def named(i: int) -> str:
        return f"{i} {names.get(i, '')}".rstrip()

    ids = tokenizer.encode(text)
    back = tokenizer.decode(ids)
    return {
        "ids": tokenizer.vocab_size,
        "begin": named(tokenizer.begin_id),
        "end": named(tokenizer.end_id),
        "padding": named(tokenizer.pad_id),
        "ends_of_generated_text": [named(i) for i in tokenizer.end_ids],
        "control_tokens": [named(i) for i in sorted(tokenizer.special_ids)],
        "chat_template": tokenizer.chat.path if tokenizer.chat else None,
        "text": text,
        "tokens": ids.tolist(),
        "bytes_per_token": round(len(text.encode()) / max(1, len(ids)), 3),
        "back": back,
        "comes_back": back == text,
        "fingerprint": tokenizer.fingerprint(),
    }


def _line(value: object) -> str:
    if isinstance(value, list):
        more = f" ... {len(value)} in all" if len(value) > _MOST_SHOWN else ""
        return ", ".join(map(str, value[:_MOST_SHOWN])) + more
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    return repr(value) if isinstance(value, str) and not value.isprintable() else str(value)


def add(commands: Commands) -> None:
    """Add the `tokenizer` command."""
    parser = commands.add_parser(
        "tokenizer",
        help="train a tokenizer, or inspect one",
        description="Train a tokenizer on your text, or inspect a tokenizer.",
    )
    actions = subcommands(parser)
    train = actions.add_parser(
        "train",
        help="train a byte-level tokenizer on text",
        description="Train a byte-level tokenizer on text, JSON lines, Parquet or ArrayRecord\n"
        "files, or on the documents selected by data.*. Write a Hugging Face folder. The same\n"
        "files always produce the same tokenizer.",
        epilog="example: maxpipe tokenizer train 'data/*.jsonl' --vocab-size 32768 --out mine\n"
        "     or: maxpipe tokenizer train my-run.yml --vocab-size 32768 --out mine\n"
        "then:    maxpipe train my-run.yml tokenizer.kind=huggingface tokenizer.path=mine",
    )
    add_inputs(train, DATA_PREFIX, "data files, folders or glob patterns; a run; or ")
    train.add_argument(
        "--vocab-size", type=count, required=True, metavar="N", help="maximum vocabulary size"
    )
    train.add_argument(
        "--out", required=True, metavar="DIR", help="folder to write; it must not exist"
    )
    train.add_argument(
        "--kind",
        choices=("bpe", "unigram"),
        default="bpe",
        help="training algorithm (default: bpe)",
    )
    train.add_argument("--field", help="name of the text field in JSON records (default: text)")
    train.set_defaults(command=_train)
    show = actions.add_parser(
        "show",
        help="print vocabulary size, control tokens and an encoded string",
        description="Print the vocabulary size, control tokens and chat template of a tokenizer,\n"
        "and the tokens of an input string.",
        epilog="example: maxpipe tokenizer show Llama-3.2-1B --text 'Hello, world'",
    )
    show.add_argument("path", metavar="PATH", help="file or Hugging Face folder")
    show.add_argument(
        "--kind",
        choices=("auto", "huggingface", "sentencepiece", "tiktoken"),
        default="auto",
        help="tokenizer format, as in tokenizer.kind (default: auto)",
    )
    show.add_argument(
        "--preset",
        default="none",
        metavar="NAME",
        choices=_presets(),
        help="preset for tiktoken rank files, as in tokenizer.preset (default: none)",
    )
    show.add_argument("--text", default=_SAMPLE, help="string to encode and decode")
    show.add_argument("--json", action="store_true", help="print one JSON object")
    show.set_defaults(command=_show)
    parser.command_names = tuple(actions.choices)


def _presets() -> tuple[str, ...]:
    from maxpipe.config.sections.tokenizer import TokenizerConfig

    return get_args(get_type_hints(TokenizerConfig)["preset"])
