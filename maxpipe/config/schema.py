"""Complete config of a run, with one field per section.

Each file in `sections/` defines one section: its keys with types, defaults and documentation, the
valid ranges of numeric keys, and its rules. The string below each field documents that field.
`maxpipe config explain`, `docs/config.md`, the JSON schema and error messages are generated from
these strings. The keys of each model family are declared in `maxpipe/models`. This package does not
import jax, so that `maxpipe --help` starts quickly.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from maxpipe.config.sections import adapter as _adapter  # noqa: F401 (registers rules)
from maxpipe.config.sections import mesh as _mesh  # noqa: F401 (registers rules)
from maxpipe.config.sections import model as _model  # noqa: F401 (registers rules)
from maxpipe.config.sections.checkpoint import CheckpointConfig
from maxpipe.config.sections.data import DataConfig
from maxpipe.config.sections.distill import DistillConfig
from maxpipe.config.sections.eval import EvalConfig
from maxpipe.config.sections.grpo import GrpoConfig
from maxpipe.config.sections.guard import GuardConfig
from maxpipe.config.sections.launch import LaunchConfig
from maxpipe.config.sections.log import LogConfig
from maxpipe.config.sections.optim import OptimConfig
from maxpipe.config.sections.pipeline import PipelineConfig
from maxpipe.config.sections.preference import PreferenceConfig
from maxpipe.config.sections.run import RunConfig
from maxpipe.config.sections.runtime import RuntimeConfig
from maxpipe.config.sections.tokenizer import TokenizerConfig
from maxpipe.config.sections.train import TrainConfig
from maxpipe.models.config import AdapterConfig, ModelConfig
from maxpipe.parallel.axes import MeshConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Complete config of a run."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig
    mesh: MeshConfig = field(default_factory=MeshConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    grpo: GrpoConfig = field(default_factory=GrpoConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    log: LogConfig = field(default_factory=LogConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)

    def __post_init__(self) -> None:
        """Copy section `adapter` into section `model`, which then describes the complete model."""
        adapter = self.adapter if self.adapter.rank else None
        if self.model.adapter != adapter:
            object.__setattr__(self, "model", replace(self.model, adapter=adapter))
