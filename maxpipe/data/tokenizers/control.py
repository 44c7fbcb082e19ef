"""Control tokens: ids that begin, end and pad text, determined from the files in a model folder.

Only this module defines which tokens begin and end text. For each token, the first of these
sources that defines the token is used:

- BOS: the post-processor of `tokenizer.json`, `tokenizer_config.json`, `special_tokens_map.json`,
  the vocabulary file, common token names, `generation_config.json`, `config.json`, EOS
- EOS: `tokenizer_config.json`, `special_tokens_map.json`, the vocabulary file,
  `generation_config.json`, `config.json`, common token names
- additional ids that end generation: `generation_config.json`, `config.json`, common token names

`data/chat_spec.py` adds the token that closes assistant messages in a chat template.
"""

from __future__ import annotations

import copy
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import numpy as np

from maxpipe.config.image_format import ImageFormat
from maxpipe.data.tokenizers.chat import ChatTemplate
from maxpipe.data.tokenizers.files import MAX_IDS, PATH
from maxpipe.errors import Code, ConfigError
from maxpipe.io import files
from maxpipe.io.typed_json import parse_json

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
_SETTINGS, _MAP = "tokenizer_config.json", "special_tokens_map.json"
_GENERATION, _CONFIG = "generation_config.json", "config.json"
_TEMPLATE_FILE = "chat_template.jinja"


