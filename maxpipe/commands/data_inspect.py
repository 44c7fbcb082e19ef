"""`maxpipe data show`, `stats` and `find`: inspect the training data of a config or run.

The commands also accept data files in place of a config, and infer the `data.*` keys from the
files.
"""

from __future__ import annotations

import argparse
import dataclasses
import glob
import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxpipe.commands.parser import (
    DATA_PREFIX,
    INPUTS_HELP,
    RUN_OR_FILE,
    Commands,
    add_inputs,
    count,
    integer,
    read_config,
    read_data_config,
    write_file,
)
from maxpipe.errors import Code, ConfigError, ExitCode
from maxpipe.io import redact
from maxpipe.io.files import url_scheme
from maxpipe.io.formatting import pluralize
from maxpipe.telemetry.console import ProgressBar

if TYPE_CHECKING:
    from maxpipe.config.schema import Config
    from maxpipe.config.sections.source import SourceConfig
    from maxpipe.data.inspect_batch import InspectedSequence, Segment, TextSpan
    from maxpipe.data.loader import Datasets, Loader
    from maxpipe.data.statistics import DocumentStatistics, Statistics
    from maxpipe.data.tokenizer import Tokenizer
    from maxpipe.errors import Problem

DATA_HELP = "data files, a folder of data files, or a prepared folder; "
_OF_TEMPLATES = ("tokenizer.", "data.chat_template")
"""Prefixes of config keys that may set a chat template."""


def expand_data_files(inputs: Sequence[str]) -> list[str]:
    """Replace data file paths in the inputs with `data.*` overrides that select the files.

    The overrides are printed to stderr. The source type is inferred from file names. Conversations
    and preference pairs are inferred from the fields of the first record. The tokenizer of a
    prepared folder is read from its manifest. Keys in the inputs override inferred keys.

    Raises:
        ConfigError: the files have different types, or the inputs also set a data source.
    """
    paths = [path for path in inputs if _is_data(path)]
    if not paths:
        return list(inputs)
    others = [other for other in inputs if other not in paths]
    keys = {other.partition("=")[0] for other in others}
    where = f"command line: {paths[0]}"
    for key in ("data.source", "data.path", "data.paths", "data.mixture"):
        if key in keys:
            rule = f"conflicts with {key}: both select the documents to read."
            raise ConfigError.one(
                Code.CLI_CONFLICT, where, None, rule, "Remove one of the two arguments."
            )
    inferred = _source(paths)
    has_config = any("=" not in other for other in others)
    if inferred["data.source"] == "tokens" and not has_config:
        inferred |= _tokenizer(paths[0])
    elif not keys & {"data.text_field", "data.template", "data.chat"}:
        with_template = has_config or any(key.startswith(_OF_TEMPLATES) for key in keys)
        inferred |= _conversation(inferred, with_template=with_template, with_defaults=has_config)
    if not has_config and not keys & {"data.validation_fraction", "eval.batches"}:
        # A single document is enough to inspect.
        inferred |= {"data.validation_fraction": 0, "eval.batches": 0}
    chosen = {key: value for key, value in inferred.items() if key not in keys}
    if any(key.startswith("tokenizer.") for key in keys):
        chosen = {key: chosen[key] for key in chosen if not key.startswith("tokenizer.")}
    shown = " ".join(map(shlex.quote, overrides(chosen)))
    print(
        redact.redact_for_terminal(f"{', '.join(paths)}: read with {shown}"),
        file=sys.stderr,
        flush=True,
    )
    if has_config:
        chosen = _CLEARED_KEYS | chosen
    return [*others, *overrides(chosen)]


_CLEARED_KEYS: dict[str, Any] = {
    "data.path": "",
    "data.paths": [],
    "data.mixture": {},
    "data.mixture_stages": [],
    "data.mixture_temperature": 1,
}
"""Config keys that would add other documents, mapped to the values that disable them."""


def overrides(keys: Mapping[str, Any]) -> list[str]:
    """Return one `key=value` override per key."""
    from maxpipe.config.yaml_values import to_yaml_line

    texts = {
        key: value if isinstance(value, str) else to_yaml_line(value) for key, value in keys.items()
    }
    return [f"{key}={text}" for key, text in texts.items()]


