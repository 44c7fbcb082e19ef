"""`maxpipe completion`: TAB completion in shells.

A shell gets a few lines that call the command itself, so that completions are those of the
installed version. They are read from the parser, without heavy imports.
"""

from __future__ import annotations

import argparse
import glob
import os
import sys
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path

from maxpipe.commands.parser import CHECKPOINT, OF_DATA, OF_RUN, RUN, STEP, Commands, Parser
from maxpipe.commands.shell_quoting import read
from maxpipe.config import shipped
from maxpipe.errors import ExitCode

ASK = "--answer"
"""Hidden option, by which a shell calls the command: `zsh WORD...` and `fish WORD...` with the
words so far, without quotes, the one to complete last; `bash LINE TEXT` with the line up to the
cursor, and the end of it that is replaced.

Each answer ends with a null byte, which no name contains, so that a shell evaluates nothing. zsh
and fish quote answers themselves; in those for zsh a space at the end may be inserted, too. For
bash answers are quoted, and the first one tells whether a space follows the only other one.
"""

_BASH = """\
_maxpipe() {
    local each space=""
    COMPREPLY=()
    while IFS= read -r -d '' each; do
        if [[ -z "$space" ]]; then space="$each"; else COMPREPLY+=("$each"); fi
    done < <("$1" completion --answer bash "${COMP_LINE:0:COMP_POINT}" "$2" 2>/dev/null)
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
    for each in ${(0)"$("${(Q)words[1]}" completion --answer zsh "$before[@]" "$current" \
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
    $words[1] completion --answer fish $words[2..-1] "$current" 2>/dev/null
end
complete -c maxpipe -f -a '(__maxpipe | string split0)'
"""
_SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}

_FILES = (".yml", ".yaml")
_MOST_STEPS = 1000


def candidates(parser: Parser, words: Sequence[str]) -> list[str]:
    """Completions of the last of `words`, which follow the program's name."""
    *before, current = words or [""]
    command, arguments = _command(parser, before)
    choices = _choices(command)
    if choices:
        return _beginning(current, (f"{name} " for name in choices))
    option = _option(command, arguments[-1]) if arguments else None
    if option is not None and option.nargs != 0:
        if known := option.choices or _named(option):
            return _beginning(current, (f"{each} " for each in known))
        return _paths(current, ())
    if current.startswith("-"):
        names = (name for each in command._actions for name in each.option_strings)
        shown = (name for name in names if name.startswith("--") and name != ASK)
        return _beginning(current, (f"{name} " for name in shown))
    found: list[str] = []
    for each in _expected(command, arguments):
        found += _values(each, current)
    return sorted(set(found))


def _answers(parser: Parser, shell: str, words: Sequence[str]) -> list[str]:
    """What a shell inserts, or in its way: see `ASK`."""
    if shell != "bash":
        found = candidates(parser, words)
        if shell == "fish":  # a description follows a tab
            return [each.removesuffix(" ") for each in found if "\t" not in each]
        return found
    if len(words) != 2 or not words[0].endswith(words[1]):
        return []  # the cursor is in another command, inside a substitution for instance
    line = read(words[0])
    start = len(words[0]) - len(words[1])
    found = candidates(parser, [word.text for word in line.words[1:]])
    may_end = len(found) == 1 and found[0].endswith(" ")
    quoted = [line.replacement(start, each.removesuffix(" ")) for each in found]
    return ["space" if may_end else "no space", *quoted]


def _command(parser: Parser, before: Sequence[str]) -> tuple[argparse.ArgumentParser, list[str]]:
    """The parser of the command that the words name, and those of its arguments that are there."""
    found: argparse.ArgumentParser = parser
    arguments: list[str] = []
    for word in before:
        choices = _choices(found)
        if word in choices:
            found, arguments = choices[word], []
        elif not choices:
            arguments.append(word)
    return found, arguments


