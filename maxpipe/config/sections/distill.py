"""Config section `distill`: the teacher model for `train.objective=distill`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from maxpipe.config.rules import add_ranges, rule
from maxpipe.errors import Code, RuleViolation
from maxpipe.io.typed_json import renamed_from
from maxpipe.models.config import Bound

if TYPE_CHECKING:
    from maxpipe.config.schema import Config


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillConfig:
    """Distillation from a teacher model into this run's model (the student). Ignored unless
    `train.objective=distill`.
    """

    teacher: str = ""
    """Teacher model, in the same format as `checkpoint.restore_from`: `RUN@STEP`, `RUN@newest`,
    `RUN@best`, the path of a checkpoint folder, an imported model, or `hf:DIR`. The teacher may
    have a different architecture, but must have the same vocabulary."""
    teacher_logits: str = field(default="", metadata=renamed_from("stored"))
    """Folder of precomputed teacher logits, written by `maxpipe distill prepare`. Replaces
    `distill.teacher`."""
    direction: Literal["forward", "reverse"] = "forward"
    """Direction of the KL divergence between the teacher's and the student's predictions. `forward`
    minimizes KL(teacher | student), which makes the student cover all tokens that the teacher
    considers likely. `reverse` minimizes KL(student | teacher), which concentrates the student on
    the teacher's most likely tokens."""
    temperature: float = 1.0
    """Temperature by which the logits of the teacher and the student are divided. Values above 1
    give less likely tokens more weight. The divergence is multiplied by the squared temperature, so
    that the scale of the gradients does not change."""
    top_k: int = 32
    """Number of tokens compared at each position: the tokens to which the teacher assigns the
    highest probabilities. All other tokens are merged into one bucket. At most
    `model.vocab_size`."""
    weight: float = 0.5
    """Weight of the KL divergence in the loss. The weight of the cross-entropy is 1 minus this
    value."""
    teacher_devices: int = field(default=0, metadata=renamed_from("devices"))
    """Number of devices that run only the teacher; these are the last devices in the device list.
    The student uses all other devices. If 0, teacher and student alternate on all devices."""
    teacher_layout: list[str] = field(default_factory=list, metadata=renamed_from("layout"))
    """Mesh and pipeline settings for the teacher, such as `[mesh.ici_stage=2, mesh.ici_fsdp=2,
    pipeline.microbatches=4]`. The teacher's pipeline runs only forward passes. If empty, the
    teacher uses the student's mesh and microbatches if both have the same number of devices, and
    otherwise fsdp over all of its devices."""


add_ranges(
    Bound(
        "distill.temperature", 1.0, 1e-3, 1e3, "logits are divided by the temperature in float32"
    ),
    Bound("distill.top_k", 32, 1),
    Bound("distill.weight", 0.5, 0, 1, "0 would ignore the teacher", low_is_inside=False),
    Bound("distill.teacher_devices", 0, 0, why="0 alternates on all devices"),
)


@rule("train.objective", "distill.teacher", "distill.teacher_logits")
def _teacher_is_named(config: Config) -> Iterator[RuleViolation]:
    if config.train.objective != "distill":
        return
    section = config.distill
    if not (section.teacher or section.teacher_logits):
        yield RuleViolation(
            Code.POST_TEACHER,
            "distill.teacher",
            "must be set to a teacher model with train.objective=distill.",
            "Set distill.teacher=RUN@newest or hf:DIR, or set distill.teacher_logits to a folder "
            "written by `maxpipe distill prepare`.",
        )
    elif section.teacher and section.teacher_logits:
        yield RuleViolation(
            Code.CFG_CONFLICT,
            "distill.teacher_logits",
            "must be empty if distill.teacher is set: teacher logits are either computed or read.",
            "Set distill.teacher='' to read precomputed logits, or distill.teacher_logits='' to "
            "compute them.",
        )


@rule("train.objective", "distill.top_k", "model.vocab_size")
def _top_k_is_in_the_vocabulary(config: Config) -> Iterator[RuleViolation]:
    most = config.model.vocab_size
    if config.train.objective == "distill" and config.distill.top_k > most:
        yield RuleViolation(
            Code.CFG_VALUE,
            "distill.top_k",
            f"must be at most model.vocab_size ({most}).",
            f"Set distill.top_k={most}, or less.",
        )


@rule(
    *("train.objective", "distill.teacher_logits"),
    *("distill.teacher_devices", "distill.teacher_layout"),
)
def _stored_logits_need_no_devices(config: Config) -> Iterator[RuleViolation]:
    section = config.distill
    if config.train.objective != "distill" or not section.teacher_logits:
        return
    for name, value in (
        ("teacher_devices", section.teacher_devices),
        ("teacher_layout", section.teacher_layout),
    ):
        if value:
            empty = "0" if name == "teacher_devices" else "[]"
            yield RuleViolation(
                Code.CFG_IGNORED,
                f"distill.{name}",
                "has no effect if distill.teacher_logits is set, because no teacher model runs.",
                f"Set distill.{name}={empty}.",
            )


@rule("distill.teacher_layout")
def _layout_is_of_two_sections(config: Config) -> Iterator[RuleViolation]:
    for text in config.distill.teacher_layout:
        key = text.partition("=")[0]
        if "=" not in text or not key.startswith(("mesh.", "pipeline.")):
            yield RuleViolation(
                Code.POST_TEACHER,
                "distill.teacher_layout",
                "must contain only KEY=VALUE settings from the sections mesh and pipeline; got "
                f"{text!r}.",
                "Set distill.teacher_layout=[mesh.ici_stage=2,pipeline.microbatches=4].",
            )
        elif key == "mesh.cpu_devices":
            yield RuleViolation(
                Code.POST_TEACHER,
                "distill.teacher_layout",
                "must not contain mesh.cpu_devices, which applies to both the teacher and the "
                "student.",
                "Set mesh.cpu_devices and distill.teacher_devices in the config of the run.",
            )


def runs_teacher(config: Config) -> bool:
    """Return True if the run computes teacher logits online instead of reading precomputed
    logits.
    """
    return config.train.objective == "distill" and bool(config.distill.teacher)
