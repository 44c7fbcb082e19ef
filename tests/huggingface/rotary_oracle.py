"""Rotary frequencies in `transformers`. Usage: rotary_oracle.py JOBS ANSWERS.

JOBS is a JSON list of objects with `config`, a config.json, and `lengths`, numbers of tokens.
For each job and length, ANSWERS receives the frequencies and the attention factor.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from transformers.modeling_rope_utils import (  # pyright: ignore[reportMissingImports]
    ROPE_INIT_FUNCTIONS,
)


def main() -> None:
    transformers.logging.set_verbosity_error()
    jobs = json.loads(Path(sys.argv[1]).read_text())
    answers = [[found(job["config"], each) for each in job["lengths"]] for job in jobs]
    Path(sys.argv[2]).write_text(json.dumps(answers))


def found(content: dict[str, Any], length: int) -> dict[str, Any]:
    """Return the frequencies and attention factor for sequences of this length."""
    config = transformers.AutoConfig.for_model(content["model_type"]).__class__.from_dict(content)
    is_by_layers = content["model_type"] in ("gemma3_text", "gemma4_text", "olmo3")
    by_layers = {"layer_type": "full_attention"} if is_by_layers else {}
    said = config.rope_parameters
    said = said["full_attention"] if by_layers else said
    if said["rope_type"] == "default":
        compute = rotary_class(content).compute_default_rope_parameters
        if "gemma4" in content["model_type"]:
            config = config.per_layer_config["full_attention"]
        frequencies, factor = compute(config, **by_layers)
    else:
        compute = ROPE_INIT_FUNCTIONS[said["rope_type"]]
        frequencies, factor = compute(config, torch.device("cpu"), seq_len=length, **by_layers)
    return {"frequencies": frequencies.tolist(), "factor": factor}


def rotary_class(content: dict[str, Any]) -> Any:
    """Return the rotary embedding class of the config's model."""
    name = content["model_type"].removesuffix("_text")
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    names = [each for each in vars(module) if each.endswith("RotaryEmbedding")]
    (rotary,) = (each for each in names if "Vision" not in each)
    return getattr(module, rotary)


if __name__ == "__main__":
    main()
