"""Checkpoints of adapters, to be exported: their base and they as one, or they alone.

The base is read from where training read it. Of each matrix that has an adapter, or is held in few
bits, one layer is put together at a time.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from etils import epath

from maxpipe.checkpoint import contents, digests
from maxpipe.checkpoint.address import parse
from maxpipe.checkpoint.folder import BASE, Base, Folder
from maxpipe.checkpoint.restore import digest_of
from maxpipe.checkpoint.selection import step_of
from maxpipe.checkpoint.slabs import Region
from maxpipe.checkpoint.storage import FOLDER as CHECKPOINTS
from maxpipe.config.schema import Config
from maxpipe.errors import ConfigError
from maxpipe.huggingface.source import Source, folder_of, opened
from maxpipe.io.typed import checked
from maxpipe.models.frozen import names_in_layers
from maxpipe.models.low_rank import DOWN, LENGTH, UP, is_held
from maxpipe.models.registry import describe
from maxpipe.models.spec import Kind, Model
from maxpipe.nn.adapters import held_and_back
from maxpipe.parallel.adapted import Adapted


class Readable(NamedTuple):
    """An array on disk, or one that is made of several."""

    shape: tuple[int, ...]
    dtype: np.dtype
    part: tuple[int, ...]
    """Shape of what is good to read at a time."""
    read: Callable[[Region], np.ndarray]


def readable(path: epath.Path, name: str) -> Readable:
    """An array of a checkpoint."""
    array = contents.stored(path, name)
    shape = tuple(array.shape)
    part = tuple(array.chunk_layout.read_chunk.shape or shape)
    return Readable(
        shape, array.dtype.numpy_dtype, part, lambda region: array[region].read().result()
    )


def whole(array: Readable) -> np.ndarray:
    """All of it."""
    return array.read(tuple(slice(0, size) for size in array.shape))


class Place(NamedTuple):
    """Of a matrix: its kind of layer, and (part, name) there."""

    kind: Kind
    key: tuple[str, str]


def places(model: Model) -> dict[str, Place]:
    """By their names in checkpoints the matrices of layers, as they are without adapters."""
    return {
        name: Place(kind, key)
        for each, kind in model.kinds.items()
        for key, name in names_in_layers(model, each).items()
        if key in kind.declared
    }


@dataclass(frozen=True)
class Beside:
    """Adapters of a checkpoint, and the base that they belong to."""

    path: epath.Path
    """Of the checkpoint."""
    prefix: str
    """Of the names of its trained parameters."""
    config: Config
    said: Base
    _sums: dict[str, digests.Sum] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(cls, path: epath.Path, prefix: str, config: Config, data: Mapping[str, Any]) -> Beside:
        """Raises ValueError or KeyError: the checkpoint does not say which base it belongs to."""
        return cls(path, prefix, config, checked(data[BASE], Base))

    @cached_property
    def _model(self) -> Model:
        return describe(self.config.model)

    @cached_property
    def base(self) -> Source | epath.Path:
        """A Hugging Face folder, or that of a step."""
        address = self.said["address"]
        if (folder := folder_of(address)) is not None:
            return opened(folder, "base")
        found = parse(address)
        steps = Folder(os.path.join(found.home, CHECKPOINTS))
        return steps / step_of(steps, found)

    def factor(self, name: str, end: str) -> np.ndarray:
        """Of the matrix of that name, for all layers.

        Raises:
            Damaged: it cannot be decoded.
        """
        full_name = f"{self.prefix}{name}{end}"
        return contents.understood(lambda: whole(readable(self.path, full_name)))

    def _base(self, name: str, shape: tuple[int, ...]) -> Readable:
        """One of the base's arrays in the type of training, whose sum is taken while it is read."""
        source, place = self.base, places(self._model).get(name)
        exact = place.kind.declared[place.key].exact if place else ""
        dtype = jnp.dtype(exact or self.config.model.param_dtype)
        if isinstance(source, Source):
            size = self.config.model.vocab_size
            read, part = lambda region: source.region(name, dtype, region, size), shape
        else:
            array = readable(source, f"params.{name}")
            read, part, shape = array.read, array.part, array.shape
        total = digests.Sum(str(dtype), shape)
        self._sums[name] = total

        def counted(region: Region) -> np.ndarray:
            values = np.asarray(read(region)).astype(dtype)
            mine = digests.Sum(total.dtype, total.shape)
            mine.add(values, [each.start for each in region])
            with self._lock:
                total.join(mine)
            return values

        return Readable(shape, dtype, part, counted)

    def array(self, name: str, shape: tuple[int, ...]) -> Readable:
        """One of the parameters of the model that both are."""
        base, place = self._base(name, shape), places(self._model).get(name)
        if place is None or not (is_held(*place) or place.key in place.kind.adapters):
            return base
        kind, key = place
        ends = [end for end in (DOWN, UP, LENGTH) if (key[0], key[1] + end) in kind.stored]
        factors = {end: self.factor(name, end) for end in ends}

        def read(region: Region) -> np.ndarray:
            (layers, *rest) = region
            every = base.read((layers, *(slice(0, size) for size in base.shape[1:])))
            found = np.empty(every.shape, np.float32)
            for number, each in enumerate(every):
                weight = jnp.asarray(each)
                weight = held_and_back(kind, key, weight) if is_held(kind, key) else weight
                found[number] = weight.astype(jnp.float32)
                if ends:
                    found[number] = self._merged(
                        place, factors, layers.start + number, found[number]
                    )
            return found[(slice(None), *rest)]

        return Readable(base.shape, np.dtype(np.float32), (1, *base.shape[1:]), read)

    def _merged(
        self, place: Place, factors: Mapping[str, np.ndarray], layer: int, weight: np.ndarray
    ) -> Any:
        adapter = place.kind.adapters[place.key]
        down, up = (jnp.asarray(factors[end][layer]) for end in (DOWN, UP))
        lengths = jnp.asarray(factors[LENGTH][layer]) if LENGTH in factors else None
        scale, summed = adapter.scale, adapter.summed
        return Adapted(jnp.asarray(weight), down, up, lengths, None, scale, 0.0, summed).merged()

    def check(self) -> None:
        """Raises ConfigError if what was read of the base is not what adapters were trained on."""
        if (found := digest_of(self._sums)) != self.said["digest"]:
            raise ConfigError.one(
                "base",
                self.said["address"],
                "must hold the weights that the adapters were trained beside: their digest was "
                f"{self.said['digest'][:16]}, and this is {found[:16]}.",
                "Bring the base back as it was.",
            )