@dataclass(frozen=True, slots=True)
class Framing:
    """Tokens added before and after a prompt."""

    before: tuple[int, ...]
    after: tuple[int, ...] = ()
    reads_control: bool = False
    """Whether text that spells a control token is encoded as that token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlTokens:
    """Control tokens of a vocabulary. Control tokens are not part of the decoded text.

    `special_tokens` maps the text of every control token to its id. `end_ids` are the sorted ids
    that end generated text: `end_id` and the end-of-turn tokens of chat formats.
    """

    begin_id: int
    end_id: int
    pad_id: int
    end_ids: tuple[int, ...]
    special_tokens: Mapping[str, int]
    special_ids: frozenset[int] = field(init=False)
    role_texts: Mapping[str, str] = field(default_factory=dict)
    """Maps roles of chat templates (such as `bos_token`) to control-token strings."""
    chat: ChatTemplate | None = None
    published: Framing = Framing(())
    """Framing that `transformers` adds to a prompt with the tokenizer in this folder."""
    framing: Framing = None  # type: ignore[assignment]
    """Framing that maxpipe adds to a prompt: by default, one BOS token as in training documents."""

    def __post_init__(self) -> None:
        if self.framing is None:
            object.__setattr__(self, "framing", Framing((self.begin_id,)))
        roles = (self.begin_id, self.end_id, self.pad_id)
        object.__setattr__(self, "special_ids", frozenset([*self.special_tokens.values(), *roles]))


class Tokenizer(ABC):
    """Tokenizer with ids below `vocab_size`. The output of `encode` contains no control ids."""

    control: ControlTokens
    vocab_size: int
    embedding_rows: int = MAX_IDS
    """Number of embedding rows of the model; without a model, an upper bound on all ids."""
    min_embedding_rows: int
    """Largest id that encoded text can contain, plus one: the minimum number of embedding rows.

    BOS and EOS are included. Unused BPE ids, and control tokens that never occur in encoded text,
    are excluded.
    """
    byte_lengths: np.ndarray
    """int32 [vocab_size]: length in bytes of each id's text; 0 for control ids."""
    images: ImageFormat | None = None
    """Format of images in documents; None if documents have no images."""
    _fingerprint: str

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

    @property
    def framing(self) -> Framing:
        return self.control.framing

    def with_control(self, **changes: Any) -> Self:
        """Return a copy of the tokenizer with some fields of `ControlTokens` changed."""
        changed = copy.copy(self)
        changed.control = replace(self.control, **changes)
        return changed

    def with_images(self, image: ImageFormat | None) -> Self:
        """Return a copy for documents with images.

        Raises:
            ConfigError: an image token of the model is not a control token of the tokenizer.
        """
        if image is None:
            return self
        known, wanted = self.special_tokens.values(), (image.begin_id, image.token_id, image.end_id)
        missing = [number for number in wanted if number not in known]
        if missing:
            rule = "must have control tokens for images; the tokenizer has no control token with "
            rule += f"the ID {missing[0]}, which the model uses for images."
            action = "Set tokenizer.path to the tokenizer of the model."
            raise ConfigError.one(Code.TOK_MISMATCH, "tokenizer", None, rule, action)
        changed = copy.copy(self)
        changed.images = image
        return changed

    def with_embedding_rows(self, rows: int) -> Self:
        """Return a copy for an embedding with `rows` rows (at least `min_embedding_rows`).

        Control tokens without an embedding row are encoded as plain text. If the padding token has
        no row, EOS replaces it.
        """
        if rows >= self.vocab_size:
            return self
        assert self.min_embedding_rows <= rows, "encoding would return ids without an embedding row"
        fitted = self.with_control(**({} if self.pad_id < rows else {"pad_id": self.end_id}))
        fitted.embedding_rows = rows
        return fitted

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Return the token ids, int32 [tokens]. Control tokens are encoded as plain text."""

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> Sequence[np.ndarray]:
        """Return the token ids of each text, int32 [tokens], faster than with one call per text."""

    @abstractmethod
    def encode_chat_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the token ids from `encode_chat`, and an int64 array [tokens, 2] with each token's
        character range.
        """

    def encode_chat(self, text: str) -> np.ndarray:
        """Return the token ids of rendered text, int32 [tokens], including control tokens."""
        return self.encode_chat_offsets(text)[0]

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a prompt, including the tokens of `framing`; never an empty list."""
        framing = self.control.framing
        encode = self.encode_chat if framing.reads_control else self.encode
        ids = [*framing.before, *encode(text).tolist(), *framing.after]
        return ids or [self.begin_id]

    @abstractmethod
    def count(self, texts: Sequence[str]) -> Sequence[int]:
        """Return the number of tokens in each text, faster than with one call per text."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of the ids, with U+FFFD for incomplete characters.

        Control ids are skipped. Ids at or above `vocab_size` (a padded vocabulary) have no text.
        """

    def fingerprint(self) -> str:
        return self._fingerprint


def resolve(
    path: str,
    special: dict[str, int],
    id_of: Callable[[str], int | None],
    vocab_size: int,
    known: Mapping[str, int] | None = None,
    published: tuple[Sequence[int], Sequence[int]] | None = None,
) -> ControlTokens:
    """Determine the control tokens of the vocabulary in the file `path`.

    A tokenizer without a BOS token begins documents with EOS. A tokenizer without a padding token
    pads with EOS.

    Args:
        path: Vocabulary file; settings are read from the same folder.
        special: Maps the vocabulary's control-token strings to ids.
        id_of: Maps the string of any token in the vocabulary to its id.
        vocab_size: Exclusive upper bound of ids.
        known: Ids that the file itself assigns to `bos_token`, `eos_token` and `pad_token`.
        published: Ids that the file itself adds before and after encoded text. If None,
            `add_bos_token` and `add_eos_token` in the settings determine these ids.

    Raises:
        ConfigError: EOS is missing, the settings cannot be read, or the settings name a missing
            token.
    """
    folder = os.path.dirname(os.path.expanduser(path))
    settings = read_object(folder, _SETTINGS)
    said = role_texts(folder)
    texts = {role: text for role, text in said.items() if text is not None}
    listed = _load_listed_ids(folder, vocab_size)
    find = partial(_role, path=path, said=said, special=special, id_of=id_of, known=known or {})
    # Ids within the vocabulary take precedence.
    end = find("eos_token", ids=sorted(listed["eos_token_id"], key=lambda i: i >= vocab_size))
    if end is None:
        rule = f"must have an EOS token: the special tokens are {_join_names(special) or 'none'}."
        action = f'Add {_SETTINGS} with {{"eos_token": "..."}} to its folder.'
        raise ConfigError.one(Code.TOK_FILE, PATH, path, rule, action)
    begin, pad = find("bos_token"), find("pad_token")
    if begin is None and "bos_token" not in said:
        begin = next(iter(listed["bos_token_id"]), None)
    if published is None:
        added = {role: i for role, i in (("bos", begin), ("eos", end)) if i is not None}
        added = {role: [i] for role, i in added.items() if settings.get(f"add_{role}_token")}
        published = added.get("bos", []), added.get("eos", [])
    elif published[0]:
        begin = published[0][0]
    ends = listed["eos_token_id"] or [special[name] for name in _TURN_ENDS if name in special]
    template = _template(folder, settings)
    names = {i: name for name, i in special.items()}
    roles = {"bos_token": begin, "eos_token": end, "pad_token": pad}
    return ControlTokens(
        begin_id=end if begin is None else begin,
        end_id=end,
        pad_id=end if pad is None else pad,
        end_ids=tuple(sorted({end, *ends})),
        special_tokens=special
        | {
            texts[role]: i
            for role, i in roles.items()
            if i is not None and id_of(texts.get(role, "")) == i
        },
        role_texts=texts or {role: names[i] for role, i in roles.items() if i in names},
        chat=ChatTemplate(*template, texts) if template else None,
        published=Framing(tuple(published[0]), tuple(published[1]), reads_control=True),
    )


def _role(
    role: str,
    *,
    path: str,
    said: Mapping[str, str | None],
    special: Mapping[str, int],
    id_of: Callable[[str], int | None],
    known: Mapping[str, int],
    ids: Sequence[int] = (),
) -> int | None:
    named = said.get(role)
    if named is not None:
        i = id_of(named)
        # published folders may name a missing padding token
        if i is not None or role == "pad_token":
            return known.get(role) if i is None else i
        rule = f"must contain the {role} that {_SETTINGS} in its folder names: {named[:80]}."
        action = f"Correct {role} in {_SETTINGS}, or copy {_SETTINGS} from this tokenizer's folder."
        raise ConfigError.one(Code.TOK_FILE, PATH, path, rule, action)
    if role in said and role != "eos_token":  # null means that the role has no token
        return None
    if role in known:
        return known[role]
    if ids:
        return ids[0]
    return next((special[name] for name in _ROLES[role] if name in special), None)


def _join_names(names: Iterable[str], most: int = 12) -> str:
    shown = list(names)
    more = f" and {len(shown) - most} more" if len(shown) > most else ""
    return ", ".join(name[:80] for name in shown[:most]) + more


def role_texts(folder: str) -> dict[str, str | None]:
    """Return the control-token string of each role in a tokenizer folder; None for a role without a
    token.
    """
    return _role_texts_of_settings(read_object(folder, _SETTINGS), read_object(folder, _MAP))


def read_object(folder: str, name: str) -> dict[str, Any]:
    """Return the JSON object of an optional file; raise ConfigError for other content."""
    path = os.path.join(folder, name)
    try:
        return parse_json(files.read(path, _MAX_SETTINGS_BYTES), dict[str, Any])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        rule = f"must be a JSON object: {getattr(error, 'strerror', None) or error}."
        raise _settings_error(path, rule) from error


def _settings_error(path: str, rule: str) -> ConfigError:
    return ConfigError.one(Code.TOK_FILE, PATH, path, rule, "Correct or remove the file.")


def _role_texts_of_settings(
    settings: Mapping[str, Any], special: Mapping[str, Any]
) -> dict[str, str | None]:
    """Return control-token strings keyed by role; None for a role that is explicitly set to no
    token.

    As in `transformers`, the special tokens map overrides the settings if the settings list no
    added tokens.
    """
    first, second = settings, special
    if "added_tokens_decoder" not in settings:
        first, second = special, settings
    said = _texts(second) | _texts(first)
    denied = [k for k in (*first, *second) if k in _ROLES and k not in said]
    return {**said, **dict.fromkeys(denied)}


def _texts(entries: Mapping[str, Any]) -> dict[str, str]:
    """Return control-token strings, keyed by role. An entry is a string or an object with
    `content`.
    """
    texts = {k: v.get("content") if isinstance(v, dict) else v for k, v in entries.items()}
    return {k: v for k, v in texts.items() if isinstance(v, str) and k.endswith("_token")}


def _load_listed_ids(folder: str, vocab_size: int) -> dict[str, list[int]]:
    """Return the ids listed as `eos_token_id` and `bos_token_id` in generation_config.json, or else
    in config.json.

    In the config of a multimodal model, these keys may be in `text_config`.
    """
    listed: dict[str, list[int]] = {"eos_token_id": [], "bos_token_id": []}
    for name in (_GENERATION, _CONFIG):
        path, content = os.path.join(folder, name), read_object(folder, name)
        inner = content.get("text_config")
        inner = inner if isinstance(inner, dict) else {}
        for key, ids in listed.items():
            value = content[key] if content.get(key) is not None else inner.get(key)
            listed[key] = ids or _ids(path, key, value)
    listed["bos_token_id"] = [i for i in listed["bos_token_id"] if i < vocab_size]
    return listed


def _ids(path: str, key: str, value: object) -> list[int]:
    """Return one or several ids as a list. Ids of padding rows may lie outside the vocabulary."""
    ids: list[int] = []
    for i in value if isinstance(value, list) else [] if value is None else [value]:
        if type(i) is not int or not 0 <= i < MAX_IDS:
            rule = f"must have ids below {MAX_IDS} in {key}: found {str(i)[:80]}."
            raise _settings_error(path, rule)
        ids.append(i)
    return ids


def _template(folder: str, settings: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the chat template and the path of its file. If the file has several templates, the
    template named `default` is returned.
    """
    path = os.path.join(folder, _TEMPLATE_FILE)
    try:
        return files.read(path, _MAX_SETTINGS_BYTES).decode(), path
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        rule = f"must be UTF-8 text: {getattr(error, 'strerror', None) or error}."
        raise _settings_error(path, rule) from error
    template, path = settings.get("chat_template"), os.path.join(folder, _SETTINGS)
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict)]
        template = next((e.get("template") for e in named if e.get("name") == "default"), None)
        if template is None:
            raise _settings_error(path, "must have a chat template named default.")
    if template is not None and not isinstance(template, str):
        raise _settings_error(path, "must have a string in chat_template.")
    return None if template is None else (template, path)


def token_offsets(text: str, widths: np.ndarray) -> np.ndarray:
    """Return the start and end of each token in characters, int64 [tokens, 2].

    `widths` [tokens] are the token sizes in bytes, and the tokens must cover the bytes of the text
    exactly. The range of a token that contains only part of a character includes the full
    character.
    """
    letters = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    sizes = 1 + (letters >= 1 << 7) + (letters >= 1 << 11) + (letters >= 1 << 16)
    character = np.repeat(np.arange(len(text)), sizes)
    ends = np.cumsum(widths)
    assert (int(ends[-1]) if len(ends) else 0) == len(character), "tokens do not cover the text"
    first, last = ends - widths, np.maximum(ends - 1, ends - widths)
    return np.stack([character[first], character[last] + 1], axis=1)