def is_config(argument: str) -> bool:
    """Return whether an input is an override, or the path or name of a config."""
    from maxpipe.config import config_files
    from maxpipe.config.check import is_override
    from maxpipe.config.config_files import SUFFIXES

    if argument.startswith("-") or is_override(argument):
        return True
    return Path(argument).suffix in SUFFIXES or config_files.find_config(argument) is not None


def _is_data(argument: str) -> bool:
    from maxpipe.config.config_files import CONFIG_FILE

    if not argument or is_config(argument):
        return False
    if url_scheme(argument) or _names_data(argument):
        return True
    path = os.path.expanduser(argument)
    if os.path.isdir(path):
        others = (CONFIG_FILE, "config.json")
        return not any(os.path.isfile(os.path.join(path, name)) for name in others)
    return os.path.isfile(path) or (
        any(letter in path for letter in "*?[") and bool(glob.glob(path))
    )


def _names_data(path: str) -> bool:
    from maxpipe.data.sources import ENDINGS

    return any(end in os.path.basename(path) for end in (*ENDINGS, ".txt"))


def _source(paths: Sequence[str]) -> dict[str, Any]:
    from maxpipe.config.sections.source import ONE_PATH
    from maxpipe.data.sources import infer_source

    kinds = {path: infer_source(path, "command line: FILE") for path in paths}
    kind = kinds[paths[0]]
    other = next((path for path in paths if kinds[path] != kind), None)
    if other is not None:
        rule = f"requires data.source={kinds[other]}, but {paths[0]} requires data.source={kind}."
        action = "Specify files of one type, or set data.mixture.NAME.path for each type."
        raise ConfigError.one(Code.DATA_FORMAT, f"command line: {other}", None, rule, action)
    if kind in ONE_PATH and len(paths) > 1:
        rule = f"is one of {len(paths)} paths, but data.source={kind} reads a single path."
        raise ConfigError.one(
            Code.DATA_FORMAT, f"command line: {paths[1]}", None, rule, "Specify one path."
        )
    named = {"data.path": paths[0]} if len(paths) == 1 else {"data.paths": list(paths)}
    return {"data.source": kind, **named}


def _tokenizer(folder: str) -> dict[str, Any]:
    from maxpipe.data.prepared.manifest import read_manifest

    tokenizer = read_manifest(os.path.expanduser(folder))["tokenizer"]
    if tokenizer["kind"] == "bytes":
        return {}
    return {"tokenizer.kind": tokenizer["kind"], "tokenizer.path": tokenizer["path"]}


def _conversation(
    keys: Mapping[str, Any], *, with_template: bool, with_defaults: bool
) -> dict[str, Any]:
    """Return the config settings, keyed by config key, for reading records without a text field.

    Such records are read as conversations or preference pairs. Without a chat template, prompts and
    responses are read as plain text.
    """
    from maxpipe.config.sections.source import COLUMNS, SourceConfig, paths_of
    from maxpipe.data.formats.record_text import (
        chat_keys,
        drop_default_keys,
        settings_text,
        text_template,
    )
    from maxpipe.data.sources import open_source

    if keys["data.source"] not in COLUMNS:
        return {}
    config = SourceConfig(**{key.removeprefix("data."): value for key, value in keys.items()})
    source = open_source(config, 0, keep=False)
    record = source.record(0) if len(source) else ""
    if isinstance(record, str) or isinstance(record.get("text"), str):
        return {}
    chat = chat_keys(record, with_template=with_template)
    template = "" if with_template else text_template(record)
    if template and chat.get("data.chat") == "prompt":
        settings = settings_text(drop_default_keys(chat))
        line = f"if you set a chat template (tokenizer.* or data.chat_template), use {settings}"
        print(redact.redact_for_terminal(f"{paths_of(config)[0]}: {line}"), file=sys.stderr)
        return {"data.template": template}
    if with_defaults or chat.get("data.messages_field") == "conversations":
        return chat
    return drop_default_keys(chat)


