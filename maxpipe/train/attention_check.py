"""Check an attention backend against plain attention before a run uses it on new hardware.

A kernel can return wrong results on one device type or with one jax release without visibly
affecting the loss curve. The check runs the model's attention on small arrays, and compares outputs
and gradients with float32 references. The check allows errors a few times larger than those of
plain attention in the run's dtype. The outcome is recorded in the run's events, so that the check
is not repeated on the same hardware.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from maxpipe.config.config_files import EVENTS_FILE
from maxpipe.errors import Code, ConfigError
from maxpipe.io.files import read_json_lines
from maxpipe.models.layers.attention import AUTO, Attention
from maxpipe.models.layers.latent_attention import LatentAttention
from maxpipe.models.spec import Model
from maxpipe.nn.attention import BACKENDS
from maxpipe.nn.attention.interface import AttentionBackend, Mask
from maxpipe.parallel.axes import MeshConfig
from maxpipe.parallel.mesh import build_mesh
from maxpipe.step.step import Steps
from maxpipe.train.session import Session

_EVENT = "attention_checked"

_TOKENS, _GROUPS, _SHARED = 256, 2, 4
"""Maximum sizes used in the check: tokens, key/value heads, and query heads per key/value head."""
_DOCUMENTS = 3
_CUDNN_TOKENS, _CUDNN_DOCUMENTS = 1024, (1, 2, 5)
"""Tokens and documents per sequence used to check the cudnn backend, which selects one of three
kernels based on the number of documents."""
_TOLERANCE_FACTOR = 4.0
"""Maximum ratio of a backend's error to the error of plain attention."""
_MIN_TOLERANCE = {"float32": 1e-5, "bfloat16": 2.0**-6}
"""Error that every backend is allowed, relative to the array's largest element."""

AttentionPart = Attention | LatentAttention


class _CheckEvent(TypedDict):
    event: Literal["attention_checked"]
    what: str


@dataclass(frozen=True)
class AttentionDeviation:
    """Errors of outputs and gradients, relative to the largest element of the reference array."""

    backend: str
    result: float
    gradients: float
    limit: float

    @property
    def ok(self) -> bool:
        """Return whether the errors are within the limit. NaN errors are not."""
        return self.result <= self.limit and self.gradients <= self.limit

    def __str__(self) -> str:
        return (
            f"{self.backend} has errors of {self.result:.1e} in results and {self.gradients:.1e} "
            f"in gradients; at most {self.limit:.1e} is allowed"
        )


def check_run_attention(session: Session, steps: Steps) -> None:
    """Check the model's attention, unless the run has already done so on this hardware.

    Raises:
        ConfigError: the errors exceed the limit on at least one process.
    """
    decoder, (_, tokens), deviation = steps.param_layout.decoder, steps.shape, None
    model, dtype = decoder.model, decoder.config.compute_dtype
    description = check_description(model, dtype, tokens)
    if description and not _was_checked(session.run_dir, description):
        with session.console.stage("checking attention"):
            deviation = check_attention(model, dtype, tokens)
    # Processes that ran no check also join this collective: if one must stop, all must stop.
    verdict = "" if deviation is None or deviation.ok else str(deviation)
    worst = max(session.channel.compare_across_processes("attention", verdict))
    if worst:
        raise ConfigError.one(
            Code.MODEL_ATTENTION,
            "model.attention",
            None,
            f"differs from plain attention on {jax.local_devices()[0].device_kind} with jax "
            f"{jax.__version__}: {worst}, relative to the largest element.",
            "Set model.attention=xla.",
        )
    if deviation is not None:
        session.console.note(f"attention: {deviation}")
        session.events.write(
            _EVENT, what=description, result=deviation.result, gradients=deviation.gradients
        )


def check_attention(model: Model, dtype: str, tokens: int) -> AttentionDeviation | None:
    """Return the largest deviation over all attention types; None if all use plain attention."""
    with jax.set_mesh(build_mesh(MeshConfig(), jax.local_devices()[:1])):
        found = [each for case in _cases(model, tokens) for each in _compare_backend(*case, dtype)]
    return max(found, key=lambda each: (not each.ok, each.gradients), default=None)


def check_description(model: Model, dtype: str, tokens: int) -> str:
    """Return a key that identifies the check, built from the device, jax version, backends and
    sizes; "" for plain attention.
    """
    cases = [f"{part.backend} {_shape(part, rows)}" for part, rows, _ in _cases(model, tokens)]
    where = f"{jax.local_devices()[0].device_kind}, jax {jax.__version__}, {dtype}"
    return f"{where}: {'; '.join(cases)}" if cases else ""


