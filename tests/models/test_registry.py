"""Model specs whose last layers are not quantized."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from maxpipe.models.registry import describe
from tests.cases import MODEL

LAST = "layer_unquantized"


@pytest.mark.parametrize(
    ("layers", "keys", "count"),
    [
        (8, {}, 0),
        (8, {"matmul": "mxfp8"}, 0),
        (8, {"matmul": "nvfp4"}, 2),
        (20, {"matmul": "nvfp4"}, 3),
        (1, {"matmul": "nvfp4"}, 1),
        (8, {"matmul": "nvfp4", "matmul_unquantized_layers": 0}, 0),
        (8, {"matmul": "fp8", "matmul_unquantized_layers": 3}, 3),
        (8, {"matmul_unquantized_layers": 8}, 8),
    ],
)
def test_last_layers_have_a_type_without_quantized_weights(
    layers: int, keys: dict[str, Any], count: int
) -> None:
    plain = describe(replace(MODEL, num_layers=layers))
    model = describe(replace(MODEL, num_layers=layers, **keys))
    assert model.layers == ("layer",) * (layers - count) + (LAST,) * count
    assert set(model.layer_types) == set(model.layers)
    for name, layer_type in model.layer_types.items():
        assert layer_type.in_compute_dtype == (name == LAST)
        for key, param in plain.layer_types["layer"].params.items():
            dims = layer_type.params[key].num_contracted_dims, layer_type.params[key].linear
            quantized = param.num_contracted_dims, param.linear
            assert dims == ((0, sum(quantized)) if name == LAST else quantized)
            assert layer_type.params[key].dims == param.dims


def test_prediction_layers_are_not_quantized_like_the_last_layer() -> None:
    model = describe(replace(MODEL, matmul="nvfp4", mtp_heads=2, mtp_kind="layer"))
    heads = model.ends.mtp_layers
    assert heads is not None and heads.layer_type_name == LAST
    assert heads.layer_type.in_compute_dtype
