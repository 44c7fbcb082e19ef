"""Compute log-likelihoods and completions for evaluation harnesses.

Sequences are padded on the right. Causal attention never reads this padding, so the result for a
sequence does not depend on the other sequences in its batch. Logits are computed for one block of
tokens at a time, because the logits of full sequences would dominate memory use.

Source: the three request types are those of lm-evaluation-harness.
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from maxpipe.data.tokenizer import Tokenizer
from maxpipe.errors import Code, ConfigError, DivergenceError
from maxpipe.generation.completions import (
    Completion,
    DecodeEngineProtocol,
    GenerationLimits,
    Prompt,
    complete,
    parse_stops,
)
from maxpipe.generation.decoding import DecodeEngine, Sampling, padded_length
from maxpipe.generation.load_model import LoadedModel
from maxpipe.models.config import ModelConfig
from maxpipe.nn.decoder import Decoder
from maxpipe.parallel.mesh import BATCH_AXES
from maxpipe.parallel.sharding import BATCH_SPEC


class ScoringSequence(NamedTuple):
    """A target token sequence and its context."""

    context: Sequence[int]
    """Context tokens, at least one."""
    target: Sequence[int]

    @property
    def length(self) -> int:
        """Number of input tokens; the last target token is not an input."""
        return len(self.context) + len(self.target) - 1

    @property
    def target_positions(self) -> slice:
        """Positions of the input tokens whose next tokens are the target."""
        return slice(len(self.context) - 1, self.length)


class Score(NamedTuple):
    """Score of a target sequence."""

    logprob: float
    """Log-probability of all target tokens, in nats."""
    is_greedy: bool
    """Whether every target token is the most likely token, as in greedy decoding."""


def right_pad(rows: Sequence[ScoringSequence], count: int, width: int) -> dict[str, np.ndarray]:
    """Return the int32 arrays `[count, width]` of a batch, padded on the right."""
    names = ("tokens", "targets", "segment_ids", "positions")
    batch: dict[str, np.ndarray] = {name: np.zeros((count, width), np.int32) for name in names}
    for number, row in enumerate(rows):
        whole = [*row.context, *row.target]
        batch["tokens"][number, : row.length] = whole[:-1]
        batch["targets"][number, : row.length] = whole[1:]
        batch["segment_ids"][number, : row.length] = 1
        batch["positions"][number, : row.length] = np.arange(row.length)
    return batch


@dataclass
class ScoringTokenizer:
    """Converts texts to token sequences, with the same prefix tokens as prompts."""

    tokenizer: Tokenizer
    max_length: int
    """Maximum sequence length of the model in tokens."""
    is_chat: bool = False
    """Whether contexts come from a chat template, so that control tokens in the text are parsed."""
    skips_bos: bool = False
    """Whether to omit the BOS token before text rendered by a chat template, as in training."""

    @property
    def _bos_ids(self) -> list[int]:
        return list(self.tokenizer.framing.before)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, including its prefix tokens; at least one id."""
        before, reads_control = self._bos_ids, self.tokenizer.framing.reads_control
        encode = self.tokenizer.encode_chat if self.is_chat or reads_control else None
        ids = (encode or self.tokenizer.encode)(text).tolist()
        if self.is_chat and (self.skips_bos or ids[: len(before)] == before):
            before = []
        return [*before, *ids] or [self.tokenizer.begin_id]

    def drop_leading(self, ids: Sequence[int], over: int) -> list[int]:
        """Remove the first `over` token ids after the prefix tokens of a text."""
        before = self._bos_ids
        kept = len(before) if list(ids[: len(before)]) == before else 0
        return [*ids[:kept], *ids[kept + over :]]

    def sequence(self, context: str, continuation: str) -> ScoringSequence:
        """Return the scoring sequence of a continuation after a context.

        A token that spans the boundary belongs to the continuation.
        """
        before = self.encode(context)
        whole = self.encode(context + continuation) if continuation else before
        same = (mine == other for mine, other in zip(before, whole, strict=False))
        shared = sum(itertools.takewhile(bool, same))
        if not shared:  # a scoring sequence needs at least one context token
            return ScoringSequence([self.tokenizer.begin_id], whole)
        return ScoringSequence(whole[:shared], whole[shared:])

    def truncate(self, row: ScoringSequence) -> ScoringSequence:
        """Remove the first context tokens after the prefix tokens until the sequence fits.

        Raises:
            ConfigError: the target alone is too long.
        """
        over = row.length - self.max_length
        if over <= 0:
            return row
        if over > len(row.context) - max(len(self._bos_ids), 1):
            raise ConfigError.one(
                Code.GEN_PROMPT,
                "a continuation",
                f"{len(row.target)} tokens",
                f"must fit into {self.max_length} tokens (train.sequence_length).",
                "Increase train.sequence_length, if the model supports longer sequences.",
            )
        return ScoringSequence(self.drop_leading(row.context, over), row.target)

    def windows(self, text: str) -> list[ScoringSequence]:
        """Split a text into sequences that together predict every token exactly once.

        The last sequence contains as much context as possible.
        """
        ids = self.encode(text)
        if not self._bos_ids:
            ids = [self.tokenizer.begin_id, *ids] if text else ids
        found = []
        for first in range(1, len(ids), self.max_length):
            end = min(first + self.max_length, len(ids))
            begin = max(end - self.max_length - 1, 0)
            found.append(ScoringSequence(ids[begin:first], ids[first:end]))
        return found


