"""Calibration on local devices, and plans that use the measured values."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import pwd
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import jax
import pytest
import yaml

from maxpipe import cli, hardware
from maxpipe.config.load import from_dict
from maxpipe.config.schema import Config
from maxpipe.errors import ConfigError, StorageError
from maxpipe.hardware import known_hardware, published_hardware
from maxpipe.parallel.sharding import AxisRules
from maxpipe.planner import calibrate, rerank
from maxpipe.planner.calibrate import Measurements, fit_hardware
from maxpipe.planner.compile import build_steps
from maxpipe.planner.cost import predict_cost
from maxpipe.planner.cost_model import CostModel
from maxpipe.planner.memory import predict_memory
from maxpipe.planner.rerank import build_synthetic_step
from maxpipe.planner.sizes import Sizes, build_schedule
from maxpipe.planner.topology import parse_topology
from maxpipe.planner.traffic import tensor_sums

NUM_DEVICES = 4
T = TypeVar("T")


def config_of(stages: int = 1, fsdp: int = 1, tokens: int = 32, d_mlp: int = 64) -> Config:
    model = {"num_layers": 4, "d_model": 32, "num_heads": 2, "num_kv_heads": 2, "head_dim": 16}
    model |= {"d_mlp": d_mlp, "vocab_size": 512}
    return from_dict(
        {
            "model": model,
            "mesh": {
                "ici_stage": stages,
                "ici_fsdp": fsdp,
                "ici_data": NUM_DEVICES // fsdp // stages,
            },
            "train": {"batch_size": 8, "sequence_length": tokens, "steps": 1},
        }
    )


# Some times are below, or only slightly above, the layer's memory traffic at the published rate.
@pytest.mark.parametrize(
    ("kind", "contention", "forward"),
    [
        *itertools.product(["cpu"], [1.0, 4.0], [3e-3, 2e-5, 1e-5, 5e-6, 2e-6, 1e-6, 1e-7]),
        *itertools.product(["h100", "v5p"], [1.0], [3e-3, 1e-6, 1e-7, 3e-8, 1e-8, 1e-9]),
    ],
)
def test_fitted_cost_model_reproduces_measurements(
    kind: str, contention: float, forward: float
) -> None:
    sizes = Sizes(config_of(fsdp=NUM_DEVICES))
    latency, rate = 5e-6, 2e8
    weights = sizes.params.layer_elements(sizes.layers.most_common, whole=True) * (
        1 - 1 / NUM_DEVICES
    )
    found = Measurements(
        forward=forward * contention,
        input_grad=1.5 * forward * contention,
        weight_grad=0.8 * forward * contention,
        names_recomputed=0.2 * forward * contention,
        forward_alone=forward,
        deferred=0.3 * forward * contention,
        hop=latency + 2 * sizes.activations.hidden / rate,
        gather=latency + 2 * weights / rate,
        scatter=latency + 4 * weights / rate,
        exchange=latency + 0.5 * 2 * sizes.activations.hidden * (1 - 1 / NUM_DEVICES) / rate,
        # Gathered at half the rate.
        tokens=latency + 2 * 2 * sizes.activations.hidden * (1 - 1 / NUM_DEVICES) / rate,
        latency=latency,
        fresh=4e-9,
    )
    after = fit_hardware(found, sizes, published_hardware()[kind], NUM_DEVICES)
    model = CostModel(sizes, after)
    layer = model.most_common_layer
    assert after.exchange_rate == pytest.approx(2.0)
    assert after.tokens_rate == pytest.approx(0.5)
    assert layer.forward == pytest.approx(found.forward_alone)
    assert model.contention == pytest.approx(contention)
    assert model.overlaps == (contention == 1)
    # Devices that do not share cores keep their memory between steps.
    assert after.fresh_gb_per_second == pytest.approx(0.25 if contention > 1 else 0.0)
    assert after.input_grad_cost == pytest.approx(1.5)
    assert after.names_recomputed == pytest.approx(0.2)
    backward = after.weight_grad_cost * layer.seconds + layer.accumulation
    assert backward == pytest.approx(0.8 * found.forward_alone)
    # Two slots take longer than one combined slot.
    pipeline = dataclasses.replace(sizes.config.pipeline, weight_gather="step")
    still = Sizes(dataclasses.replace(sizes.config, pipeline=pipeline))
    slot = CostModel(still, after).most_common_layer.slot
    apart = slot("I") + slot("W") - slot("B")
    assert apart == pytest.approx(0.3 * found.forward_alone, rel=1e-3)
    assert (layer.accumulation > 0) == (contention > 1)
    # Seven arrays, each with its own latency; the two norms are not sharded.
    norms = 2 * sizes.config.model.d_model * (1 - 1 / NUM_DEVICES)
    assert layer.gather == pytest.approx(found.gather + 6 * latency - 2 * norms / rate)
    assert layer.scatter == pytest.approx(found.scatter + 6 * latency - 4 * norms / rate)


def test_fitted_cost_depends_on_microbatch_size() -> None:
    sizes = Sizes(config_of(tokens=256))  # two sequences on each device
    moved = CostModel(sizes, published_hardware()["cpu"]).most_common_layer.moved_bytes
    flat = Measurements(
        forward=4e-3,
        input_grad=6e-3,
        weight_grad=5e-3,
        names_recomputed=1e-3,
        forward_alone=1e-3,
        none_recomputed=5e-4,
        fresh=1e-9,
        hop=1e-3,
        gather=1e-3,
        scatter=1e-3,
        exchange=1e-3,
        latency=1e-5,
    )
    # The predicted time for one sequence, and 1.1 and 1.3 times that for two and four.
    before = fit_hardware(flat, sizes, published_hardware()["cpu"], NUM_DEVICES)
    timed = calibrate._sizes(sizes)
    assert [each.batch.microbatch_size for each in timed] == [1, 2, 4]
    taken = [
        longer * calibrate._predict_row_seconds(each, before)
        for longer, each in zip((1.0, 1.1, 1.3), timed, strict=True)
    ]
    # Fewer sequences share each read of the weights.
    assert taken[0] > 1.003 * taken[1] / 1.1
    of_rows = tuple(zip((moved / 2, moved, 2 * moved), taken, strict=True))
    found = dataclasses.replace(flat, by_size=of_rows)
    after = fit_hardware(found, sizes, published_hardware()["cpu"], NUM_DEVICES)
    assert after.fastest_mib * 2**20 == pytest.approx(0.5 * moved)
    assert after.growth_below == 0
    assert after.growth_above == pytest.approx((0.1 + 0.3 / 2) / 2)
    layer = CostModel(sizes, after).most_common_layer
    assert layer.size_factor == pytest.approx(1 + after.growth_above)
    # At the measured size, the fitted values reproduce the measurements.
    assert layer.forward == pytest.approx(found.forward_alone)
    weights = after.weight_grad_cost * layer.seconds + layer.accumulation
    assert weights == pytest.approx(found.weight_grad / 4)
    few = dataclasses.replace(sizes.config.train, batch_size=4)
    half = Sizes(dataclasses.replace(sizes.config, train=few))
    assert CostModel(half, after).most_common_layer.size_factor == pytest.approx(1.0)
    # Saved activations are part of the measured times, so the memory rate does not count them.
    kept = dataclasses.replace(sizes.config.pipeline, remat="none")
    none = CostModel(
        Sizes(dataclasses.replace(sizes.config, pipeline=kept)), after
    ).most_common_layer
    backward = none.slot("B") - weights - after.input_grad_cost * none.forward
    assert backward == pytest.approx(found.none_recomputed / 4, rel=1e-3)


def test_timed_layers_use_axis_rules_of_train_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matmuls and attention have different implementations on CPUs and accelerators."""
    asked: list[AxisRules] = []
    decoder = calibrate.Decoder
    monkeypatch.setattr(
        calibrate, "Decoder", lambda model, rules: asked.append(rules) or decoder(model, rules)
    )
    monkeypatch.setattr(rerank, "PROGRAM_SECONDS", 0.0)
    config, devices = config_of(fsdp=NUM_DEVICES), jax.devices()[:NUM_DEVICES]
    sizes = Sizes(config).on_platform(devices[0].platform)
    calibrate._layers([(sizes, "F", "full")], calibrate._ring(config, devices))
    (timed,) = asked
    assert timed == build_steps(config, devices).param_layout.decoder.rules
    assert timed.flattens_tokens


