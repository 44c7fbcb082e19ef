"""A preference run has the same losses, gradient norms and rewards as TRL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import FAST_COMPILE
from tests.data.conversations import MISTRAL, make_tokenizer, messages_of
from tests.huggingface.test_oracle import (
    job_of,
    oracle_answers,
    reason,
    run_oracle,
    use_fixed_frequencies,
)
from tests.huggingface.test_oracle_sft import VOCAB
from tests.train.runs import records

pytestmark = pytest.mark.oracle

STEPS, PAIRS = 4, 8
BETAS = {"dpo": 0.1, "ipo": 0.3}
LAYOUTS = {
    "dpo": ["mesh.cpu_devices=4", "mesh.ici_stage=2", "mesh.ici_fsdp=2", "pipeline.microbatches=2"],
    "ipo": ["mesh.cpu_devices=1"],
}
REPORTED = ("loss", "grad_norm", "reward_chosen", "reward_rejected")


def pair(number: int) -> dict[str, Any]:
    """Return a preference pair; lengths depend on `number`."""
    chosen = ("Yes, it is. " if number % 2 else "No. ") * (1 + number % 3)
    return {
        "prompt": messages_of(("user", f"Is {number} odd?{' Say more.' * (number % 3)}")),
        "chosen": messages_of(("assistant", chosen.strip())),
        "rejected": messages_of(("assistant", f"{'Perhaps ' * (number % 4)}so")),
    }


def maxpipe(folder: Path, *command: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "maxpipe", *command],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | FAST_COMPILE | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """The folder with a model and pairs, and TRL's metrics `[steps, reported]` by loss."""
    if why := reason("trl"):
        pytest.skip(f"no trl: {why}")
    base = tmp_path_factory.mktemp("preferences")
    job = job_of("llama", 0, base, num_hidden_layers=4, vocab_size=VOCAB)
    use_fixed_frequencies(job["config"])
    run_oracle("make", [{**job, "folder": str(base / "base")}], base)
    make_tokenizer(base / "base", MISTRAL)
    maxpipe(base, "import", "base", "--out", "start")
    lines = [json.dumps(pair(number)) + "\n" for number in range(PAIRS)]
    (base / "pairs.jsonl").write_text("".join(lines))
    shared = {
        **{"folder": str(base / "base"), "pairs": str(base / "pairs.jsonl"), "steps": STEPS},
        "pairs_per_step": PAIRS,
        "optim": {
            **{"learning_rate": 1e-3, "weight_decay": 0.0},
            **{"adam_beta1": 0.9, "adam_beta2": 0.95, "adam_epsilon": 1e-8},
        },
    }
    losses = {"dpo": "sigmoid", "ipo": "ipo"}
    jobs = [{**shared, "loss": losses[name], "beta": beta} for name, beta in BETAS.items()]
    found = oracle_answers("preferences_oracle.py", jobs, base)
    return base, {name: np.array(steps) for name, steps in zip(BETAS, found, strict=True)}


@pytest.mark.parametrize("loss", BETAS)
def test_preference_run_equals_trl(loss: str, wanted: tuple[Path, dict[str, np.ndarray]]) -> None:
    base, theirs = wanted
    command = [
        *("train", "start/config.yml", "train.objective=preference"),
        *("data.source=jsonl", "data.path=pairs.jsonl", "data.chat=pairs", "data.packing=pad"),
        *("data.validation_fraction=0", "eval.batches=0", f"train.steps={STEPS}", "log.every=1"),
        *(f"train.batch_size={PAIRS}", "train.sequence_length=192", f"run.name={loss}"),
        *("optim.learning_rate=1e-3", "optim.schedule=constant", "optim.weight_decay=0"),
        *("optim.clip_norm=0", "model.compute_dtype=float32", "runtime.platform=cpu"),
        *(f"preference.loss={loss}", f"preference.beta={BETAS[loss]}", *LAYOUTS[loss]),
    ]
    maxpipe(base, *command)
    found = records(base / "runs" / loss)
    ours = [[found[1 + step][f"train/{name}"] for name in REPORTED] for step in range(STEPS)]
    columns = slice(None) if loss == "dpo" else slice(2)  # for IPO, TRL 1 reports sums over tokens
    np.testing.assert_allclose(
        np.array(ours)[:, columns], theirs[loss][:, columns], rtol=1e-4, atol=1e-5
    )
    assert theirs[loss][-1, 0] < 0.7 * theirs[loss][0, 0]
