"""Numerical check of the experts' grouped matmuls before the first step on new hardware."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from maxpipe.distributed.coordinator import free_port
from maxpipe.errors import ConfigError
from maxpipe.models.moe import MoeConfig
from maxpipe.models.registry import describe
from maxpipe.models.spec import Model
from maxpipe.nn import experts
from maxpipe.nn.expert_backends import dispatch, mosaic, ragged_dot, triton
from maxpipe.parallel import tpu_kernels
from maxpipe.parallel.axes import MeshConfig
from maxpipe.parallel.mesh import build_mesh
from maxpipe.planner.shards import with_shards
from maxpipe.train import expert_check as expert_check_module
from maxpipe.train.expert_check import compare_exchanges, exchange_check, expert_check
from maxpipe.train.kernel_check import check_kernels
from tests.cases import MODEL
from tests.train.runs import Start, wait_for_outputs, write_module


def model_of(backend: Any, **changes: Any) -> Model:
    own = MoeConfig(num_experts=4, top_k=2, d_expert=24, expert_backend=backend, **changes)
    return describe(replace(MODEL, family="moe", own=own))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ragged_dot_passes(dtype: str) -> None:
    check = expert_check(model_of("ragged_dot"), dtype)
    found = check.run()
    assert found is not None and found.ok, found
    tile = 64 if dtype == "float32" else 128
    assert check.cases == [f"ragged_dot {MODEL.d_model} x 24, tiles of {tile} rows"]
    if dtype == "float32":
        assert found.result < 1e-5 and found.gradients < 1e-5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_triton_kernels_pass(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run in interpret mode."""
    for name in ("grouped_matmul", "grouped_outer"):
        run = partial(getattr(triton, name), interpret=True)
        monkeypatch.setattr(ragged_dot, name, run)
    found = expert_check(model_of("ragged_dot"), dtype).run()
    assert found is not None and found.ok, found


