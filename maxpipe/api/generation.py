"""Generate text with the state of a custom loop, or with a checkpoint or Hugging Face folder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from maxpipe.api.arguments import (
    argument_error,
    check_instance,
    check_integer,
    check_unused,
    is_number,
    locate_errors,
)
from maxpipe.api.config import ConfigSource, config_inputs
from maxpipe.api.evaluation import SavedModel, model_address
from maxpipe.api.trainer import Trainer
from maxpipe.checkpoint.address import Address
from maxpipe.config.image_format import model_image_format
from maxpipe.config.sections.source import parse_template_kwargs
from maxpipe.data.chat_spec import add_end_of_turn_ids
from maxpipe.data.prompts import user_chat
from maxpipe.data.tokenizer import Tokenizer
from maxpipe.data.tokenizers.chat import ChatInput
from maxpipe.errors import Code, ConfigError
from maxpipe.generation.completions import (
    Completion,
    DecodeEngineProtocol,
    GenerationLimits,
    Prompt,
    complete,
    encode_chats,
    encode_prompts,
    parse_stops,
)
from maxpipe.generation.decoding import Sampling
from maxpipe.generation.load_model import open_model
from maxpipe.huggingface.folder import resolve_model
from maxpipe.models.config import ModelConfig
from maxpipe.restore.open_model import defer_interrupt, detect_interrupt
from maxpipe.step.state import TrainState

MessageCallback = Callable[[str], None]


@dataclass(frozen=True)
class GenerationOptions:
    """Options of text generation, with the same names and defaults as in `maxpipe generate`."""

    max_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: Sequence[str] = ()
    seed: int = 0
    batch_size: int = 16
    chat: bool = False

    def check(self, where: Callable[[str], str], option: Callable[[str], str]) -> None:
        """Check the ranges of the options.

        `where` and `option` map a name to its location in messages and to the words of the user.

        Raises:
            ConfigError: an option is out of range, or has no effect.
        """
        for each in ("max_tokens", "top_k", "seed", "batch_size"):
            check_integer(where(each), getattr(self, each), None)
        for each in ("temperature", "top_p", "min_p", "repetition_penalty"):
            if not is_number(getattr(self, each)):
                rule, action = "must be a number.", f"Set {option(each)} to a number."
                raise argument_error(where(each), getattr(self, each), rule, action)
        if not all(isinstance(each, str) for each in self.stop):
            action = f"Pass strings in {option('stop')}."
            raise argument_error(where("stop"), list(self.stop), "must be strings.", action)
        allowed = {
            "max_tokens": (self.max_tokens >= 1, "at least 1", "1"),
            "batch_size": (self.batch_size >= 1, "at least 1", "1"),
            "temperature": (self.temperature >= 0, "at least 0", "0 for the most likely token"),
            "top_k": (self.top_k >= 0, "at least 0", "0 for all tokens"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1", "1 for all tokens"),
            "min_p": (0 <= self.min_p <= 1, "from 0 to 1", "0 for all tokens"),
            "repetition_penalty": (
                1e-3 <= self.repetition_penalty <= 1e3,  # logits remain finite in float32
                "from 0.001 to 1000",
                "1 for no penalty",
            ),
            "seed": (0 <= self.seed < 1 << 32, "from 0 to 4294967295", "0"),
        }
        for name, (is_right, rule, action) in allowed.items():
            value = getattr(self, name)
            if not is_right or value == float("inf"):
                raise ConfigError.one(
                    Code.CLI_VALUE,
                    where(name),
                    value,
                    f"must be {rule}.",
                    f"Set {option(name)} {action}.",
                )
        if self.temperature == 0:
            for name, off in {"top_k": 0, "top_p": 1.0, "min_p": 0.0}.items():
                if getattr(self, name) != off:
                    raise ConfigError.one(
                        Code.CLI_CONFLICT,
                        where(name),
                        getattr(self, name),
                        f"has no effect with {option('temperature')} 0, which selects the most "
                        "likely token.",
                        f"Leave out `{option(name)}` or `{option('temperature')} 0`.",
                    )
        if "" in self.stop:
            raise ConfigError.one(
                Code.CLI_VALUE,
                where("stop"),
                '""',
                "must not be empty: every completion contains the empty string.",
                f"Leave out {option('stop')}.",
            )

    @property
    def sampling(self) -> Sampling:
        """Sampling parameters."""
        return Sampling(
            self.repetition_penalty, self.temperature, self.top_k, self.top_p, self.min_p
        )


class _Model(Protocol):
    """A model whose parameters are loaded on request."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def max_length(self) -> int: ...

    @property
    def template_settings(self) -> Mapping[str, Any]: ...

    @property
    def model_config(self) -> ModelConfig: ...

    def load_decode_engine(
        self, say: MessageCallback, sampling: Sampling, seed: int
    ) -> tuple[DecodeEngineProtocol, Any]: ...


