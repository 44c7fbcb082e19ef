"""`maxpipe completion`: tab completion for bash, zsh and fish.

The printed script calls the installed command, which computes completions from its argument parser
without heavy imports.

For bash, this module also parses and quotes words, without shell expansion. Readline replaces only
the end of the line, and the replaced text may start inside the last word. The replacement is
escaped for the quote that is open at the position where it starts.
"""

from __future__ import annotations

import argparse
import glob
import os
import sys
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from maxpipe.commands.parser import (
    CHECKPOINT,
    DATA_PREFIX,
    RUN,
    RUN_OR_FILE,
    STEP,
    Commands,
    Parser,
)
from maxpipe.errors import Code, ExitCode

_PLAIN, _SINGLE, _DOUBLE, _ANSI = "", "'", '"', "$'"
_ENDS_WORD = " \t\n;|&()<>"
_SAFE = "%+,-./:=@_"
_ESCAPED_IN_DOUBLE = '"$`\\'
_NAMED = {"a": 7, "b": 8, "e": 27, "E": 27, "f": 12, "n": 10, "r": 13, "t": 9, "v": 11}
_OCTAL = 3
"""Maximum number of digits in an octal escape sequence."""


@dataclass(slots=True)
class Word:
    """A shell word, with the position of each of its characters in the command line."""

    text: str = ""
    ends: list[int] = field(default_factory=list)
    """End offset of each character of `text` in the command line."""


@dataclass(slots=True)
class CommandLine:
    """A command line up to the cursor."""

    line: str
    words: list[Word]
    open_quotes: list[str]
    """The quote character that is open before each character of the line, and at the end of the
    line."""

    def replacement(self, start: int, text: str) -> str:
        """Return the string that replaces `line[start:]`, so that the last word becomes `text`."""
        word, quote = self.words[-1], self.open_quotes[start]
        tail = text[sum(end <= start for end in word.ends) :]
        if quote:
            quoted = "".join(_inside(quote, character) for character in tail)
            # Readline closes the quote, unless the string already ends with the quote character.
            return quoted + quote[-1] if not quoted or quoted[-1] == quote[-1] else quoted
        if not tail.isprintable():
            return f"$'{''.join(_inside(_ANSI, character) for character in tail)}'"
        is_home = tail.startswith("~") and self.line.startswith("~", start)
        return ("~" if is_home else "") + "".join(map(_escaped, tail[is_home:]))


def read(line: str) -> CommandLine:
    """Parse a simple command without shell expansion. After a space, the last word is empty."""
    words: list[Word] = []
    quotes: list[str] = []
    quote, inside, position = _PLAIN, False, 0
    while position < len(line):
        if quote == _PLAIN and line[position] in _ENDS_WORD:
            inside, after = False, position + 1
            quotes.append(quote)
        else:
            if not inside:
                words.append(Word())
            inside, before = True, quote
            quote, text, after = _next(line, position, quote)
            words[-1].text += text
            words[-1].ends += [after] * len(text)
            quotes += [before] * (after - position)
        position = after
    return CommandLine(line, words if inside else [*words, Word()], [*quotes, quote])


def _next(line: str, position: int, quote: str) -> tuple[str, str, int]:
    """Parse the next segment of a word. Return the quote that is open after the segment, the
    segment's text, and its end offset.
    """
    character, after = line[position], position + 1
    follows = line[after : after + 1]
    if quote == _PLAIN:
        if character == "$" and follows == "'":
            return _ANSI, "", after + 1
        if character in (_SINGLE, _DOUBLE):
            return character, "", after
        if character == "\\":
            return quote, follows.replace("\n", ""), after + len(follows)
    elif character == quote[-1]:
        return _PLAIN, "", after
    elif quote == _DOUBLE and character == "\\" and (not follows or follows in '\\"$`\n'):
        return quote, follows.replace("\n", ""), after + len(follows)
    elif quote == _ANSI and character == "\\":
        text, after = _decode_ansi_escape(line, after)
        return quote, text, after
    return quote, character, after


