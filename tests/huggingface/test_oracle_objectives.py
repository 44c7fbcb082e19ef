"""Each objective trains a folder of transformers and exports one that transformers loads."""

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
from tests.data.conversations import CHATML, make_tokenizer
from tests.huggingface.test_oracle import job_of, reason, run_oracle, use_fixed_frequencies
from tests.huggingface.test_oracle_runs import close
from tests.huggingface.test_oracle_sft import VOCAB, logits

pytestmark = pytest.mark.oracle

PAIRS = [
    {"prompt": f"Is {n} odd?", "chosen": " Yes" if n % 2 else " No", "rejected": " Perhaps"}
    for n in range(40)
]
PROMPTS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(9)]
TEXTS = [{"text": f"The number {n} comes before {n + 1}. " * 2} for n in range(40)]
OBJECTIVES: dict[str, tuple[list[dict[str, Any]], list[str]]] = {
    "preference": (PAIRS, ["data.chat=pairs", "data.packing=best_fit"]),
    "distill": (TEXTS, ["distill.teacher=hf:base", "distill.top_k=8", "distill.temperature=2"]),
    "grpo": (
        PROMPTS,
        [
            "grpo.prompts=records.jsonl",
            "grpo.group_size=4",
            "grpo.max_tokens=4",
            "grpo.kl_coef=0.1",
        ],
    ),
    "pretrain": (TEXTS, ["adapter.rank=4"]),
}


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_import_train_export_loads_in_transformers(objective: str, tmp_path: Path) -> None:
    if why := reason():
        pytest.skip(f"no transformers: {why}")
    records, keys = OBJECTIVES[objective]
    np.save(tmp_path / "tokens.npy", np.random.default_rng(0).integers(0, VOCAB, (2, 23)))
    job = job_of("llama", 0, tmp_path, num_hidden_layers=4, vocab_size=VOCAB)
    use_fixed_frequencies(job["config"])
    run_oracle("make", [{**job, "folder": str(tmp_path / "base")}], tmp_path)
    make_tokenizer(tmp_path / "base", CHATML)
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    if objective != "grpo":
        keys = [*keys, "data.source=jsonl", "data.path=records.jsonl", "eval.batches=1"]
    keys = [
        *(f"train.objective={objective}", "train.steps=3", "train.batch_size=8"),
        *("train.sequence_length=48", "optim.learning_rate=1e-2", "run.name=tuned"),
        *("mesh.cpu_devices=4", "mesh.ici_stage=2", "mesh.ici_fsdp=2", "pipeline.microbatches=2"),
        *("model.compute_dtype=float32", "runtime.platform=cpu", *keys),
    ]
    for command in (
        ["import", "base", "--out", "runs/base"],
        ["train", "runs/base/config.yml", *keys],
        ["export", "tuned", "out"],
    ):
        ran = subprocess.run(
            [sys.executable, "-m", "maxpipe", *command],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=os.environ | FAST_COMPILE | {"PYTHONPATH": str(Path(__file__).parents[2])},
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
    tokens = np.load(tmp_path / "tokens.npy")
    files = {"tokens": "tokens.npy", "logits": "loaded.npy", "folder": "out"}
    run_oracle("logits", [{key: str(tmp_path / name) for key, name in files.items()}], tmp_path)
    loaded = np.load(tmp_path / "loaded.npy")
    # With adapters, the export is the merged model.
    ours = "out" if "adapter.rank=4" in keys else "runs/tuned"
    found, before = (logits(tmp_path, each, tokens) for each in (ours, "base"))
    close(loaded, found)
    assert np.abs(found - before).max() > 1e-3 * np.abs(before).max()
