"""The declaration of the keys of what is done with trained models."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillConfig:
    """A teacher, of which this run's model is the student. Read with `train.objective=distill`."""

    teacher: str = ""
    """The model that teaches, as `checkpoint.restore_from` names one: `RUN@STEP`, `RUN@newest`,
    `RUN@best`, the path to a checkpoint's folder, an import, or `hf:DIR`. It has a model section of
    its own, and the student's vocabulary."""
    stored: str = ""
    """In place of a teacher the folder in which `maxpipe distill prepare` has stored what it says
    of all rows."""
    direction: Literal["forward", "reverse"] = "forward"
    """Which divergence is made small: `forward`, KL(teacher | student), spreads the student over
    all that the teacher may say; `reverse`, KL(student | teacher), draws it to what the teacher
    says most."""
    temperature: float = 1.0
    """What logits of both are divided by. Above 1 the less likely tokens count more. The
    divergence is multiplied by its square, so that gradients stay as large."""
    top_k: int = 32
    """How many of the teacher's most likely tokens are told apart, at each place. All others are
    one bucket. At most `model.vocab_size`."""
    weight: float = 0.5
    """What the divergence counts in the loss; the cross entropy of the text has the rest of 1."""
    devices: int = 0
    """How many devices are the teacher's, the last ones of each process; the student has the
    others. 0: both have all devices, in turn."""
    layout: list[str] = field(default_factory=list)
    """Mesh and pipeline of the teacher: keys of these two sections, such as `[mesh.ici_stage=2,
    mesh.ici_fsdp=2, pipeline.microbatches=4]`. Of its pipeline only forward slots run. Empty: the
    student's mesh and microbatches where both have as many devices, else fsdp over all of its
    devices."""
