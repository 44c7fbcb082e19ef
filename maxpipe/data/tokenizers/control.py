"""Control tokens: which ids begin, end and pad a text, and what a model's folder says of them.

A Hugging Face folder names them in `tokenizer_config.json`, `special_tokens_map.json` and
`generation_config.json`; without these they have usual names.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from maxpipe.boundary import files
from maxpipe.boundary.typed import parse
from maxpipe.data.tokenizers.chat import ChatTemplate
from maxpipe.data.tokenizers.files import PATH
from maxpipe.errors import ConfigError

_ROLES = {
    "bos_token": ("<s>", "<|begin_of_text|>", "<bos>", "[BOS]", "<|startoftext|>", "[CLS]"),
    "eos_token": (
        *("</s>", "<|end_of_text|>", "<eos>", "[EOS]", "<|endoftext|>", "<|im_end|>"),
        *("[SEP]", "<|return|>"),
    ),
    "pad_token": ("<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>"),
}
_TURN_ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end_of_turn|>", "<|eot|>"),
    *("<|return|>", "<|call|>"),
)
_MAX_SETTINGS_BYTES = 1 << 24
_SETTINGS, _MAP, _GENERATION = (
    *("tokenizer_config.json", "special_tokens_map.json"),
    "generation_config.json",
)
_TEMPLATE_FILE = "chat_template.jinja"


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """The control tokens of a vocabulary: they stand for no text.

    `special_tokens` are all of them, by their text. `end_ids`, sorted, end a generated text:
    `end_id`, and the ends of a turn of a chat.
    """

    begin_id: int
    end_id: int
    pad_id: int
    end_ids: tuple[int, ...]
    special_tokens: Mapping[str, int]
    special_ids: frozenset[int] = field(init=False)
    role_texts: Mapping[str, str] = field(default_factory=dict)
    """Texts of control tokens by roles such as `bos_token`, as chat templates name them."""
    chat: ChatTemplate | None = None

    def __post_init__(self) -> None:
        roles = (self.begin_id, self.end_id, self.pad_id)
        object.__setattr__(self, "special_ids", frozenset([*self.special_tokens.values(), *roles]))


class Controlled:
    """What all tokenizers say of their control tokens."""

    control: Control

    @property
    def begin_id(self) -> int:
        return self.control.begin_id

    @property
    def end_id(self) -> int:
        return self.control.end_id

    @property
    def pad_id(self) -> int:
        return self.control.pad_id

    @property
    def end_ids(self) -> tuple[int, ...]:
        return self.control.end_ids

    @property
    def special_tokens(self) -> Mapping[str, int]:
        return self.control.special_tokens

    @property
    def special_ids(self) -> frozenset[int]:
        return self.control.special_ids

    @property
    def role_texts(self) -> Mapping[str, str]:
        return self.control.role_texts

    @property
    def chat(self) -> ChatTemplate | None:
        return self.control.chat


def resolve(
    path: str,
    special: dict[str, int],
    id_of: Callable[[str], int | None],
    vocab_size: int,
    known: Mapping[str, int] | None = None,
) -> Control:
    """The control tokens of the vocabulary in the file `path`.

    Without a begin token documents begin with the end token; without a padding token the end
    token pads.

    Args:
        path: Settings are read from its folder.
        special: Ids of the vocabulary's control tokens by their text.
        id_of: Id of any token of the vocabulary.
        vocab_size: Ids are below it.
        known: Ids that the file itself gives to `bos_token`, `eos_token` and `pad_token`.

    Raises:
        ConfigError: no end token, settings that cannot be read or name what is not there.
    """
    folder = os.path.dirname(os.path.expanduser(path))
    settings = _object(os.path.join(folder, _SETTINGS))
    texts = _texts(_object(os.path.join(folder, _MAP))) | _texts(settings)
    roles = {role: _role(role, path, texts, special, id_of, known or {}) for role in _ROLES}
    end = roles["eos_token"]
    if end is None:
        raise ConfigError.one(
            PATH,
            path,
            f"must have an end token: its special tokens are {_some(special) or 'none'}.",
            f'Put {_SETTINGS} with {{"eos_token": "..."}} beside it.',
        )
    begin, pad = roles["bos_token"], roles["pad_token"]
    ends = _generation_ends(os.path.join(folder, _GENERATION), vocab_size)
    ends = ends or [special[name] for name in _TURN_ENDS if name in special]
    template = _template(folder, settings)
    names = {i: name for name, i in special.items()}
    return Control(
        begin_id=end if begin is None else begin,
        end_id=end,
        pad_id=end if pad is None else pad,
        end_ids=tuple(sorted({end, *ends})),
        special_tokens=special
        | {texts[role]: i for role, i in roles.items() if role in texts and i is not None},
        role_texts=texts or {role: names[i] for role, i in roles.items() if i in names},
        chat=ChatTemplate(*template, texts) if template else None,
    )


def _role(
    role: str,
    path: str,
    texts: Mapping[str, str],
    special: Mapping[str, int],
    id_of: Callable[[str], int | None],
    known: Mapping[str, int],
) -> int | None:
    named = texts.get(role)
    if named is not None:
        found = id_of(named)
        if found is not None or role == "pad_token":  # published folders name padding they lack
            return known.get(role) if found is None else found
        raise ConfigError.one(
            PATH,
            path,
            f"must have the token that {_SETTINGS} beside it calls {role}: {named[:80]}.",
            f"Correct {role} there, or put the {_SETTINGS} of this tokenizer beside it.",
        )
    if role in known:
        return known[role]
    return next((special[name] for name in _ROLES[role] if name in special), None)


def _some(names: Iterable[str], most: int = 12) -> str:
    """The first names."""
    shown = list(names)
    more = f" and {len(shown) - most} more" if len(shown) > most else ""
    return ", ".join(name[:80] for name in shown[:most]) + more


def _object(path: str) -> dict[str, Any]:
    """The JSON object in an optional file."""
    try:
        return parse(files.read(path, _MAX_SETTINGS_BYTES), dict[str, Any])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        rule = f"must be a JSON object: {getattr(error, 'strerror', None) or error}."
        raise _wrong(path, rule) from error


def _wrong(path: str, rule: str) -> ConfigError:
    return ConfigError.one(PATH, path, rule, "Correct or remove the file.")


def _texts(entries: Mapping[str, Any]) -> dict[str, str]:
    """Token texts by role: each is written as its text, or as an object with `content`."""
    texts = {k: v.get("content") if isinstance(v, dict) else v for k, v in entries.items()}
    return {k: v for k, v in texts.items() if isinstance(v, str) and k.endswith("_token")}


def _generation_ends(path: str, vocab_size: int) -> Sequence[int]:
    """`eos_token_id` of a generation_config.json: one id or several."""
    found = _object(path).get("eos_token_id")
    ends = found if isinstance(found, list) else [] if found is None else [found]
    for each in ends:
        if type(each) is not int or not 0 <= each < vocab_size:
            rule = f"must have ids below {vocab_size} as eos_token_id: it has {str(each)[:80]}."
            raise _wrong(path, rule)
    return ends


def _template(folder: str, settings: Mapping[str, Any]) -> tuple[str, str] | None:
    """The chat template and the file it is in; of several named ones `default`."""
    path = os.path.join(folder, _TEMPLATE_FILE)
    try:
        return files.read(path, _MAX_SETTINGS_BYTES).decode(), path
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        rule = f"must be UTF-8 text: {getattr(error, 'strerror', None) or error}."
        raise _wrong(path, rule) from error
    found, path = settings.get("chat_template"), os.path.join(folder, _SETTINGS)
    if isinstance(found, list):
        named = [each for each in found if isinstance(each, dict)]
        found = next((e.get("template") for e in named if e.get("name") == "default"), None)
        if found is None:
            raise _wrong(path, "must have a chat template of the name default.")
    if found is not None and not isinstance(found, str):
        raise _wrong(path, "must have a text as chat_template.")
    return None if found is None else (found, path)
