"""Prompts in `transformers`: makes models in folders, encodes prompts and generates tokens.

Usage: prompts_oracle.py JOBS. JOBS is a JSON list. `folder` holds the files of a tokenizer; the
model's config and weights are added. `config_class`, `architecture`, `config` and `seed` describe
the model, `prompts` and `conversations` are encoded, and `found` is the JSON file to write.
`end_at`, if not 0, adds that generated token of the first prompt to the `eos_token_id`s.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]

NEW_TOKENS = 16


def main() -> None:
    transformers.logging.set_verbosity_error()
    for job in json.loads(Path(sys.argv[1]).read_text()):
        Path(job["found"]).write_text(json.dumps(answer(job)))


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """Return the IDs of prompts, and their greedy continuations."""
    folder = Path(job["folder"])
    make(job, folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = [tokenizer(text)["input_ids"] for text in job["prompts"]]
    chats = [
        tokenizer.apply_chat_template(each, add_generation_prompt=True, return_dict=True)
        for each in job["conversations"]
    ]
    chats = [each["input_ids"] for each in chats]
    if job["end_at"]:
        path = folder / "generation_config.json"
        said = json.loads(path.read_text())
        ends = said["eos_token_id"]
        ends = [*(ends if isinstance(ends, list) else [ends])]
        ends.append(generated(folder, texts[0])[job["end_at"]])
        path.write_text(json.dumps(said | {"eos_token_id": ends}))
    return {
        "texts": texts,
        "chats": chats,
        "after_texts": [generated(folder, ids) for ids in texts],
        "after_chats": [generated(folder, ids) for ids in chats],
    }


def make(job: dict[str, Any], folder: Path) -> None:
    """Write weights, config.json and generation_config.json."""
    kept = {each.name: each.read_bytes() for each in folder.iterdir()}
    torch.manual_seed(job["seed"])
    config = getattr(transformers, job["config_class"])(**job["config"])
    model = getattr(transformers, job["architecture"])(config)
    for tensor in model.state_dict().values():
        tensor.normal_(0.0, 0.2)
    model.save_pretrained(folder)
    for name, content in kept.items():
        (folder / name).write_bytes(content)


def generated(folder: Path, ids: list[int]) -> list[int]:
    """Return the tokens that `generate` appends to a prompt."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    given = torch.tensor([ids])
    with torch.no_grad():
        found = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
        )
    return found[0, len(ids) :].tolist()


if __name__ == "__main__":
    main()
