"""Parameters of training as those of decoding, on the same mesh, with its stages.

The order of layers on the ring of training serves its schedule; to decode, each stage has one run
of layers. On a mesh without stages layers are by themselves.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import PartitionSpec

from maxpipe.generate.decoding import Decoding
from maxpipe.generate.sampling import Sampling
from maxpipe.generate.staged import StagedDecoding
from maxpipe.models.count import layer_costs
from maxpipe.parallel.explicit import automatic
from maxpipe.parallel.mesh import STAGE
from maxpipe.pipeline.layout import Layout
from maxpipe.schedule.balance import balanced_cut
from maxpipe.schedule.table import Ring
from maxpipe.step.state import Partition

Tree = Any
AnyDecoding = Decoding | StagedDecoding


def for_decoding(partition: Partition) -> Partition:
    """The same model on the same devices, with one chunk for each stage.

    Caches grow and tokens are picked by index: the compiler chooses shardings.
    """
    decoder, stages = partition.decoder, partition.mesh.shape[STAGE]
    cut = balanced_cut(layer_costs(decoder.model, 1), stages)
    layout = Layout(Ring(stages, 1), tuple(cut), kinds=decoder.model.layers)
    return Partition(decoder, layout, automatic(partition.mesh))


def decoding_of(parts: Partition, sampling: Sampling, seed: int) -> AnyDecoding:
    """What generates with parameters as `prepared` makes them for the same partition."""
    if parts.mesh.shape[STAGE] == 1:
        return Decoding(parts.decoder, parts.mesh, sampling, seed)
    return StagedDecoding(parts.decoder, parts.layout, parts.specs, parts.mesh, sampling, seed)


def prepared(parts: Partition, params: Tree) -> Tree:
    """Parameters in network order, layers stacked by kind -> as `decoding_of` takes them."""
    staged = parts.mesh.shape[STAGE] > 1
    return parts.stack(params) if staged else parts.decoder.by_layer(params)


def prepared_shardings(parts: Partition) -> Tree:
    """Of what `prepared` makes."""
    if parts.mesh.shape[STAGE] > 1:
        return parts.shardings(parts.specs)
    specs, layers = parts.by_kind(parts.saved_specs), {}
    for kind, stack in specs["layers"].items():
        one = jax.tree.map(lambda spec: PartitionSpec(*spec[1:]), stack, is_leaf=_is_spec)
        layers[kind] = one
    each = [layers[kind] for kind in parts.decoder.model.layers]
    return parts.shardings(specs | {"layers": each})


def _is_spec(node: object) -> bool:
    return isinstance(node, PartitionSpec)
