"""Memory checks before allocation, and errors for failed allocations."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from maxpipe import cli
from maxpipe.config.load import load
from maxpipe.config.schema import Config
from maxpipe.errors import ConfigError
from maxpipe.planner.memory import predict_memory
from maxpipe.planner.sizes import Sizes, build_schedule
from maxpipe.train import memory_check
from tests.train.runs import Run, Start, wait_for, write_module

GIB = 2**30
ALONE = ("mesh.ici_stage=1", "mesh.cpu_devices=1", "pipeline.microbatches=1", "eval.batches=0")
LARGE = (*ALONE, "model.d_model=2048", "model.d_mlp=8192", "train.steps=1")
"""2.3 GiB of parameters and moments."""
LARGER = ("model.d_model=4096", "model.d_mlp=16384")
"""Overrides to be given last, for 9 GiB of parameters and moments."""


def is_explained(text: str, code: str = "MP-MEM-001") -> None:
    """Assert an error with location, needed and available memory, largest terms and action."""
    where, rule, *terms, action = text.splitlines()
    if "Live arrays on one device:" in terms:  # of a failed allocation
        place = terms.index("Live arrays on one device:")
        terms, live = terms[:place], terms[place + 1 :]
        assert live and all(re.search(r"[\d.]+ (GiB|MiB|KiB|B)  ", each) for each in live), live
    assert where == f"memory  [{code}]" and "GiB" in rule
    assert len(terms) > 1 and all("reduce with " in each for each in terms)
    assert action.strip().startswith("Change one of the")


@pytest.fixture
def config(tiny: Path) -> Config:
    return load([str(tiny)]).config


@pytest.fixture
def needed(config: Config) -> float:
    return predict_memory(Sizes(config), build_schedule(config), platform="cpu").total


# --- before allocation -----------------------------------------------------------------------


@pytest.mark.fault("M1")
def test_run_that_cannot_fit_is_rejected_before_any_file_is_written(
    tiny: Path, run: Run, tmp_path: Path
) -> None:
    sizes = ("model.d_model=65536", "model.d_mlp=262144", f"run.dir={tmp_path}")
    output = run("train", tiny, *sizes, code=2)
    assert "reading data" not in output and not list(tmp_path.iterdir())
    is_explained(output[output.index("memory  [MP-MEM-001]\n") :].strip())
    assert "runtime.memory_check=warn" in output


@pytest.mark.parametrize(
    ("times", "check", "outcome"),
    [
        (2.0, "stop", "starts"),
        (1.05, "stop", "warns"),
        (0.9, "stop", "warns"),
        (0.8, "stop", "stops"),
        (0.5, "warn", "warns"),
        (None, "stop", "starts"),
    ],
)
def test_predicted_memory_near_capacity_only_warns(
    times: float | None,
    check: str,
    outcome: str,
    tiny: Path,
    needed: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = load([str(tiny), f"runtime.memory_check={check}"]).config
    there = None if times is None else times * needed
    monkeypatch.setattr(memory_check, "device_memory", lambda device: there)
    warnings: list[str] = []
    try:
        memory_check.check_forecast(config, warnings.append)
        found = "warns" if warnings else "starts"
    except ConfigError as error:
        found = "stops"
        assert error.exit_code == 2
    assert found == outcome
    assert all("may not fit" in text and "reduce with" in text for text in warnings)


def test_check_program_rejects_program_that_does_not_fit(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: Any = jax.jit(lambda x: (x + 1, x @ x.T)).lower(np.ones((256, 256))).compile()
    analysis = compiled.memory_analysis()
    # The arguments are already in memory, so available memory excludes them.
    needed = analysis.output_size_in_bytes + analysis.temp_size_in_bytes
    assert needed >= 2 * 4 * 256 * 256
    monkeypatch.setattr(memory_check, "device_memory", lambda device: needed * 0.99)
    with pytest.raises(ConfigError, match="the compiled train step needs"):
        memory_check.check_program(config, compiled, pytest.fail)
    # XLA aborts if an allocation fails on CPU, so the check keeps a margin.
    monkeypatch.setattr(memory_check, "device_memory", lambda device: needed / 0.95)
    with pytest.raises(ConfigError, match="the compiled train step needs"):
        memory_check.check_program(config, compiled, pytest.fail)
    monkeypatch.setattr(memory_check, "device_memory", lambda device: needed * 2)
    memory_check.check_program(config, compiled, pytest.fail)
    monkeypatch.setattr(memory_check, "_can_map", lambda size: False)
    with pytest.raises(
        ConfigError, match="the operating system refuses to allocate the memory"
    ) as refused:
        memory_check.check_program(config, compiled, pytest.fail)
    assert refused.value.exit_code == 2


def test_huge_memory_mapping_is_rejected() -> None:
    assert memory_check._can_map(1 << 20) and not memory_check._can_map(1 << 60)


# --- available memory ------------------------------------------------------------------------


def test_virtual_devices_share_available_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_check, "host_memory", lambda: 24.0 * GIB)
    assert memory_check.device_memory(jax.devices()[0]) == 24.0 * GIB / len(jax.local_devices())


@pytest.mark.parametrize(
    ("limit", "wanted"), [("max\n", 5.0), (f"{4 * GIB}\n", 3.0), (f"{1 << 63}\n", 5.0)]
)
def test_host_memory_uses_tightest_limit(limit: str, wanted: float, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("meminfo", "max", "current")]
    info = f"MemTotal: 1 kB\nMemAvailable:  {4 * GIB // 1024} kB\nSwapFree: {GIB // 1024} kB\n"
    for path, text in zip(files, (info, limit, f"{GIB}\n"), strict=True):
        path.write_text(text)
    meminfo, *group = map(str, files)
    assert memory_check.host_memory(meminfo, ((group[0], group[1]),)) == wanted * GIB
    assert memory_check.host_memory(str(tmp_path / "none"), ()) is None


class Accelerator:
    platform, device_kind = "gpu", "NVIDIA H200"

    def __init__(self, stats: dict[str, int] | None):
        self.memory_stats = lambda: stats


def test_reported_device_memory_precedes_published_value() -> None:
    limit = int(0.92 * 50 * GIB)  # the allocator's share of 50 GiB
    assert memory_check.device_memory(Accelerator({"bytes_limit": limit})) == pytest.approx(
        50 * GIB
    )
    published = memory_check.device_memory(Accelerator(None))
    assert published is not None and published > 100 * GIB


# --- failed allocations ----------------------------------------------------------------------


@pytest.mark.fault("M2")
def test_failed_host_allocation_raises_config_error(
    config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError) as caught, memory_check.explain_allocation_errors(config):
        np.empty(2**57)
    assert caught.value.exit_code == 2
    is_explained(str(caught.value), "MP-MEM-003")
    assert "1.00 EiB" in str(caught.value)
    # Without a run, the command prints a shorter error.
    monkeypatch.setattr(cli, "_run", lambda argv: np.empty(2**57))
    assert cli.main([]) == 2
    assert "Traceback" not in (shown := capsys.readouterr().err) and "out of memory" in shown


@pytest.mark.fault("M2")
def test_failed_device_allocation_raises_config_error(config: Config) -> None:
    with pytest.raises(ConfigError) as caught, memory_check.explain_allocation_errors(config):
        jax.jit(lambda: jax.numpy.zeros((2**30, 2**25)) + 1)().block_until_ready()
    is_explained(str(caught.value), "MP-MEM-003")
    assert "RESOURCE_EXHAUSTED" in str(caught.value)
    with pytest.raises(jax.errors.JaxRuntimeError), memory_check.explain_allocation_errors(config):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")


@pytest.mark.fault("M2")
@pytest.mark.faults
def test_run_over_memory_limit_reports_error(tiny: Path, start: Start, tmp_path: Path) -> None:
    """Test the prediction, and the failed allocation of parameters without it."""
    limit = f"resource.setrlimit(resource.RLIMIT_AS, ({8 * GIB}, {8 * GIB}))"
    modules = write_module(tmp_path / "modules", f"import resource\n{limit}\n")

    def run_until_error(*overrides: str) -> str:
        arguments = (tiny, *LARGE, *LARGER, f"run.dir={tmp_path / 'runs'}", *overrides)
        process = start("train", *arguments, modules=modules)
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 2 and "Traceback" not in output, output
        is_explained(output[output.index("memory  [MP-MEM-001]\n") :].strip())
        return output

    assert "is predicted to need" in run_until_error()
    assert "RESOURCE_EXHAUSTED" in run_until_error("runtime.memory_check=warn")


@pytest.mark.fault("M3")
@pytest.mark.faults
def test_stop_request_during_parameter_initialization(
    tiny: Path, start: Start, tmp_path: Path
) -> None:
    process = start("train", tiny, *LARGE, f"run.dir={tmp_path}", "runtime.memory_check=warn")
    try:
        wait_for(process, "training")
        time.sleep(1)  # initializing the parameters takes more than ten seconds
        begin = time.monotonic()
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 75 and "stopped before the first step" in output
    assert time.monotonic() - begin < 5


_SHRINKS = """
import importlib.util, sys

class Finder:
    def find_spec(self, name, path, target=None):
        if name != "maxpipe.evals.evaluate":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module
        def patched(module):
            run(module)
            from maxpipe.train import memory_check
            compiled = module.Evaluator.compile
            def compile(self, steps):
                compiled(self, steps)
                memory_check.device_memory = lambda device: 1e3
            module.Evaluator.compile = compile
        spec.loader.exec_module = patched
        return spec

sys.meta_path.insert(0, Finder())
"""
"""Module that reports too little memory once everything is compiled."""


@pytest.mark.long
def test_memory_lost_during_setup_stops_run(tiny: Path, start: Start, tmp_path: Path) -> None:
    modules = write_module(tmp_path / "modules", _SHRINKS)
    small = (tiny, *ALONE, "train.steps=1", f"run.dir={tmp_path / 'runs'}")
    process = start("train", *small, modules=modules)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 2 and "Traceback" not in output, output
    assert (
        "memory  [MP-MEM-001]\n  the compiled train step needs, in addition to the state," in output
    )
    assert "step 1/1" not in output