def _choices(parser: argparse.ArgumentParser) -> dict[str, Parser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return action.choices
    return {}


def _option(parser: argparse.ArgumentParser, word: str) -> argparse.Action | None:
    return parser._option_string_actions.get(word)


def _named(option: argparse.Action) -> list[str]:
    """The words that help shows in place of a value, `one|two|NAME`, but for names."""
    words = str(option.metavar or "").split("|")
    return [each for each in words if each.islower()] if len(words) > 1 else []


def _expected(
    parser: argparse.ArgumentParser, arguments: Sequence[str]
) -> Iterator[argparse.Action]:
    """The positional that comes next, given those that are there."""
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
            yield action
            return
        count -= 1


def _values(action: argparse.Action, current: str) -> list[str]:
    """Completions of an argument, by its metavar."""
    shown = str(action.metavar or "")
    if action.choices:
        return _beginning(current, (f"{each} " for each in action.choices))
    if shown in (RUN, CHECKPOINT, STEP):
        return _runs(current, with_step=shown != RUN)
    if shown == "KEY":
        from maxpipe.config.keys import KEYS, SECTIONS

        return _beginning(current, (f"{each} " for each in (*SECTIONS, *KEYS)))
    if shown == "NAME":
        return _beginning(current, _shipped())
    if shown == OF_RUN or shown.endswith("section.key=value"):
        # Data files, which have any name, are accepted in place of a config.
        endings = () if shown.startswith(OF_DATA) else _FILES
        shown = shown.removeprefix(OF_DATA)
        keys = [] if shown == OF_RUN else _assignments(current)
        runs = _runs(current, with_step=False) if shown.startswith(OF_RUN) else []
        return [*keys, *runs, *_beginning(current, _shipped()), *_paths(current, endings)]
    return _paths(current, ())


def _shipped() -> Iterator[str]:
    return (f"{name} " for name in shipped.configs())


def _assignments(current: str) -> list[str]:
    """Keys, section by section, and values where the type names them."""
    from maxpipe.config.keys import KEYS, SECTIONS

    key, sign, value = current.partition("=")
    if not sign:
        if "." not in current:
            return _beginning(current, (f"{each}." for each in SECTIONS if "." not in each))
        return _beginning(current, (f"{name}=" for name in KEYS))
    hint = KEYS.get(key)
    if hint is bool:
        return _beginning(current, (f"{key}={word} " for word in ("true", "false")))
    if typing.get_origin(hint) is typing.Literal:
        return _beginning(current, (f"{key}={word} " for word in typing.get_args(hint)))
    if key == "checkpoint.restore_from":
        if value.startswith("hf:"):
            folders = _paths(value.removeprefix("hf:"), (), folders=True)
            return [f"{key}=hf:{each}" for each in folders]
        return [f"{key}={each}" for each in _runs(value, with_step=True)]
    if key.rpartition(".")[2].endswith(("path", "dir", "executable", "template")):
        return [f"{key}={each}" for each in _paths(value, ())]
    return []


def _runs(current: str, *, with_step: bool) -> list[str]:
    """Runs by name and by path; after an `@` the steps of one."""
    from maxpipe.config.schema import RunConfig

    run, sign, _ = current.rpartition("@")
    below = Path(RunConfig().dir)
    found: list[str] = []
    if with_step and sign:
        folders = [Path(run), below / run] if "/" not in run else [Path(run)]
        steps = [name for each in folders for name in _numbers(each / "checkpoints")]
        numbered = (f"{run}@{each} " for each in ("newest", "best", *steps))
        found = _beginning(current, numbered) if any(map(os.path.isdir, folders)) else []
    names = [name for name in _numbers_or_names(below) if name[0] not in "-~"]  # by path only
    return [
        *found,
        *_beginning(current, (f"{name} " for name in names)),
        *_paths(current, (), folders=True),
    ]


def _numbers(folder: Path) -> list[str]:
    found = (name for name in _numbers_or_names(folder) if name.isascii() and name.isdigit())
    return sorted(found, key=int)[-_MOST_STEPS:]


def _numbers_or_names(folder: Path) -> list[str]:
    """Names of the folders in one, but for hidden ones."""
    try:
        with os.scandir(folder) as entries:
            return [each.name for each in entries if each.is_dir() and each.name[0] != "."]
    except (OSError, ValueError):
        return []


def _paths(current: str, suffixes: tuple[str, ...], *, folders: bool = False) -> list[str]:
    """Files with one of the suffixes, if any are given, and folders, which end with `/`."""
    try:
        written = os.path.expanduser(current)
    except (OSError, RuntimeError):
        return []
    found = []
    for path in sorted(glob.glob(f"{glob.escape(written)}*")):
        path = current + path[len(written) :]
        if not current and path[0] in "-~":  # an option or a home folder, by its name alone
            path = f"./{path}"
        if os.path.isdir(os.path.expanduser(path)):
            found.append(f"{path}/")
        elif not folders and path.endswith(suffixes or ("",)):
            found.append(f"{path} ")
    return found


def _beginning(current: str, words: typing.Iterable[str]) -> list[str]:
    return [word for word in words if word.startswith(current)]


def add(commands: Commands, root: Parser) -> None:
    """Adds the command; `root` is the parser of all of them."""

    def command(options: argparse.Namespace) -> int:
        if options.answer:
            shell, *words = options.answer
            for each in _answers(root, shell, words):
                sys.stdout.buffer.write(os.fsencode(each) + b"\0")
        elif options.shell is None:
            parser.error("the following arguments are required: SHELL")
        else:
            print(_SCRIPTS[options.shell], end="")
        return ExitCode.DONE

    parser = commands.add_parser(
        "completion",
        help="let TAB complete commands, keys, values, files, runs and steps",
        description="Print what makes a shell complete the words of this command.",
        epilog="bash: add to ~/.bashrc    source <(maxpipe completion bash)\n"
        "zsh:  add to ~/.zshrc, after compinit    source <(maxpipe completion zsh)\n"
        "fish: maxpipe completion fish > ~/.config/fish/completions/maxpipe.fish",
    )
    parser.add_argument("shell", nargs="?", choices=tuple(_SCRIPTS), metavar="SHELL")
    parser.add_argument(ASK, nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(command=command)
