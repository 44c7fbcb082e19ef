"""What harnesses ask of a model: likelihoods of continuations and of texts, and continuations.

Source: the three kinds of requests are those of lm-evaluation-harness.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from maxpipe.errors import ConfigError
from maxpipe.evals.rows import Scorer
from maxpipe.evals.texts import Score, Texts
from maxpipe.generate.completions import Completion, Limits, Prompt, complete, stops_of
from maxpipe.generate.decoding import Decoding
from maxpipe.generate.sampling import Sampling
from maxpipe.generate.weights import Weights

_MAX_TOKENS = 256
_DRAWING = ("top_k", "top_p", "min_p")
_TAKEN = {"until", "max_gen_toks", "do_sample", "temperature", "repetition_penalty", *_DRAWING}


@dataclass
class Requests:
    """A model that answers requests."""

    weights: Weights
    texts: Texts
    batch_size: int = 16
    stops: Callable[[], bool] = lambda: False
    """Whether to end with KeyboardInterrupt, asked when no device computes."""
    _scorer: Scorer = field(init=False)
    _decodings: dict[Sampling, Decoding] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._scorer = Scorer(self.weights, self.batch_size)

    # Likelihoods.

    def loglikelihood(
        self, pairs: Sequence[tuple[str, str]], moved: Callable[[int], object] = lambda done: None
    ) -> list[Score]:
        """The log-likelihood of each continuation after its context.

        What exceeds the room is cut from the context's beginning, after the begin tokens.

        Raises:
            ConfigError: a continuation alone exceeds the room.
            NumbersError: the model gives numbers that are not finite.
        """
        rows = [self.texts.fitted(self.texts.row(*pair)) for pair in pairs]
        return self._scorer.score(rows, stops=self.stops, moved=moved)

    def loglikelihood_rolling(self, texts: Sequence[str]) -> list[float]:
        """The log-likelihood of each text, whatever its length.

        A long text is cut into rows that each look at the token before them; the last row looks at
        as many as there is room for.

        Raises:
            NumbersError: the model gives numbers that are not finite.
        """
        windows = [self.texts.windows(text) for text in texts]
        rows = [row for mine in windows for row in mine]
        scores = iter(self._scorer.score(rows, stops=self.stops))
        return [sum(next(scores).logprob for _ in mine) for mine in windows]

    # Continuations.

    def generate_until(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """What follows each context, up to the first text of `until`, which it does not have.

        Read are `until`, `max_gen_toks` (256), `do_sample`, `temperature` (0), `top_k`, `top_p`,
        `min_p` and `repetition_penalty`. What exceeds the room is cut from the context's beginning.

        Raises:
            ConfigError: other settings, or no room for that many tokens.
            NumbersError: the model gives numbers that are not finite.
        """
        found = [""] * len(requests)
        groups: dict[tuple[Sampling, Limits], list[Prompt]] = {}
        for number, (context, settings) in enumerate(requests):
            sampling, limits = self._settings(settings)
            ids = self.texts.encoded(context)
            over = max(len(ids) + limits.max_tokens - self.texts.room, 0)
            prompt = Prompt(number, context, self.texts.without(ids, over))
            groups.setdefault((sampling, limits), []).append(prompt)

        def write(done: Completion) -> None:
            found[done.prompt.number] = done.text

        for (sampling, limits), prompts in groups.items():
            if sampling not in self._decodings:
                decoder, _, mesh = self.weights
                self._decodings[sampling] = Decoding(decoder, mesh, sampling, seed=0)
            given = (self._decodings[sampling], self._by_layer, self.texts.tokenizer, prompts)
            complete(*given, limits, write=write, stops=self.stops)
        return found

    @cached_property
    def _by_layer(self) -> Any:
        """The parameters as decoding reads them: a part of a stack would be copied per token."""
        return self.weights.decoder.by_layer(self.weights.params)

    def _settings(self, settings: Mapping[str, Any]) -> tuple[Sampling, Limits]:
        where = "generation settings"
        unknown = [name for name in settings if name not in _TAKEN]
        if unknown:
            rule = f"has what is not known here: known are {', '.join(sorted(_TAKEN))}."
            raise ConfigError.one(where, ", ".join(unknown), rule, "Leave it out.")
        samples = settings.get("do_sample") is not False
        temperature = float(settings.get("temperature") or 0.0) if samples else 0.0
        taken = (*_DRAWING, "repetition_penalty") if temperature else ("repetition_penalty",)
        chosen = {name: settings[name] for name in taken if name in settings}
        most = int(settings.get("max_gen_toks", _MAX_TOKENS))
        if not 1 <= most < self.texts.room:
            rule = f"must be from 1 to {self.texts.room - 1}: rows have {self.texts.room} tokens."
            raise ConfigError.one(f"{where}: max_gen_toks", most, rule, "Give a smaller number.")
        until = settings.get("until") or ()
        until = (until,) if isinstance(until, str) else tuple(until)
        texts = [text for text in until if text]
        stops, ids = stops_of(texts, self.texts.tokenizer, f"{where}: until")
        limits = Limits(most, self.texts.room, stops, self.batch_size, stop_ids=ids)
        return Sampling(temperature=temperature, **chosen), limits