_GREY, _CONTROL, _HEAD, _PLAIN = "\x1b[90m", "\x1b[36m", "\x1b[1m", "\x1b[0m"
RUN_HELP = "a run folder or the name of a run in runs/ (uses the run's config); or "


# Inputs and datasets.


def resolve_run_inputs(inputs: Sequence[str]) -> tuple[list[str], str]:
    """Replace a run in the inputs with its config file. Return the resulting inputs and the run
    folder, which is "" if the inputs contain no run.

    If a name matches both a config and a run, the config is selected. To select the run, give the
    path of its folder.
    """
    if not inputs or "=" in inputs[0]:
        return list(inputs), ""
    from maxpipe.checkpoint.address import is_run, parse_run_address
    from maxpipe.config import config_files
    from maxpipe.config.config_files import CONFIG_FILE

    first = inputs[0]
    is_file = (
        os.path.isfile(os.path.expanduser(first)) or config_files.find_config(first) is not None
    )
    if is_file or not (is_run(Path(first)) or is_run(Path("runs") / first)):
        return list(inputs), ""
    folder = parse_run_address(first).run_dir
    return [os.path.join(folder, CONFIG_FILE), *inputs[1:]], folder


def open_datasets(config: Config, folder: str) -> Datasets:
    """Open a config's datasets, with the mixture weights used by the run in `folder`."""
    from maxpipe.data.datasets import build_datasets
    from maxpipe.data.inspect_batch import mixture_of
    from maxpipe.data.mixture import Mixture

    progress = ProgressBar()
    try:
        datasets = build_datasets(config, lambda: progress.report("reading documents", 0, 0))
    finally:
        progress.close()
    dealt = mixture_of(folder) if folder and config.data.mixture else None
    if dealt is not None and dealt[0] == datasets.train.sources:
        datasets.train.set_mixture(Mixture.from_metadata(dealt[1], config.run.seed))
    return datasets


def batch_of_step(folder: str, step: int) -> int:
    """Return the batch index of a step, accounting for batches that the run has skipped."""
    if not folder:
        return step - 1
    from maxpipe.data.inspect_batch import batch_of

    return batch_of(folder, step)


# Show.


def _show(options: argparse.Namespace) -> int:
    inputs, folder = resolve_run_inputs(options.inputs)
    config = read_data_config(expand_data_files(inputs)).config
    from maxpipe.data.inspect_batch import inspect_sequence

    datasets = open_datasets(config, folder)
    try:
        loader = _split(datasets, options.split)
        for remark in datasets.remarks:
            print(redact.redact_for_terminal(f"note: {remark}"), file=sys.stderr)
        is_train = options.split == "train"
        batch = batch_of_step(folder, options.step) if is_train else options.step - 1
        number = options.n or (3 if options.row is None else 1)
        coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        for at, row in _iter_sequences(loader, batch, options.row or 0, number):
            sequence = inspect_sequence(loader, datasets.tokenizer, at, row)
            print("\n".join(_page(sequence, options.step + at - batch, coloured)), flush=True)
    finally:
        datasets.close()
    return ExitCode.DONE


def _split(datasets: Datasets, name: str) -> Loader:
    from maxpipe.config.sections.data import check_split

    if name == "train":
        return datasets.train
    check_split(name, ("train", "validation", *datasets.validation_sets))
    if name in datasets.validation_sets:
        return datasets.validation_sets[name]
    if datasets.validation is None:
        rule = "has no documents: data.validation_fraction is 0."
        action = "Add data.validation_fraction=0.05."
        raise ConfigError.one(Code.DATA_VALIDATION, "command line: --split", name, rule, action)
    return datasets.validation


def _iter_sequences(loader: Loader, batch: int, row: int, number: int) -> Iterator[tuple[int, int]]:
    """Yield (batch, row) for up to `number` sequences, starting at `row` and stopping at the end of
    the data.
    """
    for number_shown in range(number):
        yield batch, row
        row += 1
        if row < len(loader.sequence_origins(batch)):
            continue
        batch, row = batch + 1, 0
        if number_shown + 1 < number and not loader.sequence_origins(batch):
            return