class TextGenerator:
    """Encodes and completes prompts with one model, whose parameters are loaded at first use."""

    def __init__(
        self,
        model: _Model,
        options: GenerationOptions,
        say: MessageCallback,
        where: Callable[[str], str],
    ):
        self._model, self._options, self._say = model, options, say
        tokenizer = model.tokenizer
        self.tokenizer: Tokenizer = add_end_of_turn_ids(tokenizer) if options.chat else tokenizer
        stops, ids = parse_stops(options.stop, self.tokenizer, where("stop"))
        self._limits = GenerationLimits(
            options.max_tokens, model.max_length, stops, options.batch_size, stop_ids=ids
        )
        self._where = where
        self._loaded: tuple[DecodeEngineProtocol, Any] | None = None

    def encode(self, prompts: Sequence[str] | Sequence[ChatInput], first: int = 0) -> list[Prompt]:
        """Tokenize prompts, or conversations if the option `chat` is set. `first` is the number of
        the first prompt.

        Raises:
            ConfigError: a prompt is not valid, is too long, or needs a missing chat template.
        """
        encode: Any = partial(
            encode_prompts, tokenizer=self.tokenizer, room=self._model.max_length, first=first
        )
        if self._options.chat:
            chat, tokenizer = self.tokenizer.chat, self._with_images(prompts)
            chat = chat and chat.with_settings(self._model.template_settings)
            encode = partial(
                encode_chats,
                tokenizer=tokenizer,
                room=self._model.max_length,
                first=first,
                where=self._where("chat"),
                chat=chat,
            )
        return encode(prompts)

    def _with_images(self, conversations: Sequence[Any]) -> Tokenizer:
        """Return the tokenizer, which adds image tokens if conversations have images.

        Raises:
            ConfigError: a conversation has images, but the model has no vision tower.
        """
        count = max((len(each.images) for each in conversations), default=0)
        if not count:
            return self.tokenizer
        image = model_image_format(self._model.model_config, count)
        if image is None:
            rule = "must be a model with a vision tower, because a prompt has images."
            action = "Leave out the images, or import the model with `maxpipe import --images`."
            raise ConfigError.one(Code.MODEL_IMAGES, self._where("image"), None, rule, action)
        return self.tokenizer.with_images(image)

    def load(self) -> None:
        """Start the devices, and load the parameters."""
        if self._loaded is None:
            options = self._options
            self._loaded = self._model.load_decode_engine(self._say, options.sampling, options.seed)

    def complete(
        self,
        prompts: Sequence[Prompt],
        write: Callable[[Completion], object],
        stream: Callable[[str], object] = lambda text: None,
    ) -> None:
        """Complete encoded prompts; see `maxpipe.generation.completions.complete`.

        Raises:
            DivergenceError: a log-probability is not finite.
            KeyboardInterrupt: generation was interrupted, and all completions were written.
        """
        self.load()
        assert self._loaded is not None
        engine, params = self._loaded
        with defer_interrupt() as stops:
            complete(
                engine,
                params,
                self.tokenizer,
                prompts,
                self._limits,
                write=write,
                stream=stream,
                stops=stops,
            )


@contextlib.contextmanager
def open_generator(
    named: Address | Path,
    inputs: Sequence[str | Mapping[str, Any]],
    options: GenerationOptions,
    *,
    say: MessageCallback = lambda text: None,
    where: Callable[[str], str] = lambda name: f"generate: {name}",
) -> Iterator[TextGenerator]:
    """Open a checkpoint or a Hugging Face folder for generation. `inputs` are config files and
    overrides.

    Raises:
        ConfigError: the model does not exist, or does not match the overrides or the tokenizer.
        StorageError: the checkpoint is damaged.
    """
    with detect_interrupt():
        opened = open_model(named, inputs)
        yield TextGenerator(opened, options, say, where)


