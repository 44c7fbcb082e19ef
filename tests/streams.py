"""A model family with hyper-connections, for tests only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from maxpipe.models.config import ModelConfig
from maxpipe.models.family import Family, own_keys
from maxpipe.models.layers.hyper_connections import HyperConnection, StreamHead
from maxpipe.models.layers.mlp import Norm
from maxpipe.models.llama import LlamaConfig
from maxpipe.models.registry import FAMILIES, PLUGIN_MODULES
from maxpipe.models.spec import Constant, Model, Normal, Param
from maxpipe.nn.hyper_connections import HyperConnectionModule, StreamHeadModule


def _varied(params: Mapping[str, Param]) -> Mapping[str, Param]:
    inits = {"bias": Normal(1, 0.7), "scale": Constant(0.7)}
    return {**params, **{name: replace(params[name], init=init) for name, init in inits.items()}}


class VariedConnection(HyperConnection):
    """Hyper-connection with random coefficients that depend on the token.

    At the ordinary initialization, all streams are almost equal, so that norms almost cancel the
    gradients of the coefficients.
    """

    @property
    def params(self) -> Mapping[str, Param]:
        return _varied(super().params)


class VariedHead(StreamHead):
    """Sum of the streams with random weights that depend on the token."""

    @property
    def params(self) -> Mapping[str, Param]:
        return _varied(super().params)


@dataclass(frozen=True)
class StreamsConfig:
    """A family, whose branches read and update several residual streams."""

    base: Any = LlamaConfig()  # noqa: RUF009  frozen
    """Config section of the family that defines the branches."""
    num_streams: int = 4
    num_iterations: int = 20


def with_streams(
    model: Model,
    num_streams: int = 4,
    num_iterations: int = 20,
    connection: type[HyperConnection] = HyperConnection,
    head: type[StreamHead] = StreamHead,
) -> Model:
    """Return the model with a hyper-connection for each branch."""
    d_model, norm = model.ends.embedding.shape[1], model.ends.norm
    assert isinstance(norm, Norm)
    sizes = d_model, num_streams, norm.epsilon, 1e-6
    layer_types = {
        name: replace(
            kind,
            branches=tuple(
                replace(branch, connection=connection(*sizes, num_iterations))
                for branch in kind.branches
            ),
        )
        for name, kind in model.layer_types.items()
    }
    ends = replace(model.ends, num_streams=num_streams, stream_head=head(*sizes))
    return replace(model, layer_types=layer_types, ends=ends)


def _describe(config: ModelConfig) -> Model:
    own = own_keys(config, StreamsConfig)
    name = next(name for name, each in FAMILIES.items() if each.section is type(own.base))
    model = FAMILIES[name].describe(replace(config, family=name, own=own.base))
    if own.num_streams == 1:
        return model
    return with_streams(model, own.num_streams, own.num_iterations, VariedConnection, VariedHead)


FAMILY = Family("streams", StreamsConfig, _describe)


@contextmanager
def registered() -> Iterator[None]:
    """Add the family to the registry."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, FAMILY.name, FAMILY)
        patch.setitem(PLUGIN_MODULES, VariedConnection, HyperConnectionModule)
        patch.setitem(PLUGIN_MODULES, VariedHead, StreamHeadModule)
        yield
