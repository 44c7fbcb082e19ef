"""Runs in an environment with transformers: makes folders, and logits of folders.

Usage: oracle.py make JOBS | oracle.py logits JOBS. JOBS is a JSON list; of each entry `folder` is
the Hugging Face folder, `tokens` the file with ids `[rows, tokens]`, `logits` the file to write.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]

# Kernels ask for sizes that are multiples of others.
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}


def main() -> None:
    action, jobs = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
    transformers.logging.set_verbosity_error()
    for job in jobs:
        if action == "make":
            made(job).save_pretrained(job["folder"], max_shard_size=job["max_shard_size"])
        # Also of what was made: where that was not float32 its buffers have been rounded.
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            job["folder"], dtype=torch.float32, output_loading_info=True, **EAGER
        )
        assert not any(info.values()), info
        tokens = torch.from_numpy(np.load(job["tokens"]))
        with torch.no_grad():
            np.save(job["logits"], model.eval()(tokens).logits.numpy())


def made(job: dict[str, Any]) -> Any:
    """A model with weights, norms included, that are drawn by the job's seed."""
    torch.manual_seed(job["seed"])
    config = getattr(transformers, job["config_class"])(**job["config"])
    for name, value in EAGER.items():
        setattr(config, f"_{name}", value)
    model = getattr(transformers, job["architecture"])(config)
    for tensor in model.state_dict().values():  # with buffers that are saved
        tensor.normal_(0.0, 0.2)
    return model.to(getattr(torch, job["dtype"]))


if __name__ == "__main__":
    main()
