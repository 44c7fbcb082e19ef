"""Preference training in TRL.

Usage: preferences_oracle.py JOBS OUT. JOBS is a JSON list: `folder` is a model folder, `pairs` a
JSON Lines file, `loss` and `beta` are for `DPOConfig`, `steps` and `pairs_per_step` set the length
of the run, and `optim` has the options of AdamW. The result of a job has `loss`, `grad_norm`,
`rewards/chosen` and `rewards/rejected` of every step.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
from datasets import Dataset  # pyright: ignore[reportMissingImports]
from transformers import (  # pyright: ignore[reportMissingImports]
    AutoModelForCausalLM,
    AutoTokenizer,
)
from trl import DPOConfig, DPOTrainer  # pyright: ignore[reportMissingImports]

REPORTED = ("loss", "grad_norm", "rewards/chosen", "rewards/rejected")


def trained(job: dict[str, Any]) -> list[list[float]]:
    lines = Path(job["pairs"]).read_text(encoding="utf-8").splitlines()
    tokenizer = AutoTokenizer.from_pretrained(job["folder"])
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    with tempfile.TemporaryDirectory() as out:
        config = DPOConfig(
            output_dir=out,
            loss_type=job["loss"],
            beta=job["beta"],
            max_steps=job["steps"],
            per_device_train_batch_size=job["pairs_per_step"],
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            **job["optim"],
        )
        trainer = DPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(job["folder"], dtype=torch.float32),
            args=config,
            train_dataset=Dataset.from_list([json.loads(line) for line in lines]),
            processing_class=tokenizer,
        )
        trainer.train()
    steps = [each for each in trainer.state.log_history if "loss" in each]
    return [[step[name] for name in REPORTED] for step in steps]


def main() -> None:
    jobs = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps([trained(job) for job in jobs]))


main()