def _decode_ansi_escape(line: str, position: int) -> tuple[str, int]:
    """Decode an escape in `$'...'`, or adjacent octal escapes. Return (text, end offset)."""
    content, after = bytearray(), position
    while True:
        digits = ""
        while len(digits) < _OCTAL and line[after : after + 1] in tuple("01234567"):
            digits, after = digits + line[after], after + 1
        if not digits:
            break
        is_cut = len(digits) < _OCTAL and after == len(line)
        content += b"" if is_cut else bytes([int(digits, 8) & 255])
        if content[-1:] < b"\x80" or line[after : after + 1] != "\\":
            break
        if line[after + 1 : after + 2] not in tuple("01234567"):
            break
        after += 1
    if after > position:
        return os.fsdecode(bytes(content)), after
    follows = line[position : position + 1]
    known = _NAMED.get(follows)
    return (follows if known is None else chr(known)), position + len(follows)


def _inside(quote: str, character: str) -> str:
    """Escape a character for use inside an open quote, and leave the quote open."""
    if quote == _ANSI:
        if character.isprintable() and character not in "'\\!":
            return character
        return "".join(f"\\{byte:03o}" for byte in os.fsencode(character))
    if not character.isprintable():
        return f"{quote}$'{_inside(_ANSI, character)}'{quote}"
    if quote == _SINGLE:
        return "'\\''" if character == "'" else character
    if character == "!":  # interactive shells expand `!` to a history entry
        return "\"'!'\""
    return f"\\{character}" if character in _ESCAPED_IN_DOUBLE else character


def _escaped(character: str) -> str:
    is_safe = character.isalnum() or character in _SAFE or not character.isascii()
    return character if is_safe else f"\\{character}"


REQUEST_OPTION = "--complete"
"""Hidden option used by the shell scripts. zsh and fish pass `zsh WORD...` or `fish WORD...`: the
unquoted words, with the incomplete word last. bash passes `bash LINE TEXT`: the line up to the
cursor, and the end of the line that the completion replaces.

Every completion ends with a null byte, which cannot occur in a name, so the shell never evaluates a
completion as code. zsh and fish quote completions themselves. For zsh, a trailing space marks a
complete word. For bash, completions are already quoted, and the first record specifies whether a
single completion is followed by a space.
"""

_BASH = """\
_maxpipe() {
    local each space=""
    COMPREPLY=()
    while IFS= read -r -d '' each; do
        if [[ -z "$space" ]]; then space="$each"; else COMPREPLY+=("$each"); fi
    done < <("$1" completion --complete bash "${COMP_LINE:0:COMP_POINT}" "$2" 2>/dev/null)
    if [[ "$space" == space ]]; then compopt +o nospace 2>/dev/null; fi
}
complete -o nospace -F _maxpipe maxpipe
"""
_ZSH = """\
#compdef maxpipe
_maxpipe() {
    local each home="" current="$PREFIX"
    [[ -n $compstate[quote] ]] && current="$compstate[quote]$PREFIX$compstate[quote]"
    current="${(Q)current}"
    local -a before options
    before=("${(@Q)words[2,CURRENT-1]}")
    for each in ${(0)"$("${(Q)words[1]}" completion --complete zsh "$before[@]" "$current" \
        2>/dev/null)"}; do
        options=()
        if [[ $each == *' ' ]]; then each="${each% }"; else options=(-S ''); fi
        if [[ $PREFIX == '~'* && -z $compstate[quote] ]]; then
            compadd -Q "$options[@]" -- "~${(q)each#\\~}"
        else
            compadd "$options[@]" -- "$each"
        fi
    done
}
if [ "$funcstack[1]" = _maxpipe ]; then
    _maxpipe "$@"
else
    compdef _maxpipe maxpipe
fi
"""
_FISH = """\
function __maxpipe
    set -l words (commandline -opc)
    set -l raw (commandline -ct | string collect)
    set -l current
    for quote in '' "'" '"'
        set current (string unescape -- "$raw$quote" | string collect)
        and break
    end
    $words[1] completion --complete fish $words[2..-1] "$current" 2>/dev/null
end
complete -c maxpipe -f -a '(__maxpipe | string split0)'
"""
_SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}

_FILES = (".yml", ".yaml")
_MOST_STEPS = 1000