def _was_checked(run_dir: Path, description: str) -> bool:
    try:
        events = read_json_lines(run_dir / EVENTS_FILE, _CheckEvent)
        return any(event["what"] == description for event in events)
    except OSError:
        return False


def _cases(model: Model, tokens: int) -> Iterator[tuple[AttentionPart, int, tuple[int, ...]]]:
    """Yield (sublayer, number of tokens, window sizes) for each distinct attention type."""
    seen: set[str] = set()
    for kind in model.layer_types.values():
        for part in kind.parts.values():
            if not isinstance(part, AttentionPart) or part.backend in (AUTO, "xla"):
                continue
            rows = min(tokens, _CUDNN_TOKENS if part.backend == "cudnn" else _TOKENS)
            if (shape := _shape(part, rows)) not in seen:
                seen.add(shape)
                name = part.window if isinstance(part, Attention) else ""
                sizes = {min(int(size), rows // 3) for size in model.values[name]} if name else ()
                yield part, rows, tuple(sorted(sizes))


def _documents(part: AttentionPart) -> tuple[int, ...]:
    """Return the numbers of documents per sequence to check."""
    return _CUDNN_DOCUMENTS if part.backend == "cudnn" else (_DOCUMENTS,)


def _shape(part: AttentionPart, tokens: int) -> str:
    """Return a string with the sizes and options of an attention sublayer."""
    groups, shared, values = _heads(part)
    more = [*sorted(part.options), *(["window"] if getattr(part, "window", "") else [])]
    return " ".join(
        [f"{tokens} tokens {groups * shared}/{groups} x {part.head_dim}/{values}", *more]
    )


def _heads(part: AttentionPart) -> tuple[int, int, int]:
    """Return the numbers of key/value heads and of query heads per key/value head, and the size of
    a value head, as used in the check.
    """
    if isinstance(part, LatentAttention):
        return min(part.num_heads, _GROUPS), 1, part.value_size
    shared = min(part.num_heads // part.num_kv_heads, _SHARED)
    return min(part.num_kv_heads, _GROUPS), shared, part.head_dim


def _compare_backend(
    part: AttentionPart, tokens: int, windows: tuple[int, ...], dtype: str
) -> Iterator[AttentionDeviation]:
    """Yield the deviation for each number of documents per sequence, with the largest window."""
    groups, shared, values = _heads(part)
    heads, random = groups * shared, np.random.default_rng(0)
    shapes = (heads, part.head_dim), (groups, part.head_dim), (groups, values), (heads, values)
    drawn = [random.standard_normal((1, tokens, *shape)) for shape in shapes]
    sinks = random.standard_normal(heads) if "sinks" in part.options else None
    query, key, value, cotangent = (jnp.asarray(each, dtype) for each in drawn)

    def run(
        attend: AttentionBackend, given: Any, cotangent: Array, window: Array, segments: Array
    ) -> list[Array]:
        def mixed(query: Array, key: Array, value: Array, sinks: Array | None) -> Array:
            mask = Mask(
                segments,
                window=window if windows else 0,
                windows=windows,
                scale=part.scale,
                soft_cap=getattr(part, "soft_cap", 0.0),
                sinks=sinks,
            )
            return attend(query, key, value, mask)

        result, pullback = jax.vjp(mixed, *given)
        return [result, *jax.tree.leaves(pullback(cotangent))]

    def all_of(given: Any, cotangent: Array, *rest: Array) -> list[list[Array]]:
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), (given, cotangent))
        with jax.default_matmul_precision("highest"):
            exact = run(BACKENDS["xla"], *wide, *rest)
        backends = (BACKENDS["xla"], BACKENDS[part.backend])
        return [exact, *(run(each, given, cotangent, *rest) for each in backends)]

    given = (query, key, value, None if sinks is None else jnp.asarray(sinks, dtype))
    window, compare = jnp.int32(max(windows, default=0)), jax.jit(all_of)
    for documents in _documents(part):
        segments = jnp.asarray(1 + np.arange(tokens)[None] * documents // tokens, jnp.int32)
        exact, plain, own = jax.device_get(compare(given, cotangent, window, segments))
        of_plain, of_own = (
            [_distance(*pair) for pair in zip(each, exact, strict=True)] for each in (plain, own)
        )
        limit = max(_MIN_TOLERANCE[dtype], _TOLERANCE_FACTOR * max(of_plain))
        yield AttentionDeviation(part.backend, of_own[0], max(of_own[1:]), limit)


def _distance(found: Any, exact: Any) -> float:
    """Return the relative error; NaN becomes infinity, because `max` would ignore NaN."""
    found, exact = (np.asarray(each, np.float64) for each in (found, exact))
    distance = float(np.abs(found - exact).max() / np.abs(exact).max())
    return distance if np.isfinite(distance) else np.inf
