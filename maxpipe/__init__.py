"""maxpipe: train decoder language models with a circular pipeline in JAX.

Shape letters in signatures, einsum strings and docstrings of the package:

    B  examples of one microbatch on one device      V  vocabulary
    T  tokens (query side)                            M  microbatches
    S  key tokens                                     P  stages
    D  model width                                    R  repeats
    N  query heads                                    L  layers per chunk
    G  key/value heads                                K  ticks
    H  head size
    F  MLP width

A *chunk* is the group of consecutive layers that a stage runs in one repeat. `axis`
always means a mesh or logical axis, and `dim` a tensor dimension.

The names in `__all__` are the Python API, which docs/guides/python.md explains. They are imported
at first use: `import maxpipe`, `maxpipe --help`, `maxpipe config` and `maxpipe schedule` do not
load jax.
"""

__version__ = "0.1.0"

TYPE_CHECKING = False  # as in `typing`, which would be imported
if TYPE_CHECKING:
    from typing import Any

    from maxpipe.api.checkpoint import Checkpoint
    from maxpipe.api.config import load_config
    from maxpipe.api.evaluation import evaluate
    from maxpipe.api.generation import generate
    from maxpipe.api.plan import Plan, plan
    from maxpipe.api.schedule import Schedule
    from maxpipe.api.trainer import Trainer, build, run_training, train_step
    from maxpipe.errors import ConfigError, MaxpipeError, StorageError
    from maxpipe.pipeline.objective import Objective

_MODULES = {
    "Checkpoint": "api.checkpoint",
    "ConfigError": "errors",
    "MaxpipeError": "errors",
    "Objective": "pipeline.objective",
    "Plan": "api.plan",
    "Schedule": "api.schedule",
    "StorageError": "errors",
    "Trainer": "api.trainer",
    "build": "api.trainer",
    "evaluate": "api.evaluation",
    "generate": "api.generation",
    "load_config": "api.config",
    "plan": "api.plan",
    "run_training": "api.trainer",
    "train_step": "api.trainer",
}
"""Modules of the public names."""

__all__ = [
    "Checkpoint",
    "ConfigError",
    "MaxpipeError",
    "Objective",
    "Plan",
    "Schedule",
    "StorageError",
    "Trainer",
    "build",
    "evaluate",
    "generate",
    "load_config",
    "plan",
    "run_training",
    "train_step",
]


def __getattr__(name: str) -> "Any":
    """Import a public name at first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