def candidates(parser: Parser, words: Sequence[str]) -> list[str]:
    """Return completions for the last of the program arguments `words`."""
    *before, current = words or [""]
    command, arguments = _command(parser, before)
    choices = _choices(command)
    if choices:
        return _filter_prefix(current, (f"{name} " for name in choices))
    option = _option(command, arguments[-1]) if arguments else None
    if option is not None and option.nargs != 0:
        # A metavar such as `one|two|NAME` lists alternatives; lower-case alternatives are literal.
        words = str(option.metavar or "").split("|")
        literals = [word for word in words if word.islower()] if len(words) > 1 else []
        if known := option.choices or literals:
            return _filter_prefix(current, (f"{word} " for word in known))
        return _paths(current, ())
    if current.startswith("-"):
        names = (name for action in command._actions for name in action.option_strings)
        shown = (name for name in names if name.startswith("--") and name != REQUEST_OPTION)
        return _filter_prefix(current, (f"{name} " for name in shown))
    action = _expected(command, arguments)
    return sorted(set(_values(action, current))) if action is not None else []


def _shell_replies(parser: Parser, shell: str, words: Sequence[str]) -> list[str]:
    """Return completions in the output format of `shell` (see `REQUEST_OPTION`)."""
    if shell != "bash":
        replies = candidates(parser, words)
        if shell == "fish":  # fish would display text after a tab as a description
            return [reply.removesuffix(" ") for reply in replies if "\t" not in reply]
        return replies
    if len(words) != 2 or not words[0].endswith(words[1]):
        return []  # the cursor is in a different command, for example inside a substitution
    line = read(words[0])
    start = len(words[0]) - len(words[1])
    replies = candidates(parser, [word.text for word in line.words[1:]])
    may_end = len(replies) == 1 and replies[0].endswith(" ")
    quoted = [line.replacement(start, reply.removesuffix(" ")) for reply in replies]
    return ["space" if may_end else "no space", *quoted]


def _command(parser: Parser, before: Sequence[str]) -> tuple[argparse.ArgumentParser, list[str]]:
    """Return the parser of the command selected by the words, and the command's arguments."""
    command: argparse.ArgumentParser = parser
    arguments: list[str] = []
    for word in before:
        choices = _choices(command)
        if word in choices:
            command, arguments = choices[word], []
        elif not choices:
            arguments.append(word)
    return command, arguments


