"""Qwen3.5 and Qwen3-VL with images in transformers.

Usage: qwen_images_oracle.py JOBS OUT. JOBS is a JSON list: `class` is the name of the model class,
`config` is the content of a config.json, `seed` draws the weights, and `folder` is the folder to
write. If `arrays` is set, it names a file with `tokens`, `mask` and images `image_0`, `image_1` and
so on, which have the sizes that the model processes. The logits, positions and features are
written to the file `results`, and the gradients to the folder `gradients`. A job with `messages`
and `files` writes the tokens, the pixels and the grids of the processor to the file `processed`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from PIL import Image

HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}


def make(job: dict[str, Any]) -> None:
    torch.manual_seed(job["seed"])
    kind = getattr(transformers, job["class"])
    model = kind(kind.config_class(**job["config"]))
    for tensor in model.state_dict().values():
        tensor.normal_(0.0, 0.2)
    model.save_pretrained(job["folder"])


def run(job: dict[str, Any]) -> float:
    model, info = getattr(transformers, job["class"]).from_pretrained(
        job["folder"],
        dtype=torch.float32,
        output_loading_info=True,
        attn_implementation="eager",
    )
    assert not any(info.values()), info
    arrays = np.load(job["arrays"])
    tokens = torch.from_numpy(arrays["tokens"])
    images = [arrays[f"image_{number}"] for number in range(len(arrays.files) - 2)]
    vision = model.config.vision_config
    processor = transformers.Qwen2VLImageProcessorPil(
        do_resize=False,
        patch_size=vision.patch_size,
        merge_size=vision.spatial_merge_size,
        **HALF,
    )
    pixels = processor(images, return_tensors="pt")
    is_image = (tokens == model.config.image_token_id).int()
    features = model.model.get_image_features(**pixels, return_dict=True)
    parts = [features.pooler_output, *getattr(features, "deepstack_features", ())]
    joined = torch.cat([torch.cat(tuple(part)) for part in parts], -1)
    positions, _ = model.model.get_rope_index(
        tokens, mm_token_type_ids=is_image, image_grid_thw=pixels["image_grid_thw"]
    )
    logits = model(input_ids=tokens, mm_token_type_ids=is_image, **pixels).logits
    np.savez(
        job["results"],
        logits=logits.detach().numpy(),
        positions=positions.numpy(),
        features=joined.detach().numpy(),
        pixels=pixels["pixel_values"].numpy(),
    )
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
    """Save the tokens, pixels and positions of a conversation."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(job["tokenizer"])
    sizes = {"size": job["size"], "patch_size": job["patch_size"], "merge_size": job["merge_size"]}
    processor = transformers.Qwen3VLProcessor(
        transformers.Qwen2VLImageProcessorPil(**sizes, **HALF),
        tokenizer,
        transformers.Qwen3VLVideoProcessor(),
        chat_template=tokenizer.chat_template,
    )
    text = processor.apply_chat_template(job["messages"], tokenize=False)
    found = processor(
        text=[text],
        images=[[Image.open(path) for path in job["files"]]],
        return_tensors="np",
        add_special_tokens=False,
    )
    names = ("input_ids", "pixel_values", "image_grid_thw", "mm_token_type_ids")
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
