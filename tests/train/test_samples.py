"""Samples generated during training, in real runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.train.runs import Run, forget_after, losses, saved_digest

SAMPLED = (
    *("eval.sample_every=2", "eval.sample_max_tokens=6", "eval.sample_temperature=0.8"),
    "eval.sample_prompts=[the, '', 'no hid']",
)


@pytest.fixture
def copy(uninterrupted: Path, tmp_path: Path) -> Path:
    """A writable copy of the uninterrupted run; `run.dir` is its parent."""
    return Path(shutil.copytree(uninterrupted, tmp_path / "copied" / "run"))


def samples(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Return the samples by step."""
    lines = (folder / "samples.jsonl").read_text().splitlines()
    found = {record["step"]: record["samples"] for record in map(json.loads, lines)}
    assert len(found) == len(lines)
    return found


@pytest.mark.long
@pytest.mark.fault("D3", "D4")
def test_sampling_does_not_change_training(
    copy: Path, uninterrupted: Path, tiny: Path, run: Run
) -> None:
    """State and losses equal those without sampling; samples equal `generate` on one device."""
    forget_after(copy, 20)
    output = run("train", tiny, f"run.dir={copy.parent}", *SAMPLED)
    assert losses(copy) == losses(uninterrupted) and saved_digest(copy) == saved_digest(
        uninterrupted
    )
    found = samples(copy)
    assert [*found] == [22, 24]
    for each in found[24]:
        assert f"sample after step 24: {each['prompt']}" in output
    prompts = ("--prompt", "the", "--prompt", "", "--prompt", "no hid", "--json")
    drawn = ("--temperature", 0.8, "--max-tokens", 6)
    lines = run("generate", f"{copy}@24", *prompts, *drawn).splitlines()
    assert [json.loads(line) for line in lines if line.startswith("{")] == found[24]


@pytest.mark.faults
@pytest.mark.fault("D4", "D6")
def test_samples_resume_with_run_under_any_layout(copy: Path, tiny: Path, run: Run) -> None:
    """Repeated steps are recorded once, and every layout generates the same samples."""
    forget_after(copy, 16)
    run("train", tiny, f"run.dir={copy.parent}", *SAMPLED)
    before = samples(copy)
    layouts = (
        "mesh.ici_stage=2 mesh.ici_fsdp=2 pipeline.repeats=2 pipeline.schedule=interleaved"
        " pipeline.microbatches=2",
        "mesh.ici_stage=1 mesh.ici_data=2 mesh.ici_fsdp=2 pipeline.microbatches=2",
    )
    for layout in layouts:
        forget_after(copy, 20)
        run("train", tiny, f"run.dir={copy.parent}", *SAMPLED, *layout.split())
        assert samples(copy) == before and [*before] == [18, 20, 22, 24]
