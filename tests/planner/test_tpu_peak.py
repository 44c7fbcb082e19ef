"""Arrays that are live at the peak of a TPU step, as in the compiler's buffer assignment."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from maxpipe.config.schema import Config
from maxpipe.planner.memory import predict_memory
from maxpipe.planner.sizes import Sizes, build_schedule
from tests.planner.test_memory import config_of

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
WORDS = {"vocab_size": 2**17}


def terms_of(config: Config) -> dict[str, float]:
    return dict(predict_memory(Sizes(config), build_schedule(config), platform="tpu").terms)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_accumulators_of_layers_are_allocated_after_the_loss_of_one_microbatch(
    microbatches: int,
) -> None:
    config = config_of(WORDS, {"ici_fsdp": 2}, {"microbatches": microbatches}, tokens=1024)
    params = Sizes(config).trained
    later = params.stage_elements() + params.embedding_elements()
    during = params.head_elements() + params.norm_elements
    terms = terms_of(config)
    assert terms["logits"] > 4 * later
    assert terms["gradients"] == 4 * (during + (later if microbatches > 1 else 0))


def experts_of(d_model: int, d_expert: int, mesh: dict[str, int]) -> Config:
    moe = {"num_experts": 16, "top_k": 2, "d_expert": d_expert, "num_dense_layers": 0}
    model = {"family": "moe", "num_layers": 1, "d_model": d_model, "moe": moe}
    return config_of(model, mesh, {"microbatches": 2}, tokens=256)


@pytest.mark.parametrize(
    ("d_model", "d_expert", "hidden", "placed"),
    [
        pytest.param(64, 512, 6, 3, id="while gates are differentiated"),
        pytest.param(512, 64, 3, 6, id="while cotangents of inputs are computed"),
    ],
)
def test_peak_of_sharded_experts_is_at_one_moment(
    d_model: int, d_expert: int, hidden: int, placed: int
) -> None:
    config = experts_of(d_model, d_expert, {"ici_expert": 4})
    sizes = Sizes(config)
    rows = 4 * 2 * sizes.batch.tokens  # every device may receive all selected tokens
    arrays = sizes.activations.itemsize * rows * (hidden * d_expert + placed * d_model)
    assert arrays < terms_of(config)["layer"] < 1.25 * arrays


def test_weight_gradients_of_experts_need_no_permuted_tokens() -> None:
    """The float32 gradient of one matrix, its transpose and the other gradients in bfloat16."""

    def layer(top_k: int) -> float:
        moe = {"num_experts": 64, "num_dense_layers": 0, "d_expert": 512, "top_k": top_k}
        model = {"family": "moe", "d_model": 256, "moe": moe}
        return terms_of(config_of(model, {"ici_fsdp": 2}, {"microbatches": 2}))["layer"]

    assert layer(2) == layer(8)


def test_weight_gradients_of_dense_layer_follow_all_uses_of_its_weights() -> None:
    config = config_of({"d_mlp": 4096}, {"ici_fsdp": 2}, {"microbatches": 2}, tokens=8)
    sizes = Sizes(config)
    elements: dict[str, int] = {}
    for (part, _), param in sizes.model.layer_types["layer"].params.items():
        own = sizes.mesh.elements(param.dims, whole=True)
        elements[part] = elements.get(part, 0) + own
    in_float32 = sizes.activations.itemsize * elements["mlp"] * 4 / 3
    all_once = sizes.activations.itemsize * sum(elements.values())
    assert in_float32 < terms_of(config)["layer"] < in_float32 + all_once / 2


@pytest.mark.parametrize("block", [0, 1024])
def test_logits_are_kept_while_mtp_heads_run_unless_computed_in_blocks(block: int) -> None:
    heads: dict[str, Any] = {"mtp_heads": 1, "mtp_kind": "layer"}
    pipeline = {"microbatches": 2, "loss_block_tokens": block}
    plain, ahead = (
        terms_of(config_of(WORDS | more, {"ici_fsdp": 2}, pipeline, tokens=2048))["logits"]
        for more in ({}, heads)
    )
    tokens, gradient = 2 * 2048, 4 * 2**17 * 64
    if block == 0:
        assert 4 * tokens * 2**17 < ahead - plain < 4.1 * tokens * 2**17
    else:
        assert gradient < ahead - plain < 1.5 * gradient


@pytest.mark.parametrize("head_dim", [64, 128])
def test_saved_attention_arrays_have_head_dim_of_whole_registers(head_dim: int) -> None:
    names = ["query", "key", "value", "context"]
    pipeline = {"microbatches": 2, "remat": "names", "saved_names": names}
    config = config_of({"head_dim": head_dim}, {"ici_fsdp": 2}, pipeline)
    sizes = Sizes(config).on_platform("tpu")
    saved, _ = sizes.activations.saved_bytes("layer")
    heads, kept = 8 + 4 + 4 + 8, sizes.activations.itemsize * sizes.batch.tokens
    log_sum_exp = sizes.activations.named_bytes("layer", names) - kept * heads * 128
    assert 0 <= log_sum_exp <= 4 * sizes.batch.tokens * 8
    assert saved == kept * (64 + heads * 128) + log_sum_exp


ASSIGNMENT = """\
BufferAssignment:
allocation 0: size 100, parameter 0, shape |f32[25]| at ShapeIndex {}:
 value: <1 param.1 @0> (size=100,offset=0): f32[25]{0}
allocation 1: size 60, preallocated-temp:
 value: <2 loop (phi) @0> (size=20,offset=0): f32[5]{0}
 value: <3 add @0> (size=20,offset=0): f32[5]{0}
 value: <4 pair{1} @0> (size=16,offset=20): f32[4]{0}
 value: <5 late @0> (size=24,offset=20): f32[6]{0}
allocation 2: size 8, color 1, preallocated-temp:
 value: <6 vmem @1> (size=8,offset=0): f32[2]{0:S(1)}
"""
RANGES = """\
HloLiveRange (max 9):
  InstructionSequence:
    0:param.1
  BufferLiveRange:
    param.1{}:0-9
    loop{}:0-4
    add{}:4-6
    pair{1}:2-4
    late{}:5-7
    vmem{}:0-9
  Live ranges at 4 (peak):
    late{}: 99 bytes
"""


def test_peak_of_buffer_assignment_counts_shared_memory_once(tmp_path: Path) -> None:
    path = BENCHMARKS / "buffer_assignment.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for kind, text in {"buffer-assignment": ASSIGNMENT, "live-range": RANGES}.items():
        (tmp_path / f"module.after_optimizations-{kind}.txt").write_text(text)
    # `loop` and `add` share memory. `late` follows `pair`.
    assert module.read_sizes(tmp_path) == (100, 100 + 20 + 24, 100 + 60)
