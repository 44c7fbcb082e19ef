"""`maxpipe eval`: compute the loss of a model on text, or its accuracy on multiple-choice tasks."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxpipe.commands.parser import Commands, add_address, add_ema_option, add_inputs, count
from maxpipe.errors import Code, ConfigError, ExitCode
from maxpipe.io.formatting import pluralize

if TYPE_CHECKING:
    from maxpipe.checkpoint.address import Address
    from maxpipe.evals.evaluate import EvalReport

_REPORT_SECONDS = 10.0


def _eval(options: argparse.Namespace) -> int:
    from maxpipe.huggingface.folder import resolve_model

    model = resolve_model(options.checkpoint, average=options.average)
    _check(options)
    if options.choices is not None:
        return _eval_choices(options, model)
    from maxpipe.api.evaluation import select_documents
    from maxpipe.evals.evaluate import evaluate_model

    inputs = list(options.inputs)
    if options.data is not None:
        inputs += select_documents(options.data, inputs, "command line: --data")
    found = evaluate_model(model, inputs, options.split, _print_status)
    if found is not None:
        print(json.dumps(found, indent=2) if options.json else _page(found))
    return ExitCode.DONE


def _check(options: argparse.Namespace) -> None:
    """Reject options that have no effect in combination with `--choices` or without it."""
    with_choices = {"--jsonl": options.jsonl, "--batch-size": options.batch_size}
    with_choices |= {"--separator": options.separator, "--chat": options.chat}
    on_text = {"--data": options.data, "--split": options.split}
    others = with_choices if options.choices is None else on_text
    for option, given in others.items():
        if given is not None:
            rule = "requires --choices; it does not affect the language-modeling loss."
            if options.choices is not None:
                rule = "does not affect --choices, which evaluates only multiple-choice tasks."
            raise ConfigError.one(
                Code.CLI_CONFLICT, f"command line: {option}", given, rule, f"Leave out {option}."
            )


def _eval_choices(options: argparse.Namespace, model: Address | Path) -> int:
    from maxpipe.evals.language_model import LanguageModel, ScoringTokenizer
    from maxpipe.evals.multiple_choice import (
        MultipleChoice,
        apply_chat_template,
        read_questions,
        result_writer,
        summarize_results,
    )
    from maxpipe.generation.load_model import open_model
    from maxpipe.parallel.mesh import describe_mesh
    from maxpipe.restore.open_model import defer_interrupt, detect_interrupt

    path, batch_size = options.choices, options.batch_size or 16
    chat, separator = bool(options.chat), options.separator
    separator = ("" if chat else " ") if separator is None else separator
    exam = MultipleChoice(read_questions(path, "command line: --choices"), separator)
    with detect_interrupt():
        opened = open_model(model, options.inputs)
        tokenizer, where = opened.tokenizer, "command line: --chat"
        if chat:
            exam.questions = apply_chat_template(
                exam.questions, tokenizer.chat, where, "Leave out --chat"
            )
        texts = ScoringTokenizer(tokenizer, opened.max_length, is_chat=chat, skips_bos=chat)
        exam.check(texts, path)
        with result_writer(options.jsonl, "command line: --jsonl") as write:
            weights = opened.load(_print_status)
            total = sum(len(question.choices) for question in exam.questions)
            results = []
            with defer_interrupt() as asked:
                requests = LanguageModel(weights, texts, batch_size, asked)
                for result in exam.results(requests, _ChoiceProgress(total).update):
                    write(result)
                    results.append(result)
    found = {"checkpoint": opened.name, "choices": path, **summarize_results(results)}
    found["mesh"] = describe_mesh(weights.mesh)
    print(json.dumps(found, indent=2) if options.json else _choices_page(found))
    return ExitCode.DONE


class _ChoiceProgress:
    """Print the number of scored choices every few seconds."""

    def __init__(self, total: int):
        self._total, self._begin = total, time.monotonic()
        self._last = self._begin

    def update(self, done: int) -> None:
        now = time.monotonic()
        if now - self._last > _REPORT_SECONDS:
            self._last, left = now, (now - self._begin) / done * (self._total - done)
            _print_status(f"choice {done} of {self._total}, {left:.0f} s left")


def _choices_page(found: dict[str, Any]) -> str:
    rows = [
        f"checkpoint  {found['checkpoint']}",
        f"choices     {found['choices']}, {pluralize(found['questions'], 'question')}",
        f"mesh        {found['mesh']}",
    ]
    for name, label in (("accuracy", "accuracy"), ("accuracy_by_bytes", "  by bytes")):
        rows.append(f"{label:10}  {found[name]:.4f} ± {found[f'{name}_stderr']:.4f}")
    return "\n".join([*rows, f"chance      {found['chance']:.4f}"])


def _print_status(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _page(found: EvalReport) -> str:
    what = f"{found['pairs']:,} pairs" if "pairs" in found else f"{found['tokens']:,} tokens"
    head = [
        f"checkpoint  {found['checkpoint']}",
        f"data        {found['source']}, {found['split']} documents, {found['batches']} of "
        f"{pluralize(found['all_batches'], 'batch')}, {what}",
        f"            in sequences of {pluralize(found['sequence_length'], 'token')}",
        f"mesh        {found['mesh']}",
    ]
    if "pairs" in found:
        rows = [f"{name:16}{value:.6f}" for name, value in found["preference"].items()]
        sources = found["sources"].items()
        return "\n".join([*head, *rows, *(f"of {name}  {loss:.6f}" for name, loss in sources)])
    return "\n".join(
        (
            *head,
            f"loss        {found['nats_per_token']:.6f} nats per token",
            f"            {found['nats_per_byte']:.6f} nats per byte",
            f"            {found['bits_per_byte']:.6f} bits per byte",
            f"perplexity  {found['perplexity']:.6g}",
            *(f"of {name}  {loss:.6f} nats per token" for name, loss in found["sources"].items()),
        )
    )


def add(commands: Commands) -> None:
    """Add the `eval` command."""
    parser = commands.add_parser(
        "eval",
        help="evaluate a model on validation documents, other text, or multiple-choice tasks",
        description="Print the loss of a checkpoint or Hugging Face folder in nats per token and\n"
        "per byte, the bits per byte, and the perplexity. The checkpoint's config is used.\n"
        "Override mesh and pipeline to use another layout. Set data.* or --data to evaluate all\n"
        "documents in other files instead. eval.batches sets the number of batches (0 means all),\n"
        "and eval.batch_size sets the batch size. The run may still be training: the command\n"
        "writes no files to the run folder.",
        epilog="examples:\n  maxpipe eval quickstart\n"
        "  maxpipe eval runs/quickstart@best eval.batches=0 --json\n"
        "  maxpipe eval quickstart@120 --data 'book/*.txt'\n"
        "  maxpipe eval ~/models/Llama-3.2-1B --data articles.jsonl",
    )
    add_address(parser, about="a run, RUN@STEP, RUN@best, or a Hugging Face folder")
    add_ema_option(parser)
    add_inputs(parser)
    parser.add_argument(
        "--data",
        metavar="PATH",
        help="file, folder or glob pattern to evaluate; *.jsonl files are read as JSON Lines,\n"
        "*.array_record files as ArrayRecord, and other files as plain text",
    )
    parser.add_argument(
        "--split",
        metavar="validation|train|all|NAME",
        help="split to evaluate, where NAME is a validation set in data.validation (default:\n"
        "validation, or all if data.* selects other documents)",
    )
    parser.add_argument(
        "--choices",
        metavar="FILE",
        help="evaluate the multiple-choice questions in a JSON Lines file with the fields\n"
        "`context`, `choices` and `answer`",
    )
    parser.add_argument(
        "--separator",
        metavar="TEXT",
        help="string inserted between context and choice, unless there is whitespace already\n"
        "(default: one space)",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        default=None,
        help="format every context as a user message with the chat template",
    )
    parser.add_argument(
        "--batch-size", type=count, metavar="N", help="choices per batch (default: 16)"
    )
    parser.add_argument(
        "--jsonl", metavar="FILE", help="write the result of every question as JSON Lines"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(command=_eval)