def test_memory_rate_is_fitted_to_measurement() -> None:
    sizes, streamed = Sizes(config_of(fsdp=NUM_DEVICES)), 1 / 40e9
    found = Measurements(
        forward=12e-3,
        input_grad=12e-3,
        weight_grad=12e-3,
        names_recomputed=0.0,
        forward_alone=3e-3,
        hop=1e-3,
        gather=1e-3,
        scatter=1e-3,
        exchange=1e-3,
        latency=1e-5,
        fresh=1e-9,
        streamed=streamed,
    )
    after = fit_hardware(found, sizes, published_hardware()["cpu"], NUM_DEVICES)
    # Four devices share the bandwidth of one, so the rate of one device counts four times.
    assert CostModel(sizes, after).contention == pytest.approx(4.0)
    assert after.memory_gb_per_second == pytest.approx(4 * 40)


def test_small_temporary_memory_is_not_charged_each_step() -> None:
    sizes, schedule = (
        Sizes(config_of(fsdp=NUM_DEVICES)),
        build_schedule(config_of(fsdp=NUM_DEVICES)),
    )
    fresh = dataclasses.replace(published_hardware()["cpu"], fresh_gb_per_second=0.5)
    held = predict_memory(sizes.on_platform("cpu"), schedule, platform="cpu")
    assert 0 < held.temporary < 16 * 2**20
    assert "memory" not in predict_cost(sizes, schedule, fresh).parts
    mib = held.temporary / 2**20
    for kept, share in ((0.0, 1.0), (mib / 3, 1.0), (mib / 2, 1.0), (mib / 1.5, 0.25)):
        figures = dataclasses.replace(fresh, fresh_from_mib=kept)
        found = predict_cost(sizes, schedule, figures).parts["memory"]
        assert found == pytest.approx(share * held.temporary / 5e8)


