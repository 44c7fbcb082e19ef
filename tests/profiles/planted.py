"""A train step with a slow stage or a slow link, whose places are chosen when the step runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from maxpipe.config.sections.optim import OptimConfig
from maxpipe.config.sections.pipeline import PipelineConfig
from maxpipe.config.sections.train import TrainConfig
from maxpipe.models.config import ModelConfig
from maxpipe.parallel import scopes
from maxpipe.parallel.axes import MeshConfig
from maxpipe.parallel.collectives import axis_index, ring_shift
from maxpipe.parallel.mesh import STAGE, build_mesh
from maxpipe.parallel.sharding import AxisRules
from maxpipe.pipeline.program import StepProgram
from maxpipe.profiles.results import Results
from maxpipe.step.build import build_steps
from maxpipe.train.profiler import profile_steps

MODEL = ModelConfig(
    num_layers=8,
    d_model=128,
    num_heads=4,
    num_kv_heads=4,
    head_dim=32,
    d_mlp=256,
    vocab_size=64,
    compute_dtype="float32",
)


@dataclass(frozen=True)
class Fault:
    """Additional matmuls on one stage, in each layer or before each message in one direction."""

    stage: int
    matmuls: int
    direction: int = 0
    """Direction of the delayed messages, +1 or -1; 0 for a fault in the layers."""

    @property
    def code(self) -> int:
        return self.stage + 8 * (self.direction + 1) + 32 * self.matmuls


@dataclass
class PlantedStep:
    """A compiled train step whose batch contains the code of a fault, or 0."""

    steps: Any
    program: Any
    state: Any
    batch: Any

    def run(self, fault: Fault | None = None) -> None:
        old = self.batch["example_ids"]
        code = np.full(old.shape, fault.code if fault else 0, np.int32)
        batch = {**self.batch, "example_ids": jax.device_put(code, old.sharding)}
        self.state, metrics = self.program(self.state, batch)
        jax.block_until_ready(metrics)

    def profile(self, folder: Path, fault: Fault | None = None, num_steps: int = 2) -> Results:
        def run() -> None:
            self.run(fault)

        return profile_steps(folder, self.steps, self.program, run, num_steps)


def planted_step(
    monkeypatch: pytest.MonkeyPatch,
    *,
    schedule: str,
    stages: int,
    repeats: int,
    fsdp: int = 1,
    microbatches: int = 8,
    remat: str = "full",
) -> PlantedStep:
    """Compile a train step with faults that its batch selects."""
    sizes = MeshConfig(ici_stage=stages, ici_fsdp=fsdp)
    mesh = build_mesh(sizes, jax.devices()[: stages * fsdp])
    steps = build_steps(
        mesh,
        model=MODEL,
        pipeline=PipelineConfig(
            schedule=schedule,
            repeats=repeats,
            microbatches=microbatches,
            weight_gather="step",
            remat=remat,  # type: ignore[arg-type]
        ),
        optim=OptimConfig(),
        train=TrainConfig(batch_size=microbatches * fsdp, sequence_length=128),
        total_steps=100,
        rules=AxisRules.from_config(sizes),
        seed=0,
        byte_lengths=np.ones(MODEL.vocab_size, np.int32),
    )
    network = steps.engine.network
    layers = {name: _slow_layer(layer) for name, layer in network.layers.items()}
    steps = replace(steps, engine=replace(steps.engine, network=replace(network, layers=layers)))
    send = StepProgram._send
    with monkeypatch.context() as patch:
        patch.setattr(StepProgram, "_send", lambda self, sent: _slow_send(self, sent, send))
        program = steps.compile_train()
    batch: Mapping[str, Any] = {
        name: jax.device_put(np.ones(like.shape, like.dtype), like.sharding)
        for name, like in steps.abstract_batch().items()
    }
    step = PlantedStep(steps, program, steps.init(), batch)
    step.run()  # the first execution allocates buffers
    return step


def _slow_layer(layer: Callable[..., Any]) -> Callable[..., Any]:
    def slow(weights: Any, x: jax.Array, inputs: Any, *rest: Any) -> Any:
        x = _delayed(x, inputs["example_ids"].reshape(-1)[0], 0)
        return layer(weights, x, inputs, *rest)

    return slow


def _slow_send(program: Any, sent: dict[str, jax.Array], send: Callable[..., Any]) -> Any:
    """Delay the messages of each direction, with operations in the scope of the messages."""
    code = program.batch["example_ids"].reshape(-1)[0]
    messages = {}
    for number, way in enumerate(program.schedule.arrivals):
        if way.direction and way.port in sent:
            with jax.named_scope(scopes.SEND):
                value = _delayed(sent[way.port], code, way.direction)
                messages[number] = ring_shift(
                    value, STAGE, way.direction, program.schedule.num_stages
                )
    assert messages.keys() == send(program, sent).keys()
    return messages


def _delayed(x: jax.Array, code: jax.Array, direction: int) -> jax.Array:
    """Return `x` after the matmuls of the fault with this code."""
    here = (code % 8 == axis_index(STAGE)) & (code // 8 % 4 == direction + 1)
    square = lax.stop_gradient(x.reshape(-1, x.shape[-1])[: x.shape[-1]])
    extra = lax.fori_loop(
        0, jnp.where(here, code // 32, 0), lambda _, y: jnp.tanh(y @ square), square
    )
    return jnp.where(jnp.abs(extra).max() > 1e30, 0.0, x)
