"""A model for lm-evaluation-harness: `python -m maxpipe.evals.harness run --model maxpipe ...`.

Importing this module registers the model name `maxpipe` with the harness, which is installed by
`pip install 'maxpipe[harness]'`. No other module of maxpipe imports this module.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

try:
    from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]
    from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]
    from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]
except ImportError as error:
    if __name__ != "__main__":
        raise
    print(f"lm_eval\n  must be installed: {error}.\n  Run: pip install 'maxpipe[harness]'")
    sys.exit(2)

from maxpipe.config.yaml_values import to_yaml_line
from maxpipe.data.chat_spec import add_end_of_turn_ids
from maxpipe.data.tokenizers.chat import ChatInput
from maxpipe.errors import Code, ConfigError, MaxpipeError
from maxpipe.evals.language_model import LanguageModel, RequestModel, ScoringTokenizer
from maxpipe.generation.load_model import open_model
from maxpipe.huggingface.folder import resolve_model


class RequestHarnessModel(LM):
    """A harness model that passes requests to a `RequestModel`."""

    def __init__(self, requests: RequestModel, name: str):
        super().__init__()
        self._requests, self._texts, self._name = requests, requests.texts, name
        self._tokenizer = requests.texts.tokenizer

    # Requests. The harness may cache responses through its hook.

    def loglikelihood(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether greedy decoding would produce
        it.

        Every request contains a context and a continuation.
        """
        given = [request.args for request in requests]
        return self._cache_answers("loglikelihood", given, self._requests.loglikelihood(given))

    def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
        """Return the log-likelihood of each text, without a context."""
        given = [request.args for request in requests]
        found = self._requests.loglikelihood_rolling([text for (text,) in given])
        return self._cache_answers("loglikelihood_rolling", given, found)

    def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
        """Generate completions; every request contains a context and generation settings."""
        given = [request.args for request in requests]
        return self._cache_answers("generate_until", given, self._requests.generate_until(given))

    def _cache_answers(self, name: str, given: Sequence[Any], found: list[Any]) -> list[Any]:
        answers = [tuple(each) if isinstance(each, tuple) else each for each in found]
        for arguments, answer in zip(given, answers, strict=True):
            self.cache_hook.add_partial(name, arguments, answer)
        return answers

    # Chats.

    @property
    def tokenizer_name(self) -> str:
        """Tokenizer name that the harness uses in file names, to distinguish chat templates."""
        return f"maxpipe-{self._tokenizer.fingerprint()[:16]}"

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the chat template, which the harness records in its results."""
        return self._tokenizer.chat.template if chat_template and self._tokenizer.chat else ""

    def apply_chat_template(
        self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Render a conversation. After the first call, control tokens in all texts are parsed.

        Raises:
            ConfigError: the tokenizer has no chat template, or the template rejects the messages.
        """
        if self._tokenizer.chat is None:
            raise ConfigError.one(
                Code.TOK_TEMPLATE,
                "--apply_chat_template",
                None,
                f"requires a chat template, but the tokenizer of {self._name} has none.",
                "Remove the option.",
            )
        if not self._texts.is_chat:
            self._texts.is_chat, self._texts.tokenizer = True, add_end_of_turn_ids(self._tokenizer)
        (text,) = self._tokenizer.chat.render(
            [ChatInput([dict(each) for each in chat_history])],
            add_generation_prompt=add_generation_prompt,
        )
        return text


@register_model("maxpipe")
class HarnessModel(RequestHarnessModel):
    """A harness model that is loaded from a checkpoint or a Hugging Face folder."""

    def __init__(
        self,
        pretrained: str,
        batch_size: int | str = 16,
        max_batch_size: int | None = None,
        device: str | None = None,
        **overrides: Any,
    ):
        """Open a model and load its parameters.

        Args:
            pretrained: RUN, RUN@STEP or a folder, as for `maxpipe generate`.
            batch_size: Sequences per batch; `auto` means 16.
            max_batch_size: Ignored, because maxpipe does not search for the largest batch size that
                fits.
            device: Ignored, because jax uses the available devices.
            overrides: Config keys and their values, such as `mesh.ici_tensor`.

        Raises:
            ConfigError: the model does not exist, or the overrides are not valid for the model.
            StorageError: the checkpoint is damaged.
        """
        inputs = [f"{key}={to_yaml_line(value)}" for key, value in overrides.items()]
        opened = open_model(resolve_model(pretrained), inputs)
        texts = ScoringTokenizer(opened.tokenizer, opened.max_length)
        rows = 16 if str(batch_size).startswith("auto") else int(batch_size)
        super().__init__(LanguageModel(opened.load(_say), texts, rows), opened.name)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """Run the command line of the harness with the model `maxpipe` registered."""
    try:
        cli_evaluate()
    except MaxpipeError as error:
        _say(str(error))
        return int(error.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
