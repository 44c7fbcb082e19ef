"""`maxpipe eval`: compute the loss of a model on text, or its scores on tasks."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxpipe.commands.parser import (
    Commands,
    add_address,
    add_ema_option,
    add_inputs,
    count,
    number,
)
from maxpipe.errors import Code, ConfigError, ExitCode
from maxpipe.io.formatting import pluralize

if TYPE_CHECKING:
    from maxpipe.checkpoint.address import Address
    from maxpipe.config.sections.eval import GenerativeTaskConfig
    from maxpipe.evals.evaluate import EvalReport

_REPORT_SECONDS = 10.0
_MAX_TEMPERATURE = 100


def _eval(options: argparse.Namespace) -> int:
    from maxpipe.huggingface.folder import resolve_model

    model = resolve_model(options.checkpoint, average=options.average)
    _check(options)
    if options.choices is not None:
        return _eval_choices(options, model)
    if options.prompts is not None:
        return _eval_prompts(options, model)
    from maxpipe.api.evaluation import select_documents
    from maxpipe.evals.evaluate import evaluate_model

    inputs = list(options.inputs)
    if options.data is not None:
        inputs += select_documents(options.data, inputs, "command line: --data")
    found = evaluate_model(model, inputs, options.split, _print_status)
    if found is not None:
        print(json.dumps(found, indent=2) if options.json else _page(found))
    return ExitCode.DONE


_CHOICES, _PROMPTS, _TEXT = "--choices", "--prompts", "the language-modeling loss"
_USED_BY = {
    "data": (_TEXT,),
    "split": (_TEXT,),
    "separator": (_CHOICES,),
    "chat": (_CHOICES, _PROMPTS),
    "batch_size": (_CHOICES, _PROMPTS),
    "jsonl": (_CHOICES, _PROMPTS),
    "scorer": (_PROMPTS,),
    "field": (_PROMPTS,),
    "allow_code": (_PROMPTS,),
    "samples": (_PROMPTS,),
    "temperature": (_PROMPTS,),
    "max_tokens": (_PROMPTS,),
    "stop": (_PROMPTS,),
}
"""Kinds of evaluation that read each option."""


def _check(options: argparse.Namespace) -> None:
    """Reject options that the selected evaluation does not read."""
    chosen = _TEXT
    if options.choices is not None:
        chosen = _CHOICES
    elif options.prompts is not None:
        chosen = _PROMPTS
    for name, readers in _USED_BY.items():
        given = getattr(options, name)
        if given is None or chosen in readers:
            continue
        option = f"--{name.replace('_', '-')}"
        rule = f"requires {' or '.join(readers)}; it does not affect {chosen}."
        if readers == (_TEXT,):
            kind = "multiple-choice tasks" if chosen == _CHOICES else "generative tasks"
            rule = f"does not affect {chosen}, which evaluates only {kind}."
        shown = None if given is True else given
        raise ConfigError.one(
            Code.CLI_CONFLICT, f"command line: {option}", shown, rule, f"Leave out {option}."
        )


def _generative_task(options: argparse.Namespace) -> GenerativeTaskConfig:
    """Return the task that the options define.

    Raises:
        ConfigError: an option has an invalid value, or options conflict.
    """
    from maxpipe.config.sections.eval import GenerativeTaskConfig
    from maxpipe.config.sections.grpo import is_function_in_file
    from maxpipe.rewards.builtin import FIELDS

    def problem(option: str, value: Any, rule: str, action: str) -> ConfigError:
        return ConfigError.one(Code.CLI_VALUE, f"command line: {option}", value, rule, action)

    scorer, temperature = options.scorer or "exact", options.temperature or 0.0
    is_file = is_function_in_file(scorer)
    if scorer not in FIELDS and not is_file:
        rule = f"must be {', '.join(FIELDS)}, or a Python function as FILE.py:FUNCTION."
        raise problem("--scorer", scorer, rule, "Write --scorer exact.")
    if is_file and not options.allow_code:
        rule = "requires --allow-code: the command executes this code with your permissions."
        action = "Read the file, and add --allow-code if you trust it."
        raise problem("--scorer", scorer, rule, action)
    if not 0 <= temperature <= _MAX_TEMPERATURE:
        rule = f"must be from 0 to {_MAX_TEMPERATURE}."
        raise problem("--temperature", temperature, rule, "Write --temperature 0.8.")
    if (samples := options.samples or 1) > 1 and not temperature:
        rule = f"requires a --temperature above 0: the {samples} greedy completions of one prompt "
        raise problem("--samples", samples, f"{rule}are equal.", "Add --temperature 0.8.")
    return GenerativeTaskConfig(
        path=options.prompts,
        scorer="exact" if is_file else scorer,
        scorer_file=scorer if is_file else "",
        scorer_field=options.field or "",
        allow_code=bool(options.allow_code),
        samples=samples,
        temperature=temperature,
        max_tokens=options.max_tokens or GenerativeTaskConfig().max_tokens,
        stop=options.stop or [],
        chat=bool(options.chat),
    )


def _eval_prompts(options: argparse.Namespace, model: Address | Path) -> int:
    from maxpipe.evals.generative import GenerativeTask, ScoredCompletion, summarize
    from maxpipe.evals.multiple_choice import result_writer
    from maxpipe.generation.load_model import open_model
    from maxpipe.restore.open_model import defer_interrupt, detect_interrupt

    task = _generative_task(options)
    with detect_interrupt():
        opened = open_model(model, options.inputs)
        exam = GenerativeTask(
            "prompts",
            task,
            opened.tokenizer,
            opened.tokenizer.chat,
            sequence_length=opened.max_length,
            batch_size=options.batch_size or 16,
            is_cli=True,
        )
        with (
            contextlib.closing(exam),
            result_writer(options.jsonl, "command line: --jsonl", ScoredCompletion) as write,
        ):
            engine, params = opened.load_decode_engine(_print_status, exam.sampling, 0)
            progress = _Progress("completion", exam.num_completions)

            def record(result: ScoredCompletion) -> None:
                write(result)
                progress.count()

            with defer_interrupt() as asked:
                scored, failures = exam.results(engine, params, asked, record)
    summary = summarize(scored, task.samples, failures)
    if failures:
        _print_status(
            f"the scorer failed for {failures} of {len(scored)} completions, which have score 0. "
            f"Last failure: {exam.last_failure}"
        )
    found = {"checkpoint": opened.name, "prompts_file": options.prompts} | {
        name: value for name, value in summary._asdict().items() if name != "passes"
    }
    found |= {f"pass_at_{count}": value for count, value in summary.passes.items()}
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        print(f"checkpoint  {opened.name}\nprompts     {options.prompts}\n{summary.text()}")
    return ExitCode.DONE


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
                for result in exam.results(requests, _Progress("choice", total).update):
                    write(result)
                    results.append(result)
    found = {"checkpoint": opened.name, "choices": path, **summarize_results(results)}
    found["mesh"] = describe_mesh(weights.mesh)
    print(json.dumps(found, indent=2) if options.json else _choices_page(found))
    return ExitCode.DONE


class _Progress:
    """Print the number of finished items every few seconds."""

    def __init__(self, name: str, total: int):
        self._name, self._total, self._begin = name, total, time.monotonic()
        self._last, self._done = self._begin, 0

    def count(self) -> None:
        """Count one more finished item."""
        self.update(self._done + 1)

    def update(self, done: int) -> None:
        """Set the number of finished items."""
        self._done, now = done, time.monotonic()
        if now - self._last > _REPORT_SECONDS:
            self._last, left = now, (now - self._begin) / done * (self._total - done)
            _print_status(f"{self._name} {done} of {self._total}, {left:.0f} s left")


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
        help="evaluate a model on validation documents, other text, or tasks",
        description="Print the loss of a checkpoint or Hugging Face folder in nats per token and\n"
        "per byte, the bits per byte, and the perplexity. The checkpoint's config is used.\n"
        "Override mesh and pipeline to use another layout. Set data.* or --data to evaluate all\n"
        "documents in other files instead. eval.batches sets the number of batches (0 means all),\n"
        "and eval.batch_size sets the batch size. The run may still be training: the command\n"
        "writes no files to the run folder.",
        epilog="examples:\n  maxpipe eval quickstart\n"
        "  maxpipe eval runs/quickstart@best eval.batches=0 --json\n"
        "  maxpipe eval quickstart@120 --data 'book/*.txt'\n"
        "  maxpipe eval ~/models/Llama-3.2-1B --data articles.jsonl\n"
        "  maxpipe eval quickstart@best --prompts sums.jsonl --scorer number --max-tokens 32",
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
    _add_task_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(command=_eval)


def _add_task_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--choices",
        metavar="FILE",
        help="evaluate the multiple-choice questions in a JSON Lines file with the fields\n"
        "`context`, `choices` and `answer`",
    )
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="complete the prompts in a JSON Lines file with the fields `prompt` or `messages`,\n"
        "and score the completions",
    )
    parser.add_argument(
        "--scorer",
        metavar="NAME|FILE.py:FUNCTION",
        help="with --prompts, exact, number, regex, arithmetic, or a Python function (default:\n"
        "exact)",
    )
    parser.add_argument(
        "--field",
        metavar="NAME",
        help="with --prompts, field that the scorer reads (default: `answer`, `pattern` or\n"
        "`expression`)",
    )
    parser.add_argument(
        "--allow-code",
        action="store_true",
        default=None,
        help="allow the Python function of --scorer to run, with your permissions",
    )
    parser.add_argument(
        "--samples",
        type=count,
        metavar="N",
        help="with --prompts, completions per prompt; more than one adds pass@k (default: 1)",
    )
    parser.add_argument(
        "--temperature",
        type=number,
        metavar="X",
        help="with --prompts, sampling temperature; 0 selects the most likely token (default: 0)",
    )
    parser.add_argument(
        "--max-tokens",
        type=count,
        metavar="N",
        help="with --prompts, maximum number of tokens per completion (default: 256)",
    )
    parser.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="with --prompts, end completions at this string; can be repeated",
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
        help="format every context or prompt as a user message with the chat template",
    )
    parser.add_argument(
        "--batch-size",
        type=count,
        metavar="N",
        help="choices or completions per batch (default: 16)",
    )
    parser.add_argument(
        "--jsonl",
        metavar="FILE",
        help="write the result of every question or completion as JSON Lines",
    )
