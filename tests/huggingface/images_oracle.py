"""Gemma 3 with images in transformers.

Usage: images_oracle.py JOBS OUT. JOBS is a JSON list: `config` is the content of a config.json,
`seed` draws the weights, and `folder` is the folder to write. If `arrays` is set, it names a file
with `tokens`, `images` and `mask`, and the logits, the loss and the gradients are written to the
files `logits` and the folder `gradients`. A job with `logits` only reads `folder`. A job with
`messages` and `files` writes the tokens and the pixels of the processor to the file `processed`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from PIL import Image
from transformers import (  # pyright: ignore[reportMissingImports]
    AutoTokenizer,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessorPil,
    Gemma3Processor,
)

ROLES = {
    "boi_token": "<start_of_image>",
    "image_token": "<image_soft_token>",
    "eoi_token": "<end_of_image>",
}


def make(job: dict[str, Any]) -> None:
    torch.manual_seed(job["seed"])
    model = Gemma3ForConditionalGeneration(Gemma3Config(**job["config"]))
    for tensor in model.state_dict().values():
        tensor.normal_(0.0, 0.2)
    model.save_pretrained(job["folder"])


def run(job: dict[str, Any]) -> float:
    model, info = Gemma3ForConditionalGeneration.from_pretrained(
        job["folder"],
        dtype=torch.float32,
        output_loading_info=True,
        attn_implementation="eager",
    )
    assert not any(info.values()), info
    arrays = np.load(job["arrays"])
    tokens = torch.from_numpy(arrays["tokens"])
    size = arrays["images"].shape[1]
    # The image processor rescales and normalizes; images already have the right size.
    processor = Gemma3ImageProcessorPil(size={"height": size, "width": size})
    pixels = processor(list(arrays["images"]), return_tensors="pt")["pixel_values"]
    is_image = (tokens == model.config.image_token_id).long()
    logits = model(input_ids=tokens, pixel_values=pixels, token_type_ids=is_image).logits
    np.save(job["logits"], logits.detach().numpy())
    mask = torch.from_numpy(arrays["mask"])
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none"
    )
    loss = (losses * mask).sum() / mask.sum()
    loss.backward()
    if "gradients" in job:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.grad)
        model.save_pretrained(job["gradients"])
    return float(loss.detach())


def process(job: dict[str, Any]) -> None:
    """Save the tokens and pixels of a conversation."""
    tokenizer = AutoTokenizer.from_pretrained(job["tokenizer"], extra_special_tokens=ROLES)
    size = {"height": job["size"], "width": job["size"]}
    images = Gemma3ImageProcessorPil(size=size)
    processor = Gemma3Processor(
        images,
        tokenizer,
        chat_template=tokenizer.chat_template,
        image_seq_length=job["num_tokens"],
    )
    text = processor.apply_chat_template(job["messages"], tokenize=False)
    found = processor(
        text=[text],
        images=[[Image.open(path) for path in job["files"]]],
        return_tensors="np",
        add_special_tokens=False,
    )
    names = ("input_ids", "pixel_values", "token_type_ids")
    arrays: dict[str, Any] = {name: np.asarray(found[name]) for name in names}
    np.savez(job["processed"], **arrays)


def main() -> None:
    jobs, found = json.loads(Path(sys.argv[1]).read_text()), []
    for job in jobs:
        if "seed" in job:
            make(job)
        if "messages" in job:
            process(job)
        found.append(run(job) if "arrays" in job else None)
    Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