def score_in_batches(
    rows: Sequence[ScoringSequence],
    batch_size: int,
    score_batch: Callable[[Sequence[ScoringSequence]], Sequence[Score]],
    stops: Callable[[], bool],
    moved: Callable[[int], object],
) -> list[Score]:
    """Score sequences in batches of similar length, and return the scores in the given order.

    The longest sequences come first, so that a lack of memory is detected early. After each batch,
    `moved` is called with the number of finished sequences.

    Raises:
        KeyboardInterrupt: `stops` returned true after a batch.
    """
    order = sorted(range(len(rows)), key=lambda row: -rows[row].length)
    found: dict[int, Score] = {}
    for first in range(0, len(order), batch_size):
        mine = order[first : first + batch_size]
        scores = score_batch([rows[row] for row in mine])
        found |= dict(zip(mine, scores, strict=True))
        moved(len(found))
        if stops():
            raise KeyboardInterrupt
    return [found[row] for row in range(len(rows))]


_MAX_LOGITS = 1 << 26
"""Maximum number of logits in memory at a time, over all devices."""


@dataclass(frozen=True)
class Scorer:
    """Scores sequences with a model on a mesh without pipeline stages."""

    weights: LoadedModel
    batch_size: int = 16

    def score(
        self,
        rows: Sequence[ScoringSequence],
        *,
        stops: Callable[[], bool] = lambda: False,
        moved: Callable[[int], object] = lambda done: None,
    ) -> list[Score]:
        """Score sequences; each score is independent of the other sequences in the batch.

        After each batch, `stops` is called, and `moved` is called with the number of finished
        sequences.

        Raises:
            DivergenceError: the outputs of the model are not finite.
            KeyboardInterrupt: `stops` returned true. All devices are idle when this is raised.
        """
        score_batch = partial(self._batch, most=len(rows))
        return score_in_batches(rows, self.batch_size, score_batch, stops, moved)

    def _batch(self, rows: Sequence[ScoringSequence], most: int) -> list[Score]:
        mesh = self.weights.mesh
        shards = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
        count = math.ceil(min(self.batch_size, most) / shards) * shards
        batch = right_pad(rows, count, padded_length(max(row.length for row in rows)))
        with jax.set_mesh(mesh):
            placed = jax.device_put(batch, NamedSharding(mesh, BATCH_SPEC))
            logprobs, best = jax.device_get(self._program(self.weights.params, placed))
        return [to_score(row, logprobs[number], best[number]) for number, row in enumerate(rows)]

    @cached_property
    def _program(self) -> Any:
        """Compiled function: (parameters, batch) -> log-probability of each target token, and
        whether that token is the argmax.
        """
        rows = NamedSharding(self.weights.mesh, BATCH_SPEC)
        return jax.jit(
            partial(_score_batch, dropless_decoder(self.weights.decoder)), out_shardings=rows
        )