@pytest.mark.parametrize(
    ("num_tokens", "tile"), [(4, 16), (40, 32), (100, 64), (10_000, 128)], ids=str
)
def test_row_tiles_of_the_run_are_checked(
    num_tokens: int, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the kernel with the tiles of this run is wrong."""

    def run(rows: Any, weights: Any, sizes: Any, **options: Any) -> Any:
        width = weights[0].shape[2 if not options["transposed"] else 1 - options["dim"]]
        (num_rows, depth), dtype = rows[0].shape, rows[0].dtype
        tiles = triton.matmul_tiles(num_rows, len(sizes), depth, width, dtype, 99_000)
        right = triton.grouped_matmul(rows, weights, sizes, **options, interpret=True)
        return right * (1.1 if tiles.rows == wrong else 1.0)

    monkeypatch.setattr(ragged_dot, "grouped_matmul", run)
    model = with_shards(model_of("ragged_dot"), 1, 1, num_tokens, num_tokens)
    for wrong in (tile, 2 * tile):
        check = expert_check(model, "bfloat16", num_tokens=num_tokens)
        assert check.cases[0].endswith(f"tiles of {tile} rows")
        found = check.run()
        assert found is not None and found.ok == (wrong != tile)


@pytest.fixture
def tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the kernels of TPUs, in interpret mode."""
    monkeypatch.setattr(expert_check_module, "_platform", lambda: "tpu")
    monkeypatch.setattr(tpu_kernels, "mesh_device_kind", lambda: "TPU v6 lite")
    monkeypatch.setattr(dispatch.lax, "platform_dependent", lambda *given, tpu, **_: tpu(*given))
    for name in ("grouped_matmul", "grouped_outer"):
        run = partial(getattr(mosaic, name), interpret=True)
        monkeypatch.setattr(mosaic, name, run)


def tpu_model(num_tokens: int) -> Model:
    own = MoeConfig(num_experts=4, top_k=2, d_expert=384)
    model = describe(replace(MODEL, d_model=256, family="moe", own=own))
    return with_shards(model, 1, 1, num_tokens, num_tokens)


@pytest.mark.parametrize(
    ("name", "num_tokens", "rows"),
    [("grouped_matmul", 256, 128), ("grouped_matmul", 2048, 512), ("grouped_outer", 1024, 256)],
)
def test_tpu_kernels_are_checked_with_the_tiles_of_the_run(
    name: str, num_tokens: int, rows: int, tpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the kernel with tiles of `wrong` rows is wrong."""
    right = getattr(mosaic, name)

    def run(*given: Any, tiles: mosaic.Tiles, **options: Any) -> Any:
        factor = 1.1 if tiles.rows == wrong else 1.0
        products = right(*given, tiles=tiles, **options)
        return jax.tree.map(lambda product: product * factor, products)

    monkeypatch.setattr(mosaic, name, run)
    check = expert_check(tpu_model(num_tokens), "bfloat16", num_tokens=num_tokens)
    (case,) = check.cases
    assert case.startswith(f"auto 256 x 384, matmul {rows} x ") and f"outer {rows} x" in case
    for wrong in (rows, 384):
        found = check.run()
        assert found is not None and found.ok == (wrong != rows)


def test_kernels_without_tiles_are_not_checked_on_tpus(tpu: None) -> None:
    """No tile of 128 rows divides 200 rows, so that the run uses the loop."""
    assert not expert_check(tpu_model(100), "bfloat16", num_tokens=100).cases


def test_row_tiles_depend_on_shards_and_chunks() -> None:
    """Every device has one of four experts, to which 64 rows are sent in 1 or 4 chunks."""
    cases = []
    for chunks in (1, 4):
        model = model_of("ragged_dot", all_to_all_chunks=chunks)
        sharded = with_shards(model, 4, 1, 16, 16)
        cases += expert_check(sharded, "bfloat16", num_tokens=16).cases
    assert [case.split()[-2] for case in cases] == ["64", "16"]


@pytest.mark.parametrize("name", ["grouped_matmul", "grouped_outer"])
def test_wrong_backend_fails_check(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(ragged_dot, name)
    monkeypatch.setattr(ragged_dot, name, lambda *given, **how: 1.001 * right(*given, **how))
    found = expert_check(model_of("ragged_dot"), "float32").run()
    assert found is not None and not found.ok
    monkeypatch.setattr(
        ragged_dot, name, lambda *given, **how: right(*given, **how).at[0, 0].set(jax.numpy.nan)
    )
    found = expert_check(model_of("ragged_dot"), "float32").run()
    assert found is not None and not found.ok


def test_loop_and_dense_dispatch_are_not_checked() -> None:
    for model in (
        model_of("loop"),
        model_of("auto"),  # CPUs use the loop
        model_of("ragged_dot", dispatch="dense"),
        describe(MODEL),
    ):
        check = expert_check(model, "float32")
        assert not check.cases and check.run() is None


def test_width_on_one_device_is_checked() -> None:
    whole, half = (expert_check(model_of("ragged_dot"), "float32", n).cases for n in (1, 2))
    assert "x 24" in whole[0] and "x 12" in half[0]


@pytest.mark.parametrize("bad", [7.0, float("nan")])
@pytest.mark.parametrize(
    "config", [MeshConfig(ici_expert=8), MeshConfig(ici_expert=4, ici_tensor=2)], ids=["8", "4x2"]
)
def test_exchanges_are_compared_on_all_devices(
    config: MeshConfig, bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of one device that differs, or is NaN, is found in either direction."""
    mesh = build_mesh(config, jax.devices()[:8])
    found = compare_exchanges(mesh, "float32")
    assert found.ok and (found.result, found.gradients) == (0, 0)
    right = experts.exchange_rows

    def wrong(values: Any, sent: Any, received: Any, method: Any) -> Any:
        out = right(values, sent, received, method)
        if method == "padded":
            return out
        first = jax.lax.axis_index("expert") == 0
        return out.at[-1, 3].set(jax.numpy.where(first, bad, out[-1, 3]))

    monkeypatch.setattr(expert_check_module, "exchange_rows", wrong)
    found = compare_exchanges(mesh, "bfloat16")
    assert not found.ok and found.result == 1
    assert not exchange_check(model_of("auto"), mesh, "float32").cases  # CPUs send full buffers


@pytest.mark.parametrize(
    ("given", "checked"), [(768, 768), (1280, 1024), (14336, 1024), (2880, 1088), (1031, 1031)]
)
def test_large_widths_are_checked_with_the_same_last_tile(given: int, checked: int) -> None:
    own = MoeConfig(num_experts=4, top_k=2, d_expert=given, expert_backend="ragged_dot")
    (case,) = expert_check(describe(replace(MODEL, family="moe", own=own)), "float32").cases
    assert f" x {checked}," in case and given % 256 == checked % 256


BROKEN = """
from maxpipe.nn.expert_backends import ragged_dot
right = ragged_dot.grouped_outer
ragged_dot.grouped_outer = lambda *given, **how: 1.01 * right(*given, **how)
"""


@pytest.mark.long
def test_run_with_wrong_backend_does_not_start(tiny: Path, tmp_path: Path, start: Start) -> None:
    modules = write_module(tmp_path / "modules", BROKEN)
    given = (tiny, f"run.dir={tmp_path}", "train.steps=2", "eval.batches=0", "eval.every=0")
    given += ("model.family=moe", "model.moe.num_experts=4", "model.moe.expert_backend=ragged_dot")
    given += ("mesh.cpu_devices=1", "mesh.ici_stage=1", "pipeline.microbatches=1")
    process = start("train", *given, modules=modules)
    (output,) = wait_for_outputs([process])
    assert process.returncode == 2, output
    assert "model.moe.expert_backend" in output and "ragged_dot has errors of" in output
    assert "Set model.moe.expert_backend=loop." in output and "Traceback" not in output
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def outputs_of_two(start: Start, given: Sequence[Any], modules: Sequence[Any]) -> list[str]:
    """Train a model with experts in two processes, which both reject the config, and return their
    outputs.
    """
    given = [*given, "model.family=moe", "model.moe.num_experts=4", "mesh.cpu_devices=1"]
    given += ["mesh.ici_stage=1", "pipeline.microbatches=1", "runtime.num_processes=2"]
    given += [f"runtime.coordinator=127.0.0.1:{free_port()}"]
    processes = [
        start("train", *given, f"runtime.process_id={rank}", modules=modules[rank])
        for rank in range(2)
    ]
    outputs = wait_for_outputs(processes)
    assert [process.returncode for process in processes] == [2, 2], outputs
    return outputs


FAILING = """
from maxpipe.nn.expert_backends import ragged_dot
def fail(*given, **how):
    raise NotImplementedError("no kernel for this device\\nmore")
ragged_dot.grouped_outer = fail
"""


@pytest.mark.long
@pytest.mark.multihost
def test_kernel_that_fails_in_one_process_stops_all(
    tiny: Path, tmp_path: Path, start: Start
) -> None:
    """The first process has no failing kernel, but must not wait for the second."""
    modules = write_module(tmp_path / "modules", FAILING)
    given = (tiny, f"run.dir={tmp_path}", "train.steps=2", "eval.batches=0", "eval.every=0")
    given += ("model.moe.expert_backend=ragged_dot", "mesh.dcn_fsdp=2")
    outputs = outputs_of_two(start, given, [None, modules])
    assert "model.moe.expert_backend" in outputs[0] and "Traceback" not in "".join(outputs)
    assert "fails on cpu with jax" in outputs[0] and "NotImplementedError: no kernel" in outputs[0]
    assert "Set model.moe.expert_backend=loop." in outputs[0]


def test_failure_of_one_process_in_an_exchange_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process does not compare results with others, which may wait in the exchange."""

    def fail() -> Any:
        raise RuntimeError("INTERNAL: no ragged all-to-all\nmore")

    def compare(name: str, value: str) -> list[str]:
        assert name == "all-to-all due"
        return [value]

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    mesh = build_mesh(MeshConfig(ici_expert=2), jax.devices()[:2])
    check = exchange_check(model_of("auto"), mesh, "float32")
    check = check._replace(cases=["ragged"], compare=fail)
    session: Any = SimpleNamespace(
        run_dir=tmp_path,
        config=SimpleNamespace(model=SimpleNamespace(compute_dtype="float32")),
        channel=SimpleNamespace(compare_across_processes=compare),
        console=SimpleNamespace(stage=lambda text: contextlib.nullcontext()),
    )
    with pytest.raises(ConfigError) as error:
        check_kernels(session, [check])
    (problem,) = error.value.problems
    assert "RuntimeError: INTERNAL: no ragged all-to-all" in problem.rule
    assert problem.action == "Set model.moe.all_to_all=padded."


RAGGED = """
from maxpipe.train import expert_check
expert_check._platform = lambda: "gpu"
expert_check._cases = lambda *given: iter(())
right = FAULT = expert_check.exchange_rows
def exchange(*given):
    return (right if given[3] == "padded" else FAULT)(*given[:3], "padded")
expert_check.exchange_rows = exchange
"""
FAULTS = {
    "wrong": (
        "import jax\n"
        "FAULT = lambda *given: right(*given) * (1 + 0.5 * jax.lax.axis_index('expert'))",
        "differs from plain all-to-all",
    ),
    "compile": ("def FAULT(*given):\n    raise NotImplementedError('no kernel')", "no kernel"),
    "run": (
        "def fail(*given):\n    raise RuntimeError('no channel')\n"
        "expert_check.compare_exchanges = fail",
        "RuntimeError: no channel",
    ),
}


@pytest.mark.long
@pytest.mark.multihost
@pytest.mark.parametrize("fault", FAULTS)
def test_exchange_that_fails_in_one_process_stops_all(
    fault: str, tiny: Path, tmp_path: Path, start: Start
) -> None:
    """The second process has a fault, and the first may wait for it in the exchange. Both run the
    same program if the second process only computes a wrong result.
    """
    code, words = FAULTS[fault]
    modules = [
        write_module(tmp_path / f"modules{rank}", RAGGED + extra)
        for rank, extra in enumerate((code if fault == "wrong" else "", code))
    ]
    given = (tiny, f"run.dir={tmp_path}", "train.steps=2", "eval.batches=0", "eval.every=0")
    given += ("model.moe.dispatch=grouped", "mesh.dcn_expert=2")
    outputs = outputs_of_two(start, given, modules)
    for output in outputs:
        assert words in output and "Set model.moe.all_to_all=padded." in output
        assert "Traceback" not in output