@locate_errors
def generate(
    model: Trainer | SavedModel,
    prompts: str | Sequence[str] | Sequence[ChatInput],
    *,
    state: TrainState | None = None,
    max_tokens: int = 128,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    stop: Sequence[str] = (),
    seed: int = 0,
    batch_size: int = 16,
    chat: bool = False,
    overrides: Sequence[ConfigSource] = (),
    average: bool = False,
    on_text: Callable[[str], object] | None = None,
    on_status: MessageCallback | None = None,
) -> list[Completion]:
    """Complete prompts, and return the completions in the order of the prompts.

    Args:
        model: trainer, address RUN@STEP, checkpoint, or Hugging Face folder.
        prompts: one prompt or several. With `chat`, each prompt is a user message or a
            conversation.
        state: train state to generate with, only with a trainer.
        max_tokens: maximum number of tokens per completion.
        temperature: sampling temperature; 0 selects the most likely token.
        top_k: number of most likely tokens to sample from; 0 selects all tokens.
        top_p: total probability of the most likely tokens to sample from.
        min_p: minimum probability relative to the most likely token.
        repetition_penalty: penalty for repeated tokens; 1 is no penalty.
        stop: strings at which a completion ends.
        seed: sampling seed.
        batch_size: prompts per batch.
        chat: whether to format prompts with the chat template.
        overrides: configs and overrides that change the config of a saved model.
        average: whether to use the EMA parameters of a saved model.
        on_text: function that receives each new piece of text of a single prompt.
        on_status: function that receives progress messages about a saved model.

    Returns:
        Completions with the attributes `text`, `tokens`, `logprobs` (nats) and `finish_reason`.

    Raises:
        ConfigError: an option or a prompt is not valid or has no effect, or the model does not
            exist.
        StorageError: the checkpoint is damaged.
        DivergenceError: a log-probability is not finite.
    """
    options = GenerationOptions(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        stop=_listed("stop", stop, "strings"),
        seed=seed,
        batch_size=batch_size,
        chat=chat,
    )
    options.check(_location, lambda name: name)
    if isinstance(model, Trainer):
        unused = {"overrides": bool(overrides), "average": average}
        check_unused("generate", "a trainer", **unused)
    else:
        check_unused("generate", "a saved model", state=state is not None)
    given = _listed("prompts", prompts, "prompts")
    kinds, rule = (str, ChatInput) if chat else str, "must be a string."
    for number, each in enumerate(given):
        check_instance(_location(f"prompts[{number}]"), each, kinds, rule, "Pass text.")
    if chat:
        given = [user_chat(each) if isinstance(each, str) else each for each in given]
    say = on_status or (lambda text: None)
    completions: list[Completion] = []
    with contextlib.ExitStack() as stack:
        if isinstance(model, Trainer):
            generator = TextGenerator(_TrainedModel(model, state), options, say, _location)
        else:
            named = resolve_model(model_address(model), average=average)
            opened = open_generator(named, config_inputs(overrides), options, say=say)
            generator = stack.enter_context(opened)
        encoded = generator.encode(given)
        stream = on_text if on_text is not None and len(encoded) == 1 else lambda text: None
        if encoded:
            generator.complete(encoded, completions.append, stream)
    return completions


def _listed(name: str, values: Any, what: str) -> list[Any]:
    """Return one value or several as a list.

    Raises:
        ConfigError: the argument is not an iterable.
    """
    if isinstance(values, str | ChatInput):
        return [values]
    if isinstance(values, bytes | Mapping) or not isinstance(values, Iterable):
        action = f"Pass a list of {what}."
        raise argument_error(_location(name), values, f"must be a string or {what}.", action)
    return list(values)


def _location(name: str) -> str:
    return f"generate: {name}"


class _TrainedModel:
    """The state of a custom loop as a model for generation."""

    def __init__(self, trainer: Trainer, state: TrainState | None):
        if state is None:
            rule = "is required with a trainer, which holds no state."
            action = "Pass the state: maxpipe.generate(trainer, prompts, state=state)."
            raise ConfigError.one(Code.API_STATE, _location("state"), None, rule, action)
        trainer.check_state(state)
        self._trainer, self._state = trainer, state

    @property
    def tokenizer(self) -> Tokenizer:
        trainer = self._trainer
        return trainer.datasets.tokenizer if trainer.has_read_data else trainer.tokenizer

    @property
    def max_length(self) -> int:
        return self._trainer.config.train.sequence_length

    @property
    def model_config(self) -> ModelConfig:
        return self._trainer.config.model

    @property
    def template_settings(self) -> Mapping[str, Any]:
        return parse_template_kwargs(self._trainer.config.data.chat_template_kwargs)

    def load_decode_engine(
        self, say: MessageCallback, sampling: Sampling, seed: int
    ) -> tuple[DecodeEngineProtocol, Any]:
        return self._trainer.decode_engine(self._state, sampling, seed)