def test_sequence_parallel_collectives_use_tokens_rate() -> None:
    config = config_of(tokens=32)
    mesh = dataclasses.replace(config.mesh, ici_data=1, ici_tensor=4, sequence_parallel=True)
    sizes = Sizes(dataclasses.replace(config, mesh=mesh))
    before = dataclasses.replace(published_hardware()["cpu"], latency_us=0.0)
    slow = dataclasses.replace(before, tokens_rate=0.25)
    sent = tensor_sums(sizes, sizes.layers.most_common)
    usual, slower = (CostModel(sizes, each).send_seconds(sent) for each in (before, slow))
    assert slower == pytest.approx(4 * usual) and usual > 0
    whole = dataclasses.replace(mesh, sequence_parallel=False)
    summed = tensor_sums(Sizes(dataclasses.replace(config, mesh=whole)), sizes.layers.most_common)
    assert CostModel(sizes, before).send_seconds(summed) == CostModel(sizes, slow).send_seconds(
        summed
    )


def retry(measure: Callable[[], T]) -> T:
    """Retry measurements that are rejected because times vary while other tests run."""
    for _ in range(4):
        with contextlib.suppress(ConfigError):
            return measure()
    return measure()


@pytest.mark.timing
def test_measure_on_local_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rerank, "PROGRAM_SECONDS", 0.2)
    devices = jax.devices()[:NUM_DEVICES]
    # Weight-gradient time is a difference, and must exceed the noise of attention scores.
    sizes = [Sizes(config_of(tokens=tokens, d_mlp=512)) for tokens in (32, 256)]
    few, many = (retry(partial(calibrate.measure, each, devices)) for each in sizes)
    # 8 times the matmul FLOPs, 64 times the score FLOPs and 8 times the message bytes.
    assert many.forward > 4 * few.forward and many.forward_alone > 4 * few.forward_alone
    assert many.input_grad > 4 * few.input_grad
    assert many.weight_grad > 2 * few.weight_grad  # accumulation time does not depend on length
    # Virtual devices share cores, and every transfer takes time.
    assert many.forward > many.forward_alone > 0
    moved = (many.hop, many.gather, many.scatter, many.exchange, many.tokens)
    assert min(*moved, many.latency, many.fresh, many.streamed) > 0


