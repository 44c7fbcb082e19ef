"""`maxpipe generate`: generate text with a checkpoint."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from maxpipe.commands.parser import (
    Commands,
    add_address,
    add_ema_option,
    add_inputs,
    count,
    integer,
    number,
)
from maxpipe.errors import Code, ConfigError, ExitCode

if TYPE_CHECKING:
    from maxpipe.data.tokenizer import Tokenizer
    from maxpipe.data.tokenizers.chat import ChatInput
    from maxpipe.generation.completions import Completion, Prompt

_MAX_PROMPT_BYTES = 1 << 24
"""Maximum size of an interactive prompt in bytes."""
_STDIN = "-"


def _generate(options: argparse.Namespace) -> int:
    from maxpipe.api.generation import GenerationOptions, open_generator
    from maxpipe.huggingface.folder import resolve_model

    model = resolve_model(options.checkpoint, average=options.average)
    _check_images(options)
    names = [field.name for field in dataclasses.fields(GenerationOptions)]
    chosen = GenerationOptions(**{name: getattr(options, name) for name in names})
    chosen.check(_location, _option)
    texts: Any = _conversations(options) if options.chat else _prompts(options)
    with open_generator(
        model, options.inputs, chosen, say=_print_status, where=_location
    ) as generator:
        prompts = generator.encode(texts)
        generator.load()

        def answer(prompts: list[Prompt]) -> str:
            printer = _Printer(options, generator.tokenizer, is_alone=len(prompts) == 1)
            generator.complete(prompts, printer.write, printer.stream)
            return printer.newest

        if options.interactive and options.chat:
            from maxpipe.data.prompts import user_chat
            from maxpipe.data.tokenizers.chat import ChatInput, Message

            messages: list[Message] = []

            def reply(text: str, number: int) -> None:
                """Generate a reply to the user message `text`, given the previous messages."""
                asked = [*messages, *user_chat(text).messages]
                told = answer(generator.encode([ChatInput(asked)], number))
                messages[:] = [*asked, {"role": "assistant", "content": told}]

            _converse(reply)
        elif options.interactive:
            _converse(lambda text, number: answer(generator.encode([text], number)))
        else:
            answer(prompts)
    return ExitCode.DONE


def _check_images(options: argparse.Namespace) -> None:
    """Check that images are used with user messages.

    Raises:
        ConfigError: another option excludes images.
    """
    is_file = options.prompts not in (None, _STDIN)
    if options.image and (not options.chat or options.interactive or is_file):
        rule = "requires --chat and --prompt, because images are part of a user message."
        action = "Add --chat, and pass the text with --prompt."
        raise ConfigError.one(Code.CLI_CONFLICT, "command line: --image", None, rule, action)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _location(name: str) -> str:
    return f"command line: {_option(name)}"


def _print_status(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# Prompts.


def _prompts(options: argparse.Namespace) -> list[str]:
    from maxpipe.data.prompts import MAX_BYTES, parse_prompts, read_prompts

    if options.prompts is None:
        return options.prompt or []
    where = f"command line: --prompts {options.prompts}"
    if options.prompts == _STDIN:
        raw = sys.stdin.buffer.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            rule = f"must be at most {MAX_BYTES} bytes."
            raise ConfigError.one(Code.GEN_PROMPT, where, None, rule, "Split the input.")
        return parse_prompts(raw, where)
    return read_prompts(options.prompts, where)


def _conversations(options: argparse.Namespace) -> list[ChatInput]:
    from maxpipe.data.prompts import read_conversations, user_chat

    if options.prompts is None or options.prompts == _STDIN:
        chats = [user_chat(text) for text in _prompts(options)]
        return [_with_images(chat, options.image) for chat in chats] if options.image else chats
    return read_conversations(options.prompts, f"command line: --prompts {options.prompts}")


def _with_images(chat: ChatInput, paths: list[str]) -> ChatInput:
    """Return a user message with images before its text.

    Raises:
        ConfigError: an image file cannot be read.
    """
    from maxpipe.data.images import MAX_FILE_BYTES
    from maxpipe.data.tokenizers.chat import ImageReference
    from maxpipe.io.files import read

    images = []
    for path in paths:
        try:
            images.append(ImageReference(0, path, read(path, MAX_FILE_BYTES)))
        except OSError as error:
            rule = f"must be a readable image file: {error.strerror or error}."
            where = "command line: --image"
            raise ConfigError.one(
                Code.DATA_IMAGE, where, path, rule, "Correct the path of the image."
            ) from error
    text = {"type": "text", "text": chat.messages[0]["content"]}
    content = [*({"type": "image"} for _ in images), text]
    return chat._replace(messages=[{"role": "user", "content": content}], images=tuple(images))


def _converse(answer: Callable[[str, int], object]) -> None:
    """Read one prompt per line from stdin. If a prompt is invalid, print the error and continue."""
    from maxpipe.data.prompts import parse_prompt

    number, asks = 0, sys.stdin.isatty()
    while True:
        if asks:
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.buffer.readline(_MAX_PROMPT_BYTES)
        if not line:
            break
        if not line.strip():
            continue
        try:
            answer(parse_prompt(line.rstrip(b"\r\n"), f"prompt {number + 1}"), number)
        except ConfigError as error:
            _print_status(str(error))
        number += 1
    if asks:
        _print_status("")


# Output.


class _Printer:
    """Write completions to standard output, as plain text or JSON Lines."""

    def __init__(self, options: argparse.Namespace, tokenizer: Tokenizer, *, is_alone: bool):
        self._json, self._logprobs = options.json, options.logprobs
        self._streams = is_alone and not options.json
        self._tokenizer = tokenizer
        self.newest = ""
        """Text of the latest completion."""

    def stream(self, text: str) -> None:
        if self._streams and text:
            _write_now(_escape_control(text))

    def write(self, done: Completion) -> None:
        self.newest = done.text
        if self._json:
            _write_now(json.dumps(self._record(done)) + "\n")
            return
        parts = [] if self._streams else [f"--- {done.prompt.number + 1}: {done.prompt.text}\n"]
        parts += [] if self._streams else [done.text]
        parts.append("\n")
        if self._logprobs:
            parts += [
                f"{logprob:10.4f} {token:8d}  {self._tokenizer.decode([token])!r}\n"
                for token, logprob in zip(done.tokens, done.logprobs, strict=True)
            ]
        _write_now(_escape_control("".join(parts)))

    def _record(self, done: Completion) -> dict[str, Any]:
        found = {"prompt": done.prompt.text, "text": done.text, "tokens": done.tokens}
        if self._logprobs:
            found["logprobs"] = done.logprobs
        return found | {"finish_reason": done.finish_reason}


def _write_now(text: str) -> None:
    """Write to stdout and flush, so that no buffered output is lost on an interrupt."""
    sys.stdout.write(text)
    sys.stdout.flush()


def _escape_control(text: str) -> str:
    """Replace characters that stdout cannot encode; on a terminal, remove control characters."""
    if sys.stdout.isatty():
        text = "".join(each for each in text if each.isprintable() or each in "\n\t")
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)


# Arguments.


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="prompt; repeat the option for several prompts",
    )
    source.add_argument(
        "--prompts",
        metavar="FILE",
        help="file with one prompt per line, or *.jsonl with field `prompt`; - reads stdin",
    )
    source.add_argument(
        "--interactive", action="store_true", help="read prompts line by line from stdin"
    )
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help="image before the text of each prompt; requires --chat; repeat for several images",
    )


def add(commands: Commands) -> None:
    """Add the `generate` command."""
    parser = commands.add_parser(
        "generate",
        help="generate text with a checkpoint",
        description="Generate completions of prompts. A single completion is streamed. Several\n"
        "completions are printed as they finish, in the order of their prompts. The checkpoint's\n"
        "config is used, except for mesh and pipeline. Set mesh.* to use several devices, and\n"
        "train.sequence_length to allow longer sequences than in training. The run may still be\n"
        "training: the command writes no files to the run folder.",
        epilog="examples:\n  maxpipe generate quickstart --prompt 'To be, or' --temperature 0.8\n"
        "  maxpipe generate quickstart@best --prompts prompts.txt --json --max-tokens 64\n"
        "  maxpipe generate quickstart --interactive --top-p 0.9 --stop '.'\n"
        "  maxpipe generate quickstart --prompt Once mesh.cpu_devices=2 mesh.ici_tensor=2",
    )
    add_address(parser, about="a run, RUN@STEP, RUN@best, or a Hugging Face folder")
    add_ema_option(parser)
    add_inputs(parser)
    _add_prompts(parser)
    parser.add_argument(
        "--max-tokens",
        type=count,
        default=128,
        metavar="N",
        help="maximum number of tokens per completion (default: 128)",
    )
    parser.add_argument(
        "--temperature",
        type=number,
        default=1.0,
        metavar="X",
        help="sampling temperature; 0 selects the most likely token (default: 1)",
    )
    parser.add_argument(
        "--top-k",
        type=integer,
        default=0,
        metavar="K",
        help="sample from the K most likely tokens; 0 selects all tokens (default: 0)",
    )
    parser.add_argument(
        "--top-p",
        type=number,
        default=1.0,
        metavar="P",
        help="sample from the most likely tokens whose total probability is P (default: 1)",
    )
    parser.add_argument(
        "--min-p",
        type=number,
        default=0.0,
        metavar="P",
        help="minimum probability of a token relative to the most likely token (default: 0)",
    )
    parser.add_argument(
        "--repetition-penalty",
        type=number,
        default=1.0,
        metavar="X",
        help="penalty for repeated tokens; values above 1 make them less likely (default: 1)",
    )
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end a completion at this string; repeat the option for several strings",
    )
    parser.add_argument(
        "--seed", type=integer, default=0, metavar="N", help="sampling seed (default: 0)"
    )
    parser.add_argument(
        "--batch-size", type=count, default=16, metavar="N", help="prompts per batch (default: 16)"
    )
    parser.add_argument(
        "--chat", action="store_true", help="format prompts as user messages with the chat template"
    )
    parser.add_argument(
        "--logprobs", action="store_true", help="print the log-probability of every token, in nats"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    parser.set_defaults(command=_generate)
