"""Write chat template, end tokens and padding token of a run into the files of an export.

The files copied from the base model are changed where the run differs from them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maxpipe.boundary.files import read, write
from maxpipe.boundary.typed import parse
from maxpipe.data.conversation import Conversation
from maxpipe.data.tokenizer import Tokenizer
from maxpipe.errors import ConfigError
from maxpipe.exchange.reports import Say

BEGIN, END, PAD = "bos_token_id", "eos_token_id", "pad_token_id"
_SETTINGS, _GENERATION = "tokenizer_config.json", "generation_config.json"
_TEMPLATE, _TEMPLATE_JSON = "chat_template.jinja", "chat_template.json"
_MAX_BYTES = 1 << 28


@dataclass(frozen=True)
class Trained:
    """What a run was trained with.

    `tokenizer` is None where it cannot be opened, and `is_run` is False of weights that were
    imported and not trained.
    """

    tokenizer: Tokenizer | None
    conversation: Conversation | None
    is_run: bool

    def in_config(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """The keys of a config.json or generation_config.json that differ from its content."""
        tokenizer = self.tokenizer
        if not self.is_run or tokenizer is None:
            return {}
        found: dict[str, Any] = {}
        said = content.get(END)
        before = said if isinstance(said, list) else [] if said is None else [said]
        ends = [tokenizer.end_id]
        if self.conversation is not None:
            ends += self.conversation["end_ids"]
        after = [*dict.fromkeys([*before, *ends])]
        if after != before:
            found[END] = after if len(after) > 1 else after[0]
        if content.get(PAD) is None and tokenizer.pad_id != tokenizer.end_id:
            found[PAD] = tokenizer.pad_id
        return found

    def write(self, here: Path, copied: Sequence[str], say: Say) -> None:
        """Changes the files in an export's folder.

        Raises:
            ConfigError: one that was copied cannot be read.
            OSError: one cannot be written.
        """
        has_generation = _GENERATION in copied
        content = _object(here / _GENERATION) if has_generation else {}
        changed = self.in_config(content)
        if changed and (has_generation or (self.conversation and self.conversation["end_ids"])):
            _put(here / _GENERATION, content | changed)
        if self.conversation is None or (template := self.conversation["template"]) is None:
            return
        if not copied:
            say("left out: the chat template, as the export has no tokenizer files")
            return
        if self._has(template):
            return
        write(here / _TEMPLATE, template.encode())
        for name in (_SETTINGS, _TEMPLATE_JSON):  # readers of earlier releases look there
            if name in copied:
                _put(here / name, _object(here / name) | {"chat_template": template})
        say(f"{_TEMPLATE}: the chat template that the run was trained with")

    def _has(self, template: str) -> bool:
        """Whether the tokenizer's folder has this template."""
        chat = self.tokenizer.chat if self.tokenizer else None
        return chat is not None and chat.template == template


def _object(path: Path) -> dict[str, Any]:
    try:
        return parse(read(path, _MAX_BYTES), dict[str, Any])
    except (OSError, ValueError) as error:
        rule = f"must be a JSON object: {getattr(error, 'strerror', None) or error}."
        raise ConfigError.one(path.name, None, rule, "Correct it beside tokenizer.path.") from error


def _put(path: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    write(path, text.encode("utf-8", "surrogatepass"))
