"""Rules on what of a model is trained."""

from __future__ import annotations

from collections.abc import Iterator

from maxpipe.config.keys import KEYS
from maxpipe.config.rules import did_you_mean, rule
from maxpipe.config.schema import Config
from maxpipe.errors import Finding
from maxpipe.model.families.registry import describe
from maxpipe.model.frozen import declared, suggestions, trained, without_match

_KEY = "model.frozen"
_MAX_FINDINGS = 8
_MODEL_KEYS = tuple(key for key in KEYS if key.startswith("model."))


@rule(*_MODEL_KEYS)
def _frozen_parameters_exist(config: Config) -> Iterator[Finding]:
    patterns, model = config.model.frozen, describe(config.model)
    wrong = without_match(model, patterns)
    others = [each for each in patterns if each not in wrong]
    for pattern in wrong[:_MAX_FINDINGS]:
        guess = did_you_mean(pattern, suggestions(model))
        yield Finding(
            _KEY,
            f"holds {pattern!r}, which is the name of no parameter: {', '.join(declared(model))}.",
            f"Set {_KEY}=[{','.join([*others, *filter(None, [guess])])}].",
        )


@rule(*_MODEL_KEYS)
def _something_is_trained(config: Config) -> Iterator[Finding]:
    if not trained(describe(config.model)):
        yield Finding(
            _KEY,
            "freezes every parameter: nothing would be trained.",
            f"Set {_KEY}=[layers.*] to train what is around the layers, or {_KEY}=[] for all.",
        )