def dropless_decoder(decoder: Decoder) -> Decoder:
    """Return the decoder with unlimited expert capacity, as in generation."""
    config: ModelConfig = decoder.config
    own: Any = config.own
    if getattr(own, "capacity_factor", 0):
        own = dataclasses.replace(own, capacity_factor=0.0)
        config = dataclasses.replace(config, own=own)
    return dataclasses.replace(decoder, config=config)


def _score_batch(decoder: Decoder, params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    hidden = decoder.hidden(params, batch)
    count, width, _ = hidden.shape
    block = width
    while block % 2 == 0 and count * block * decoder.config.vocab_size > _MAX_LOGITS:
        block //= 2

    def of_block(each: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, targets = each
        logits = decoder.logits(params, x)
        logits = jax.lax.with_sharding_constraint(logits, PartitionSpec(BATCH_AXES, None, None))
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0]
        return picked, logits.argmax(-1) == targets

    def cut(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(count, width // block, block, *x.shape[2:]), 1, 0)

    found = jax.lax.map(of_block, (cut(hidden), cut(batch["targets"])))
    return tuple(jnp.moveaxis(each, 0, 1).reshape(count, width) for each in found)  # pyright: ignore[reportReturnType]


def to_score(row: ScoringSequence, logprobs: np.ndarray, best: np.ndarray) -> Score:
    """Return the score of a sequence from arrays `[T]`: the log-probability of each target, and
    whether the target is the most likely token.

    Raises:
        DivergenceError: the outputs of the model are not finite.
    """
    mine = row.target_positions
    logprob = float(logprobs[mine].sum(dtype=np.float64))
    if not math.isfinite(logprob):
        raise DivergenceError(
            Code.RUN_NOT_FINITE,
            f"a text of {row.length} tokens has the log-probability {logprob}\n"
            "  the outputs of the model are not finite.\n"
            "  Use an earlier step, or set model.compute_dtype=float32.",
        )
    return Score(logprob, bool(best[mine].all()))


_MAX_TOKENS = 256
_SAMPLING_SETTINGS = ("top_k", "top_p", "min_p")
_KNOWN_SETTINGS = {
    "until",
    "max_gen_toks",
    "do_sample",
    "temperature",
    "repetition_penalty",
    *_SAMPLING_SETTINGS,
}


class RequestModel(abc.ABC):
    """Processes harness requests with a model that scores sequences and generates tokens."""

    def __init__(
        self,
        texts: ScoringTokenizer,
        batch_size: int = 16,
        should_stop: Callable[[], bool] = lambda: False,
    ):
        """Set the tokenizer and the number of sequences per batch.

        `should_stop` returns whether to raise KeyboardInterrupt. It is called while no device is
        busy.
        """
        self.texts, self.batch_size, self.should_stop = texts, batch_size, should_stop

    @abc.abstractmethod
    def score(
        self, rows: Sequence[ScoringSequence], moved: Callable[[int], object] = lambda done: None
    ) -> list[Score]:
        """Score sequences. `moved` is called with the number of finished sequences."""

    @abc.abstractmethod
    def decoding(self, sampling: Sampling) -> tuple[DecodeEngineProtocol, Any]:
        """Return a decode engine, and the parameters in the layout that it requires."""

    # Likelihoods.

    def loglikelihood(
        self, pairs: Sequence[tuple[str, str]], moved: Callable[[int], object] = lambda done: None
    ) -> list[Score]:
        """Return the log-likelihood of each continuation after its context.

        A context that is too long is truncated at its start, after the prefix tokens.

        Raises:
            ConfigError: a continuation alone is longer than the sequence length.
            DivergenceError: the outputs of the model are not finite.
        """
        rows = [self.texts.truncate(self.texts.sequence(*pair)) for pair in pairs]
        return self.score(rows, moved)

    def loglikelihood_rolling(self, texts: Sequence[str]) -> list[float]:
        """Return the log-likelihood of each text. Texts may have any length.

        A long text is split into sequences with one token of context each. The last sequence has as
        much context as fits.

        Raises:
            DivergenceError: the outputs of the model are not finite.
        """
        windows = [self.texts.windows(text) for text in texts]
        rows = [row for mine in windows for row in mine]
        scores = iter(self.score(rows))
        return [sum(next(scores).logprob for _ in mine) for mine in windows]

    # Continuations.

    def generate_until(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """Generate a completion for each context, up to the first stop string (exclusive).

        Settings: `until` (the stop strings), `max_gen_toks` (default: 256), `do_sample`,
        `temperature` (default: 0), `top_k`, `top_p`, `min_p` and `repetition_penalty`. A context
        that is too long is truncated at its start.

        Raises:
            ConfigError: a setting is unknown, or `max_gen_toks` is too large.
            DivergenceError: the outputs of the model are not finite.
        """
        found = [""] * len(requests)
        groups: dict[tuple[Sampling, GenerationLimits], list[Prompt]] = {}
        for number, (context, settings) in enumerate(requests):
            sampling, limits = self._parse_settings(settings)
            ids = self.texts.encode(context)
            over = max(len(ids) + limits.max_tokens - self.texts.max_length, 0)
            prompt = Prompt(number, context, self.texts.drop_leading(ids, over))
            groups.setdefault((sampling, limits), []).append(prompt)

        def write(done: Completion) -> None:
            found[done.prompt.number] = done.text

        for (sampling, limits), prompts in groups.items():
            engine, params = self.decoding(sampling)
            complete(
                engine,
                params,
                self.texts.tokenizer,
                prompts,
                limits,
                write=write,
                stops=self.should_stop,
            )
        return found

    def _parse_settings(self, settings: Mapping[str, Any]) -> tuple[Sampling, GenerationLimits]:
        where = "generation settings"
        unknown = [name for name in settings if name not in _KNOWN_SETTINGS]
        if unknown:
            rule = f"must be among the supported settings: {', '.join(sorted(_KNOWN_SETTINGS))}."
            raise ConfigError.one(
                Code.CLI_VALUE, where, ", ".join(unknown), rule, "Remove the setting."
            )
        samples = settings.get("do_sample") is not False
        temperature = float(settings.get("temperature") or 0.0) if samples else 0.0
        taken = (
            (*_SAMPLING_SETTINGS, "repetition_penalty") if temperature else ("repetition_penalty",)
        )
        chosen = {name: settings[name] for name in taken if name in settings}
        most = int(settings.get("max_gen_toks", _MAX_TOKENS))
        if not 1 <= most < self.texts.max_length:
            rule = f"must be from 1 to {self.texts.max_length - 1}, below the sequence length."
            raise ConfigError.one(
                Code.CLI_VALUE, f"{where}: max_gen_toks", most, rule, "Set a smaller value."
            )
        until = settings.get("until") or ()
        until = (until,) if isinstance(until, str) else tuple(until)
        texts = [text for text in until if text]
        stops, ids = parse_stops(texts, self.texts.tokenizer, f"{where}: until")
        limits = GenerationLimits(most, self.texts.max_length, stops, self.batch_size, stop_ids=ids)
        return Sampling(temperature=temperature, **chosen), limits


class LanguageModel(RequestModel):
    """A model on a mesh without pipeline stages that processes harness requests."""

    def __init__(
        self,
        weights: LoadedModel,
        texts: ScoringTokenizer,
        batch_size: int = 16,
        should_stop: Callable[[], bool] = lambda: False,
    ):
        super().__init__(texts, batch_size, should_stop)
        self.weights, self._scorer = weights, Scorer(weights, batch_size)
        self._decodings: dict[Sampling, DecodeEngine] = {}

    def score(
        self, rows: Sequence[ScoringSequence], moved: Callable[[int], object] = lambda done: None
    ) -> list[Score]:
        return self._scorer.score(rows, stops=self.should_stop, moved=moved)

    def decoding(self, sampling: Sampling) -> tuple[DecodeEngineProtocol, Any]:
        if sampling not in self._decodings:
            decoder, _, mesh = self.weights
            self._decodings[sampling] = DecodeEngine(decoder, mesh, sampling, seed=0)
        return self._decodings[sampling], self._unstacked_params

    @cached_property
    def _unstacked_params(self) -> Any:
        """Parameters for decoding, with a separate array per layer.

        Slices of arrays that are stacked over layers would be copied for every token.
        """
        return self.weights.decoder.by_layer(self.weights.params)
