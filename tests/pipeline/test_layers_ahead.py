"""Multi-token prediction layers: gradients match the unpipelined model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.cases import Case, keeping
from tests.pipeline.test_engine import check_gradients, matrix
from tests.pipeline.test_families import GEMMA, GROUPED, NEXT, ROOM, V3, rows_together

BIASED = replace(V3, load_balance_loss_weight=0.3)


def layers(stages: int, repeats: int, microbatches: int, ahead: int = 2, **others: Any) -> Case:
    return Case(stages, repeats, microbatches, ahead=ahead, form="layer", **others)


CASES = [
    layers(2, 1, 3, schedule="1f1b", fsdp=2, tied=True, layers=3),
    layers(2, 2, 2, schedule="zb_v", remat="none", layers=4, dropout=0.3),
    layers(2, 1, 3, ahead=1, own=BIASED, schedule="zb_h1", tensor=2, layers=4, outside=2),
    layers(1, 1, 2, dropout=0.3, data=2),
    layers(1, 2, 3, ahead=3, tensor=2, gather="step", remat="chunk"),
    layers(2, 2, 5, fsdp=2, tensor=2, tied=True, gather="window", ahead=1),
    layers(2, 2, 4, idle="compute", remat="names", frozen=("embedding",)),
    layers(2, 1, 4, tied=True, frozen=("embedding", "ahead.layer.*"), fsdp=2),
    layers(3, 1, 4, frozen=("head", "ahead.projection", "layers.*", "final_norm.*"), data=2),
    layers(4, 2, 4, schedule="zb_v", remat="none", layers=8, dropout=0.3),
    layers(4, 1, 6, schedule="gpipe", remat="none", outside=1),
    layers(4, 2, 8, schedule="zb_v", remat="names", fsdp=2, layers=9, ahead=1),
    layers(2, 1, 3, ahead=1, own=BIASED, layers=4, fsdp=2, remat="names"),
    layers(4, 1, 5, ahead=2, own=BIASED, layers=6, schedule="1f1b", gather="window", fsdp=2),
    layers(2, 2, 3, ahead=2, own=BIASED, layers=6, tensor=2, remat="none", outside=2),
    layers(2, 2, 4, ahead=2, own=BIASED, layers=6, schedule="v_half", data=2, dropout=0.3),
    layers(2, 1, 4, ahead=2, own=ROOM, layers=5, schedule="zb_h1", fsdp=2),
    layers(2, 2, 3, ahead=3, own=GEMMA, layers=7, tied=True, fsdp=2, tensor=2),
    layers(2, 1, 3, ahead=2, own=NEXT, epsilon=0.01, layers=4, schedule="zb_h1", data=2),
]


@pytest.mark.parametrize("case", keeping(CASES, 7), ids=str)
def test_mtp_layers_match_unpipelined_model(case: Case) -> None:
    check_gradients(case)


@pytest.mark.matrix
@pytest.mark.parametrize("over", ["microbatch", "devices"])
def test_mtp_layer_load_balance_scopes_match_unpipelined_model(over: Any) -> None:
    own = replace(GROUPED, num_dense_layers=1, load_balance_scope=over)
    case = layers(2, 1, 3, schedule="zb_h1", data=2, fsdp=2, layers=4, own=own)
    check_gradients(case, rows_together(case, over))


@pytest.mark.matrix
@pytest.mark.parametrize("own", [None, BIASED], ids=["llama", "deepseek"])
@pytest.mark.parametrize("number", range(11, len(matrix()), 61))
def test_mtp_layers_in_config_matrix_sample(number: int, own: Any) -> None:
    case = replace(matrix()[number], ahead=1 + number % 2, form="layer", own=own)
    if own is not None:
        dense = min(own.num_dense_layers, case.layers - 1)
        case = replace(case, own=replace(own, num_dense_layers=dense))
    check_gradients(case)
