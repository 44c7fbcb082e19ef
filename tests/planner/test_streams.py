"""Predicted memory of hyper-connections against traced layers and the compiler."""

from __future__ import annotations

from typing import Any

import pytest

from maxpipe.models.registry import describe
from maxpipe.nn import decoder as decoder_module
from maxpipe.planner import sizes as sizes_module
from tests.planner.test_memory import check_saved_bytes
from tests.streams import with_streams


@pytest.fixture(autouse=True)
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    models: dict[Any, Any] = {}

    def described(config: Any) -> Any:
        model = describe(config)
        return models.setdefault(model, with_streams(model))

    for module in (decoder_module, sizes_module):
        monkeypatch.setattr(module, "describe", described)


@pytest.mark.parametrize("remat", ["full", "names", "none"])
@pytest.mark.parametrize("changes", [{}, {"compute_dtype": "float32"}])
def test_layers_save_declared_activations(changes: dict[str, Any], remat: str) -> None:
    check_saved_bytes(changes, remat, 7)
