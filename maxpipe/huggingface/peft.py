"""Adapters in the format of PEFT: `adapter_config.json` and `adapter_model.safetensors`.

Source of the format: https://huggingface.co/docs/peft/developer_guides/checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from maxpipe.errors import ConfigError
from maxpipe.huggingface.beside import Beside, Place, places
from maxpipe.huggingface.mapping import Mapped, Piece
from maxpipe.huggingface.safetensors import DTYPES, Writer
from maxpipe.models.config import AdapterConfig
from maxpipe.models.low_rank import DOWN, LENGTH, UP
from maxpipe.models.spec import Model

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _WEIGHT = "base_model.model.", ".weight"
_ENDS = {DOWN: "lora_A.weight", UP: "lora_B.weight", LENGTH: "lora_magnitude_vector"}


class _Matrix(NamedTuple):
    """A module of theirs, which is one layer's matrix of ours."""

    name: str
    module: str
    layer: int
    piece: Piece
    place: Place


def write_adapters(
    adapters: Beside, model: Model, both: Mapped, here: Path, dtype: str, base: str | None
) -> list[str]:
    """Writes both files, and returns the modules that have an adapter.

    `model` has adapters; `both` are its parameters without them. `base` is the folder or hub id of
    the base, None to write the address of its checkpoint.

    Raises:
        ConfigError: the format has no such adapter.
    """
    matrices = list(_matrices(model, both))
    tensors = {name: (DTYPES[dtype], values.shape) for name, values in _tensors(adapters, matrices)}
    with Writer(here / WEIGHTS, tensors) as writer:
        for name, values in _tensors(adapters, matrices):
            writer.write(name, values.astype(DTYPES[dtype]))
    config, modules = adapters.config.adapter, [each.module for each in matrices]
    text = json.dumps(_config(config, base or adapters.said["address"], modules, both), indent=2)
    (here / CONFIG).write_text(text + "\n", encoding="utf-8")
    return modules


def _matrices(model: Model, both: Mapped) -> Iterator[_Matrix]:
    shared: dict[str, int] = {}
    for pieces in both.pieces.values():
        for piece in pieces:
            shared[piece.tensor] = shared.get(piece.tensor, 0) + 1
    for name, place in places(model).items():
        if place.key not in place.kind.adapters:
            continue
        for layer, piece in enumerate(both.pieces[name]):
            if shared[piece.tensor] > 1 or piece.lane.every > 1 or not _is_product(place, piece):
                raise ConfigError.one(
                    "command line: --adapter",
                    None,
                    f"{name} is one of several matrices in {piece.tensor} there, which PEFT gives "
                    "one adapter.",
                    "Leave --adapter out: the export is then the merged model.",
                )
            module = piece.tensor.removesuffix(_WEIGHT)
            yield _Matrix(name, module, layer, piece, place)


def _sides(place: Place, piece: Piece) -> tuple[list[int], list[int], bool]:
    """Our dims in the order of theirs, of what goes in and of what comes out."""
    summed, ours = place.kind.adapters[place.key].summed, piece.form.ours
    outer, inner = ([ours.index(each) for each in group] for group in piece.form.theirs)
    return inner, outer, set(inner) == set(range(summed))


def _is_product(place: Place, piece: Piece) -> bool:
    return len(piece.form.theirs) == 2 and not piece.form.named and _sides(place, piece)[2]


def _tensors(adapters: Beside, matrices: list[_Matrix]) -> Iterator[tuple[str, np.ndarray]]:
    known: dict[str, dict[str, np.ndarray]] = {}
    for name, module, layer, piece, place in matrices:
        part, own = place.key
        if name not in known:
            ends = [end for end in _ENDS if (part, own + end) in place.kind.stored]
            known[name] = {end: adapters.factor(name, end) for end in ends}
        inner, outer, _ = _sides(place, piece)
        for end, values in known[name].items():
            mine = np.asarray(values[layer])
            if end == DOWN:
                turned = mine.transpose([mine.ndim - 1, *inner]).reshape(mine.shape[-1], -1)
            else:
                rest = [each - len(inner) for each in outer]
                first = [0] if end == UP else []
                order = [each + len(first) for each in rest]
                turned = mine.transpose([*order, *first])
                turned = turned.reshape(-1, *mine.shape[:1] if first else ())
            yield f"{_PREFIX}{module}.{_ENDS[end]}", turned


def _config(
    config: AdapterConfig, base: str, modules: list[str], both: Mapped
) -> Mapping[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "use_rslora": config.scale_by == "root",
        "use_dora": config.kind == "dora",
        "target_modules": _names(modules, both),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def _names(modules: list[str], both: Mapped) -> list[str]:
    """Last parts of the modules' names where all that have one are meant, else whole names."""
    last = lambda name: name.rpartition(".")[2]  # noqa: E731
    every = [name.removesuffix(_WEIGHT) for name in both.tensors if name.endswith(_WEIGHT)]
    mine, found = set(modules), dict[str, None]()
    for module in modules:
        alike = {name for name in every if last(name) == last(module)}
        found[last(module) if alike <= mine else module] = None
    return list(found)
