"""Real runs with `train.objective=grpo`: resume, stop, layouts and rejected settings."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.train.runs import (
    SAME,
    Run,
    Start,
    forget_after,
    is_explained,
    ledger,
    records,
    saved_digest,
    saved_steps,
    start_pair,
    wait_for,
    wait_for_outputs,
)

CONFIG = """
run: {name: run}
model: {num_layers: 2, d_model: 16, num_heads: 2, num_kv_heads: 1, head_dim: 8, d_mlp: 32,
        vocab_size: 259, compute_dtype: float32}
mesh: {cpu_devices: 4, ici_stage: 2, ici_fsdp: 2}
pipeline: {schedule: 1f1b, microbatches: 2}
train: {objective: grpo, steps: 6, batch_size: 16, sequence_length: 16}
grpo: {prompts: PROMPTS, group_size: 4, max_tokens: 6, updates_per_rollout: 2, kl_coef: 0.1,
       reward_file: 'REWARD:reward', allow_code: true}
optim: {learning_rate: 1.0e-2, schedule: constant}
checkpoint: {every: 2, keep: 10}
eval: {sample_every: 2}
log: {every: 1}
runtime: {platform: cpu, compilation_cache: ''}
"""
REWARD = """
def reward(completion, record):
    {body}
    return sum(each.isascii() for each in completion) / 6 + len(record["prompt"]) / 100
