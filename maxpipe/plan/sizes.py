"""Sizes of a run on one device: shards, sequences, layers, parameters and activations.

The module does not import jax.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from maxpipe.config.schema import Config
from maxpipe.models.layers.experts import Experts
from maxpipe.models.registry import describe
from maxpipe.models.resolve_auto import Divided, resolved
from maxpipe.models.spec import Model, Part
from maxpipe.plan.activation_sizes import ActivationSizes
from maxpipe.plan.parameter_counts import LayerCounts, ParameterCounts
from maxpipe.plan.shards import BatchShard, MeshShards
from maxpipe.schedule.catalog import make_schedule
from maxpipe.schedule.table import Schedule


@lru_cache(maxsize=64)
def with_expert_shards(model: Model, shards: int, rows: int, tokens: int, whole: int) -> Model:
    """Return the model with its experts sharded over `shards` devices.

    Every device has `tokens` of the `whole` tokens in each of `rows` sequences. Calls with equal
    arguments return the same object, because later computations are cached per object.
    """

    def divided(part: Part) -> Part:
        return part.with_shards(shards, rows, tokens, whole) if isinstance(part, Experts) else part

    return model.map_parts(divided)


@dataclass(frozen=True)
class Sizes:
    """Array sizes of a run whose mesh is resolved, grouped by subject."""

    config: Config
    platform: str = ""
    """The JAX platform of the devices; empty if no size depends on the platform."""

    def on_platform(self, platform: str) -> Sizes:
        """Return the sizes for a platform and its attention backend."""
        if platform == self.platform:
            return self
        config = self.config
        tokens, divided = (
            config.train.sequence_length,
            Divided.from_mesh(config.mesh, self.mesh.axes),
        )
        model = resolved(config.model, platform, tokens, divided)
        return replace(self, config=replace(config, model=model), platform=platform)

    @cached_property
    def mesh(self) -> MeshShards:
        """Shards of arrays on the mesh."""
        return MeshShards(self.config.mesh)

    @cached_property
    def batch(self) -> BatchShard:
        """Sequences and tokens on one device."""
        return BatchShard(self.config, self.mesh)

    @cached_property
    def model(self) -> Model:
        """The model of the config, with the expert capacity of one device."""
        described = describe(self.config.model)
        if not self.mesh.nontrivial_axes(("expert", "context")):
            return described
        whole, shards = self.config.train.sequence_length, self.mesh.axes["expert"]
        return with_expert_shards(
            described, shards, self.batch.microbatch_size, self.batch.tokens_per_sequence, whole
        )

    @cached_property
    def layers(self) -> LayerCounts:
        """Numbers of layers by type."""
        return LayerCounts(
            self.model,
            describe(self.config.model),
            self.config.pipeline,
            self.mesh.stages,
            self.config.train.sequence_length,
        )

    @cached_property
    def params(self) -> ParameterCounts:
        """Numbers of parameters, including frozen parameters."""
        return ParameterCounts(self.model, self.mesh, self.layers, trained_only=False)

    @cached_property
    def trained(self) -> ParameterCounts:
        """Numbers of trained parameters, for gradients and optimizer state."""
        return replace(self.params, trained_only=True)

    @cached_property
    def activations(self) -> ActivationSizes:
        """Sizes of the activations of one microbatch."""
        return ActivationSizes(self.config, self.model, self.mesh, self.batch)


def build_schedule(config: Config) -> Schedule:
    """Return the schedule table of a config whose mesh is resolved."""
    pipeline = config.pipeline
    return make_schedule(
        pipeline.schedule,
        stages=Sizes(config).mesh.stages,
        repeats=pipeline.repeats,
        microbatches=pipeline.microbatches,
        group=pipeline.group,
        delayed=pipeline.delayed_forwarding,
    )
