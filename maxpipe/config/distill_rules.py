"""Rules for distillation."""

from __future__ import annotations

from collections.abc import Iterator

from maxpipe.config.rules import rule
from maxpipe.config.schema import Config
from maxpipe.errors import RuleViolation

_OBJECTIVE = "train.objective"


@rule(_OBJECTIVE, "distill.teacher", "distill.teacher_logits")
def _teacher_is_named(config: Config) -> Iterator[RuleViolation]:
    if config.train.objective != "distill":
        return
    own = config.distill
    if not (own.teacher or own.teacher_logits):
        yield RuleViolation(
            "distill.teacher",
            "must be set to a teacher model with train.objective=distill.",
            "Set distill.teacher=RUN@newest or hf:DIR, or set distill.teacher_logits to a folder "
            "written "
            "by `maxpipe distill prepare`.",
        )
    elif own.teacher and own.teacher_logits:
        yield RuleViolation(
            "distill.teacher_logits",
            "must be empty with distill.teacher: teacher logits are computed or read, not both.",
            "Set distill.teacher='' to read precomputed logits, or distill.teacher_logits='' to "
            "compute "
            "them.",
        )


@rule(_OBJECTIVE, "distill.top_k", "model.vocab_size")
def _top_k_is_in_the_vocabulary(config: Config) -> Iterator[RuleViolation]:
    most = config.model.vocab_size
    if config.train.objective == "distill" and config.distill.top_k > most:
        yield RuleViolation(
            "distill.top_k",
            f"must be at most model.vocab_size ({most}).",
            f"Set distill.top_k={most}, or less.",
        )


@rule(_OBJECTIVE, "distill.teacher_logits", "distill.teacher_devices", "distill.teacher_layout")
def _stored_logits_need_no_devices(config: Config) -> Iterator[RuleViolation]:
    own = config.distill
    if config.train.objective != "distill" or not own.teacher_logits:
        return
    for name, value in (
        ("teacher_devices", own.teacher_devices),
        ("teacher_layout", own.teacher_layout),
    ):
        if value:
            empty = "0" if name == "teacher_devices" else "[]"
            yield RuleViolation(
                f"distill.{name}",
                "has no effect with distill.teacher_logits: no teacher runs.",
                f"Set distill.{name}={empty}.",
            )


@rule("distill.teacher_layout")
def _layout_is_of_two_sections(config: Config) -> Iterator[RuleViolation]:
    for text in config.distill.teacher_layout:
        key = text.partition("=")[0]
        if "=" not in text or not key.startswith(("mesh.", "pipeline.")):
            yield RuleViolation(
                "distill.teacher_layout",
                "must contain only keys of the sections mesh and pipeline with values, but has "
                f"{text!r}.",
                "Set distill.teacher_layout=[mesh.ici_stage=2,pipeline.microbatches=4].",
            )
        elif key == "mesh.cpu_devices":
            yield RuleViolation(
                "distill.teacher_layout",
                "must not contain mesh.cpu_devices, which applies to teacher and student together.",
                "Set mesh.cpu_devices and distill.teacher_devices in the config of the run.",
            )