def _choices(parser: argparse.ArgumentParser) -> dict[str, Parser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return action.choices
    return {}


def _option(parser: argparse.ArgumentParser, word: str) -> argparse.Action | None:
    return parser._option_string_actions.get(word)


def _expected(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Action | None:
    """Return the positional argument that the parser expects after the given arguments."""
    count, skip = 0, False
    for word in arguments:
        option = _option(parser, word)
        if skip or option is not None or word.startswith("-"):
            skip = not skip and option is not None and option.nargs != 0
            continue
        count += 1
    for action in parser._actions:
        if action.option_strings:
            continue
        if count == 0 or action.nargs in ("*", "+"):
            return action
        count -= 1
    return None


def _values(action: argparse.Action, current: str) -> list[str]:
    shown = str(action.metavar or "")
    if action.choices:
        return _filter_prefix(current, (f"{choice} " for choice in action.choices))
    if shown in (RUN, CHECKPOINT, STEP):
        return _runs(current, with_step=shown != RUN)
    if shown == "KEY":
        from maxpipe.config.schema import KEYS, SECTIONS

        return _filter_prefix(current, (f"{key} " for key in (*SECTIONS, *KEYS)))
    if shown == "CODE":
        codes = _filter_prefix(current.upper(), (f"{code} " for code in Code))
        return [f"{current}{code[len(current) :]}" for code in codes]
    if shown == "NAME":
        return _filter_prefix(current, _bundled_names())
    if shown == RUN_OR_FILE or shown.endswith("section.key=value"):
        # Data files are accepted in place of a config and may have any suffix.
        endings = () if shown.startswith(DATA_PREFIX) else _FILES
        shown = shown.removeprefix(DATA_PREFIX)
        keys = [] if shown == RUN_OR_FILE else _assignments(current)
        runs = _runs(current, with_step=False) if shown.startswith(RUN_OR_FILE) else []
        return [*keys, *runs, *_filter_prefix(current, _bundled_names()), *_paths(current, endings)]
    return _paths(current, ())


def _bundled_names() -> Iterator[str]:
    from maxpipe.config.config_files import bundled_configs

    return (f"{name} " for name in bundled_configs())


def _assignments(current: str) -> list[str]:
    """Return completions for `section.key=value`: sections, then keys, then known values."""
    from maxpipe.config.schema import KEYS, SECTIONS

    key, sign, value = current.partition("=")
    if not sign:
        if "." not in current:
            return _filter_prefix(
                current, (f"{section}." for section in SECTIONS if "." not in section)
            )
        return _filter_prefix(current, (f"{name}=" for name in KEYS))
    hint = KEYS.get(key)
    if hint is bool:
        return _filter_prefix(current, (f"{key}={word} " for word in ("true", "false")))
    if typing.get_origin(hint) is typing.Literal:
        return _filter_prefix(current, (f"{key}={word} " for word in typing.get_args(hint)))
    if key == "checkpoint.restore_from":
        if value.startswith("hf:"):
            folders = _paths(value.removeprefix("hf:"), (), folders=True)
            return [f"{key}=hf:{each}" for each in folders]
        return [f"{key}={each}" for each in _runs(value, with_step=True)]
    if key.rpartition(".")[2].endswith(("path", "dir", "executable", "template")):
        return [f"{key}={each}" for each in _paths(value, ())]
    return []


def _runs(current: str, *, with_step: bool) -> list[str]:
    """Return completions for runs by name or path, and for steps after `@`."""
    from maxpipe.config.config_files import CHECKPOINTS_FOLDER
    from maxpipe.config.sections.run import RunConfig

    run, sign, _ = current.rpartition("@")
    below = Path(RunConfig().dir)
    addresses: list[str] = []
    folders = [Path(run), below / run] if "/" not in run else [Path(run)]
    if with_step and sign and any(map(os.path.isdir, folders)):
        steps: list[str] = []
        for folder in folders:
            names = _visible_folders(folder / CHECKPOINTS_FOLDER)
            numbers = [name for name in names if name.isascii() and name.isdigit()]
            steps += sorted(numbers, key=int)[-_MOST_STEPS:]
        addresses = _filter_prefix(
            current, (f"{run}@{step} " for step in ("newest", "best", *steps))
        )
    # Names that begin with `-` or `~` are completed only as paths.
    names = [name for name in _visible_folders(below) if name[0] not in "-~"]
    return [
        *addresses,
        *_filter_prefix(current, (f"{name} " for name in names)),
        *_paths(current, (), folders=True),
    ]


def _visible_folders(folder: Path) -> list[str]:
    """Return the names of subfolders that are not hidden."""
    try:
        with os.scandir(folder) as entries:
            return [e.name for e in entries if e.is_dir() and e.name[0] != "."]
    except (OSError, ValueError):
        return []


def _paths(current: str, suffixes: tuple[str, ...], *, folders: bool = False) -> list[str]:
    """Return folders with a trailing `/`, and files with any of the suffixes (default: all
    files).
    """
    try:
        written = os.path.expanduser(current)
    except (OSError, RuntimeError):
        return []
    paths = []
    for path in sorted(glob.glob(f"{glob.escape(written)}*")):
        path = current + path[len(written) :]
        # Without `./`, the name would be parsed as an option or a home folder.
        if not current and path[0] in "-~":
            path = f"./{path}"
        if os.path.isdir(os.path.expanduser(path)):
            paths.append(f"{path}/")
        elif not folders and path.endswith(suffixes or ("",)):
            paths.append(f"{path} ")
    return paths


def _filter_prefix(current: str, words: typing.Iterable[str]) -> list[str]:
    return [word for word in words if word.startswith(current)]


def add(commands: Commands, root: Parser) -> None:
    """Add the `completion` command. `root` is the top-level parser."""

    def command(options: argparse.Namespace) -> int:
        if options.complete:
            shell, *words = options.complete
            for reply in _shell_replies(root, shell, words):
                sys.stdout.buffer.write(os.fsencode(reply) + b"\0")
        elif options.shell is None:
            parser.error("the following arguments are required: SHELL")
        else:
            print(_SCRIPTS[options.shell], end="")
        return ExitCode.DONE

    parser = commands.add_parser(
        "completion",
        help="print a script for tab completion of commands, keys, values, files and runs",
        description="Print a shell script that enables tab completion of the maxpipe command.",
        epilog="bash: add to ~/.bashrc    source <(maxpipe completion bash)\n"
        "zsh:  add to ~/.zshrc, after compinit    source <(maxpipe completion zsh)\n"
        "fish: maxpipe completion fish > ~/.config/fish/completions/maxpipe.fish",
    )
    parser.add_argument("shell", nargs="?", choices=tuple(_SCRIPTS), metavar="SHELL")
    parser.add_argument(REQUEST_OPTION, nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(command=command)