def _page(inspected: InspectedSequence, step: int, coloured: bool) -> Iterator[str]:
    tokens = sum(segment.num_tokens for segment in inspected.segments)
    trained = sum(segment.num_trained for segment in inspected.segments)
    halves = sum(1 for segment in inspected.segments if segment.half)
    source = f" of {inspected.source}" if inspected.source else ""
    parts = [
        f"step {step} row {inspected.row}: sequence {inspected.sequence}{source}",
        pluralize(halves // 2, "pair")
        if halves
        else pluralize(len(inspected.segments), "document"),
        f"{trained} of {pluralize(tokens, 'token')} trained",
    ]
    parts += [f"{inspected.num_padding} of padding"] if inspected.num_padding else []
    yield _styled(f"=== {', '.join(parts)}", _HEAD, coloured)
    for segment in inspected.segments:
        yield _styled(f"--- {_segment_header(segment)}", _HEAD, coloured)
        yield "".join(_mark_trained(piece, coloured) for piece in segment.pieces)


def _segment_header(segment: Segment) -> str:
    part = (
        ""
        if segment.num_tokens >= segment.document_tokens
        else f" of its {segment.document_tokens}"
    )
    tokens = f"{segment.num_tokens}{part} tokens, {segment.num_trained} trained"
    half = f" {segment.half}" if segment.half else ""
    return _to_single_line(f"document {segment.document}{half}, {tokens}: {segment.where}")


def _to_single_line(line: str) -> str:
    return redact.redact_for_terminal(line).replace("\n", "\\n")


def _mark_trained(piece: TextSpan, coloured: bool) -> str:
    text = "".join(
        letter
        if letter in "\n\t" or letter.isprintable()
        else letter.encode("unicode_escape").decode()
        for letter in piece.text
    )
    if not coloured:
        return text if piece.is_trained else f"⟦{text}⟧"
    if piece.is_trained and not piece.is_control:
        return text
    return _styled(text, _CONTROL if piece.is_trained else _GREY, coloured)


def _styled(text: str, style: str, coloured: bool) -> str:
    return f"{style}{text}{_PLAIN}" if coloured else text


# Find.


def _find(options: argparse.Namespace) -> int:
    inputs, folder = resolve_run_inputs([options.config, *options.inputs])
    config = read_config(inputs).config
    datasets = open_datasets(config, folder)
    try:
        batch = batch_of_step(folder, options.step)
        found = _documents(datasets, batch, options.row)
    finally:
        datasets.close()
    if options.json:
        print(json.dumps({"step": options.step, **found}, indent=2))
        return ExitCode.DONE
    sequence = f"sequence {found['sequence']}" + f" of {found['source']}" * bool(found["source"])
    print(f"step {options.step} row {options.row}: batch {batch}, {sequence}")
    for document in found["documents"]:
        first, last = document["first"], document["first"] + document["tokens"] - 1
        half = f" {document['half']}" if "half" in document else ""
        line = f"document {document['document']}{half}, tokens {first} to {last} of the row: "
        line += document["where"]
        print(_to_single_line(line))
    return ExitCode.DONE


def _documents(datasets: Datasets, batch: int, row: int) -> dict[str, Any]:
    from maxpipe.data.inspect_batch import inspect_sequence

    inspected = inspect_sequence(datasets.train, datasets.tokenizer, batch, row)
    documents = [
        {
            "document": segment.document,
            "where": segment.where,
            "first": segment.first,
            "tokens": segment.num_tokens,
            "trained": segment.num_trained,
            **({"half": segment.half} if segment.half else {}),
        }
        for segment in inspected.segments
    ]
    place = {"batch": batch, "row": row, "source": inspected.source, "sequence": inspected.sequence}
    return {**place, "documents": documents}


# Statistics.


def _stats(options: argparse.Namespace) -> int:
    from maxpipe.data import statistics

    if options.out is not None and Path(options.out).suffix not in statistics.PICTURE_SUFFIXES:
        rule = f"must end in {' or '.join(statistics.PICTURE_SUFFIXES)}."
        action = "Write --out stats.html."
        raise ConfigError.one(Code.CLI_OUTPUT, "command line: --out", options.out, rule, action)
    inputs, _ = resolve_run_inputs(options.inputs)
    config = read_data_config(expand_data_files(inputs)).config
    statistics_of = list(_compute_statistics(config))
    if options.out is not None:
        write_file(options.out, "--out", lambda path: statistics.draw(statistics_of, path))
    if options.json:
        facts: Any = [part.to_dict() for part in statistics_of]
        if config.data.mixture:
            facts = {"sources": dict(zip(sorted(config.data.mixture), facts, strict=True))}
        else:
            [facts] = facts
        print(json.dumps(facts, indent=2))
    else:
        print(redact.redact_for_terminal("\n\n".join(map(statistics.text, statistics_of))))
    return ExitCode.DONE


def _compute_statistics(config: Config) -> Iterator[Statistics]:
    from maxpipe.config.image_format import image_format
    from maxpipe.config.sections.data import all_sources
    from maxpipe.data.mixture import seed_of
    from maxpipe.data.sources import wrap_section_errors
    from maxpipe.data.tokenizer import open_tokenizer

    progress = ProgressBar()
    try:
        tokenizer = open_tokenizer(config.tokenizer).with_images(image_format(config))
        for name, source in all_sources(config.data).items():
            with wrap_section_errors(name):
                seed = seed_of(name, config.run.seed)
                statistics = _source_statistics(config, source, seed, tokenizer, progress)
            statistics.name = f"{name}: {statistics.name}" if name else statistics.name
            yield statistics
    finally:
        progress.close()


def _source_statistics(
    config: Config, source: SourceConfig, seed: int, tokenizer: Tokenizer, progress: ProgressBar
) -> Statistics:
    from maxpipe.checkpoint.storage import runs_folder
    from maxpipe.data import statistics, unread_keys
    from maxpipe.data.chat import expand_trained_messages
    from maxpipe.data.corpus import build_chat_encoder, packing_of
    from maxpipe.data.packing import Packer
    from maxpipe.data.prepared.megatron import IDS, open_documents
    from maxpipe.data.prepared.reader import PreparedDocuments
    from maxpipe.data.sources import open_source

    threads, tokens = config.data.threads, config.train.sequence_length
    most_pairs = config.data.max_pairs_per_sequence if source.chat == "pairs" else 0
    documents: Iterator[DocumentStatistics | Problem]
    if source.source in IDS:
        files = open_documents(source, tokenizer)
        talks = files.has_conversations
        packer = Packer(packing_of(source, has_conversations=talks), tokens)
        count, chat = files.num_documents, _chat_of(source) if talks else {}
        documents = statistics.measure_encoded(files.__getitem__, count, tokenizer, threads)
        counts = statistics.compute_statistics(
            source.source, documents, count, packer, progress.report, **chat
        )
        if isinstance(files, PreparedDocuments):
            counts.unread.update(files.unread)
            counts.marks.update(files.marks)
        return dataclasses.replace(counts, unreadable=files.unreadable)
    packer = Packer(
        packing_of(source, has_conversations=source.chat != "off"), tokens, max_pairs=most_pairs
    )
    cache_dir = str(runs_folder(config.run) / ".index")
    opened = open_source(
        dataclasses.replace(source, bad_records="stop"),  # count every bad record
        seed,
        lambda: progress.report("opening", 0, 0),
        cache_dir=cache_dir,
    )
    opened = expand_trained_messages(opened, source, cache_dir, keep=True)
    count, chat = len(opened), _chat_of(source) if source.chat != "off" else {}
    if (encoder := build_chat_encoder(opened, tokenizer, source, tokens)) is None:
        documents = statistics.measure_texts(opened, tokenizer)
    else:
        documents = statistics.measure_encoded(encoder.encode, count, tokenizer, threads)
    counts = statistics.compute_statistics(
        opened.name, documents, count, packer, progress.report, **chat
    )
    counts.advice = unread_keys.suggest_settings(counts.unread, opened, source)
    counts.columns = unread_keys.columns_not_read(opened, source)
    return counts


def _chat_of(source: SourceConfig) -> dict[str, Any]:
    if source.chat == "pairs":
        return {"chat": "pair"}
    return {"chat": "conversation", "policy": source.long_conversations}


# Arguments.


def add_inspect(actions: Commands) -> None:
    """Add the `show`, `stats` and `find` commands."""
    _add_show(actions)
    _add_stats(actions)
    _add_find(actions)


def _add_show(actions: Commands) -> None:
    show = actions.add_parser(
        "show",
        help="print sequences of a batch as text, with tokens excluded from the loss marked",
        description="Print sequences of a batch as text, exactly as training reads them. Each\n"
        "document is shown with its file and line, and control tokens are shown by name. Tokens\n"
        "that are excluded from the loss are shown in grey on a terminal, and enclosed in ⟦ ⟧ in\n"
        "other output.",
        epilog="examples:\n  maxpipe data show docs.jsonl\n  maxpipe data show my-run.yml -n 3\n"
        "  maxpipe data show runs/my-run --step 1200 --row 7",
    )
    add_inputs(show, f"{DATA_PREFIX}RUN|", DATA_HELP + RUN_HELP)
    show.add_argument(
        "-n", type=count, metavar="N", help="number of sequences (default: 3, or 1 with --row)"
    )
    show.add_argument(
        "--step", type=step_number, default=1, metavar="K", help="training step (default: 1)"
    )
    show.add_argument(
        "--row", type=_natural, metavar="R", help="first row to print, zero-based (default: 0)"
    )
    show.add_argument(
        "--split",
        metavar="train|validation|NAME",
        default="train",
        help="split to read, where NAME is a validation set in data.validation (default: train)",
    )
    show.set_defaults(command=_show)


def _add_stats(actions: Commands) -> None:
    stats = actions.add_parser(
        "stats",
        help="print document lengths, duplicates, bytes per token and unreadable records",
        description="Read every document once. Print the number of documents, their lengths in\n"
        "tokens, duplicates, bytes per token, packing efficiency, and the number of documents\n"
        "that are empty, unreadable or not valid UTF-8.",
        epilog="examples:\n  maxpipe data stats docs.jsonl\n"
        "  maxpipe data stats my-run.yml --out stats.html",
    )
    add_inputs(stats, f"{DATA_PREFIX}RUN|", DATA_HELP + RUN_HELP)
    stats.add_argument("--json", action="store_true", help="print one JSON object")
    stats.add_argument("--out", metavar="FILE", help="write charts to an .html or .png file")
    stats.set_defaults(command=_stats)


def _add_find(actions: Commands) -> None:
    find = actions.add_parser(
        "find",
        help="print the documents in one row of a batch, with their files",
        description="Print the documents in one row of a step's batch, with the file and line (or\n"
        "record) of each document. For a run, the batch index accounts for batches that the run\n"
        "skipped after bad steps.",
        epilog="examples:\n  maxpipe data find runs/my-run 1200 7\n"
        "  maxpipe data find my-run.yml 1200 7 data.path='*.jsonl'",
    )
    find.add_argument("config", metavar=RUN_OR_FILE, help=f"{RUN_HELP}{INPUTS_HELP}")
    find.add_argument("step", type=step_number, metavar="STEP", help="training step, as in the log")
    find.add_argument("row", type=_natural, metavar="ROW", help="row of the batch, zero-based")
    add_inputs(find)
    find.add_argument("--json", action="store_true", help="print one JSON object")
    find.set_defaults(command=_find)


def step_number(text: str) -> int:
    """Parse a step number from the command line."""
    from maxpipe.config.sections.train import MAX_STEPS

    number = count(text)
    if number > MAX_STEPS:
        raise argparse.ArgumentTypeError(f"{text} is above the maximum of {MAX_STEPS}")
    return number


def _natural(text: str) -> int:
    number = integer(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text} is below the minimum of 0")
    return number