@pytest.mark.timing
def test_calibrated_model_predicts_measured_step_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prediction is only within a factor of 3, because calibration times no whole steps."""
    monkeypatch.setattr(rerank, "PROGRAM_SECONDS", 0.2)
    devices = jax.devices()[:NUM_DEVICES]
    config = config_of(fsdp=NUM_DEVICES, tokens=256)
    after, found = retry(lambda: calibrate.calibrate(config, published_hardware()["cpu"], devices))
    assert after.shared_by > 0 and after.fresh_gb_per_second == pytest.approx(1e-9 / found.fresh)
    assert found.forward > found.forward_alone  # virtual devices share cores
    assert after.measured and after.bf16_tflops == published_hardware()["cpu"].bf16_tflops
    (taken,) = rerank.median_seconds([build_synthetic_step(build_steps(config, devices))], 0.2)
    predicted = predict_cost(Sizes(config), build_schedule(config), after).seconds
    assert 1 / 3 < predicted / taken < 3


def test_negative_times_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "_layers", lambda *_: [2e-3, 3e-3, 4e-3, 4e-3, 5e-3, 5e-3, 5e-3])
    monkeypatch.setattr(calibrate, "NUM_STREAMED_PARAMS", 1000)
    monkeypatch.setattr(rerank, "PROGRAM_SECONDS", 0.0)
    with pytest.raises(ConfigError, match="a negative time for input_grad"):
        calibrate.measure(Sizes(config_of()), jax.devices()[:1])


def test_calibration_is_saved_and_used_by_plan(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = published_hardware()["cpu"]
    after = dataclasses.replace(before, tick_us=123.0, measured="today")
    found = Measurements(1e-3, 1e-3, 1e-3, 1e-3, 1e-3)
    monkeypatch.setattr(calibrate, "calibrate_here", lambda _: (before, after, found))
    assert cli.main(["plan", "configs/quickstart.yml", "--calibrate"]) == 0
    assert "123" in capsys.readouterr().out
    assert known_hardware()["cpu"] == after and published_hardware()["cpu"] == before
    assert known_hardware()["v5p"] == published_hardware()["v5p"]
    assert cli.main(["plan", "configs/quickstart.yml", "--topology", "cpu:8"]) == 0
    assert "8 devices of CPU, measured today" in capsys.readouterr().out


def test_calibration_file_of_earlier_release_is_loaded(home: Path) -> None:
    after = dataclasses.replace(
        published_hardware()["cpu"], names_recomputed=0.125, measured="today"
    )
    path = hardware.save_measured(after)
    path.write_text(path.read_text().replace("names_recomputed", "names_replay"))
    known_hardware.cache_clear()
    assert known_hardware()["cpu"] == after


@pytest.mark.parametrize(
    ("figure", "value"),
    [
        *((name, 0) for name in ("bf16_tflops", "matmul_efficiency", "memory_gib")),
        *((name, 0) for name in ("link_gb_per_second", "exchange_rate", "largest_slice")),
        ("torus_dims", 5),
        ("latency_us", 1e308),
        ("bf16_tflops", 1e-300),
        ("tick_us", -1),
        ("topology", "zz"),
    ],
)
def test_out_of_range_hardware_values_are_rejected(
    figure: str, value: float | str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = hardware.save_measured(published_hardware()["cpu"])
    path.write_text(path.read_text() + yaml.safe_dump({figure: value}))
    known_hardware.cache_clear()
    assert cli.main(["plan", "configs/quickstart.yml", "--topology", "cpu:8"]) == 2
    assert f"{figure} " in capsys.readouterr().err
    path.unlink()
    known_hardware.cache_clear()


def test_unwritable_folder_is_reported_before_timing(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hardware.measured_folder().parent.mkdir(parents=True)
    hardware.measured_folder().write_text("")
    monkeypatch.setattr(calibrate, "local_topology", lambda *_: parse_topology("cpu:8"))
    monkeypatch.setattr(calibrate, "calibrate", lambda *_: pytest.fail("timed"))
    assert cli.main(["plan", "configs/quickstart.yml", "--calibrate"]) == 74
    assert "set HOME to a writable folder" in capsys.readouterr().err


def test_published_values_are_used_without_home_folder(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hardware.save_measured(dataclasses.replace(published_hardware()["cpu"], memory_gib=3.0))
    assert known_hardware()["cpu"].memory_gib == 3
    known_hardware.cache_clear()
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    assert known_hardware() == published_hardware()
    with pytest.raises(StorageError) as error:
        hardware.save_measured(published_hardware()["cpu"])
    assert str(error.value).startswith(
        "~/.cache/maxpipe/hardware/cpu.yml: cannot be written  [MP-IO-001]\n  HOME is not set.\n"
    )


def test_invalid_calibration_file_is_rejected(home: Path) -> None:
    hardware.measured_folder().mkdir(parents=True)
    (hardware.measured_folder() / "cpu.yml").write_text("speed: high\n")
    with pytest.raises(ConfigError, match="is not a valid calibration file"):
        known_hardware()