"""
UPDATES, GROUP = 2, 4


def write_run_files(folder: Path, body: str = "pass") -> Path:
    """Write the config of a run and the files that it names; return the config path."""
    lines = [json.dumps({"prompt": "a" * number}) for number in range(1, 8)]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    (folder / "mine.py").write_text(REWARD.format(body=body))
    text = CONFIG.replace("PROMPTS", str(folder / "prompts.jsonl"))
    (folder / "grpo.yml").write_text(text.replace("REWARD", str(folder / "mine.py")))
    return folder / "grpo.yml"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run_files(tmp_path_factory.mktemp("grpo"))


@pytest.fixture(scope="module")
def uninterrupted(config: Path, run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a completed run. Read-only for tests."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    (folder / "output.txt").write_text(run("train", config, f"run.dir={folder}"))
    return folder / "run"


def samples(folder: Path) -> dict[int, list[dict[str, Any]]]:
    lines = map(json.loads, (folder / "samples.jsonl").read_text().splitlines())
    return {line["step"]: line["samples"] for line in lines}


def learned(folder: Path) -> dict[int, dict[str, float]]:
    """Return the metrics of each step that do not depend on the machine."""
    return {
        step: {tag: value for tag, value in found.items() if tag.startswith(("train/", "rollout/"))}
        for step, found in records(folder).items()
    }


def test_run_logs_rollout_metrics_and_samples(uninterrupted: Path) -> None:
    found = learned(uninterrupted)
    for step, each in found.items():
        assert 0 < each["rollout/reward"] < 1.1 and 1 <= each["rollout/tokens"] <= 6
        assert each["rollout/flat_groups"] < 1 and each["train/entropy"] > 0
        # The first step of a rollout has the weights that sampled it.
        assert step % UPDATES == 0 or each["train/clipped"] == 0
    assert abs(found[1]["train/kl"]) < 1e-8 < found[6]["train/kl"]
    assert any(each["train/clipped"] > 0 for each in found.values())
    assert saved_steps(uninterrupted) == [2, 4, 6]
    drawn, output = samples(uninterrupted), (uninterrupted.parent / "output.txt").read_text()
    assert [*drawn] == [2, 4, 6]
    for step, group in drawn.items():
        assert len(group) == GROUP and len({each["prompt"] for each in group}) == 1
        assert all({"prompt", "text", "tokens", "finish_reason", "reward"} == {*g} for g in group)
        assert f"sample after step {step}: {group[0]['prompt']}" in output
        assert f"(reward {group[0]['reward']:g})" in output


@pytest.mark.long
def test_resume_is_bitwise_equal(
    uninterrupted: Path, config: Path, run: Run, tmp_path: Path
) -> None:
    """Includes the reference model, which is not part of any checkpoint."""
    copy = Path(shutil.copytree(uninterrupted, tmp_path / "run"))
    forget_after(copy, 2)
    run("train", config, f"run.dir={tmp_path}")
    assert saved_digest(copy) == saved_digest(uninterrupted)
    assert learned(copy) == learned(uninterrupted) and samples(copy) == samples(uninterrupted)


@pytest.mark.layouts
def test_one_device_matches_sharded_run(
    uninterrupted: Path, config: Path, run: Run, tmp_path: Path
) -> None:
    one = "mesh.cpu_devices=1 mesh.ici_stage=1 mesh.ici_fsdp=1 pipeline.microbatches=1"
    run("train", config, f"run.dir={tmp_path}", *one.split())
    found, wanted = learned(tmp_path / "run"), learned(uninterrupted)
    assert samples(tmp_path / "run") == samples(uninterrupted)
    for step, each in wanted.items():
        for tag, value in each.items():
            np.testing.assert_allclose(found[step][tag], value, rtol=SAME, atol=1e-6, err_msg=tag)


REFUSED = [
    ("grpo.group_size=8", "grpo.group_size was 4 and is 8"),
    ("grpo.updates_per_rollout=1", "grpo.updates_per_rollout was 2 and is 1"),
    ("grpo.reward_file= grpo.reward=arithmetic", "must be an object with a prompt"),
]


@pytest.mark.parametrize(
    ("changes", "words"),
    [REFUSED[0], *(pytest.param(*each, marks=pytest.mark.long) for each in REFUSED[1:])],
)
def test_resume_rejects_incompatible_grpo_settings(
    uninterrupted: Path, config: Path, run: Run, changes: str, words: str
) -> None:
    output = run("train", config, f"run.dir={uninterrupted.parent}", *changes.split(), code=2)
    is_explained(output)
    assert words in output and saved_steps(uninterrupted) == [2, 4, 6]


def test_resume_with_changed_reward_function_is_rejected(
    uninterrupted: Path, run: Run, tmp_path: Path
) -> None:
    shutil.copytree(uninterrupted, tmp_path / "run")
    other = write_run_files(tmp_path, body="record = record | {}")
    forget_after(tmp_path / "run", 2)
    output = run("train", other, f"run.dir={tmp_path}", code=2)
    is_explained(output)
    assert "the reward function was reward of" in output


@pytest.mark.faults
def test_interrupt_during_rollout_discards_rollout(run: Run, start: Start, tmp_path: Path) -> None:
    """Resuming gives the same result as a run that was not stopped."""
    config = write_run_files(tmp_path, body="import time; time.sleep(0.05)")
    process = start("train", config, f"run.dir={tmp_path}")
    wait_for(process, "step 2/6")
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=240)[0]
    assert process.returncode == 130, output
    stopped = ledger(tmp_path / "run", "preempted")[-1]["step"]
    assert stopped in (2, 4) and saved_steps(tmp_path / "run")[-1] == stopped
    run("train", config, f"run.dir={tmp_path}")
    (tmp_path / "again").mkdir()
    run("train", config, f"run.dir={tmp_path / 'again'}")
    assert saved_digest(tmp_path / "again" / "run") == saved_digest(tmp_path / "run")


@pytest.mark.layouts
@pytest.mark.multihost
def test_two_processes_match_one_process(
    uninterrupted: Path, config: Path, start: Start, tmp_path: Path
) -> None:
    """Each process runs the reward function."""
    with start_pair(start, config, f"run.dir={tmp_path}", "mesh.cpu_devices=2") as processes:
        outputs = wait_for_outputs(processes)
    assert [each.returncode for each in processes] == [0, 0], outputs
    assert samples(tmp_path / "run") == samples(uninterrupted)
    assert learned(tmp_path / "run") == learned(uninterrupted)
    assert saved_digest(tmp_path / "run") == saved_digest(uninterrupted)
