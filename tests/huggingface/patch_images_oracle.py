"""Models with images of different sizes in transformers: Gemma 4, Qwen3.5 and Qwen3-VL.

Usage: patch_images_oracle.py JOBS OUT. JOBS is a JSON list: `class` is the name of the model class,
`config` is the content of a config.json, `seed` draws the weights, and `folder` is the folder to
write. If `arrays` is set, it names a file with `tokens`, `mask` and images `image_0`, `image_1` and
so on, which have the sizes that the model processes. The logits, positions, features and greedy
tokens after the first `prompts` tokens are written to the file `results`, the gradients to the
folder `gradients`, and the weights after some steps of AdamW (`optim`) to the folder `trained`. A
job with `messages` and `files` writes the tokens and the images of the processor to the file
`processed`.
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
    for name, tensor in model.state_dict().items():
        # Scalars far below 1 would shrink the residual stream below the epsilon of the norms.
        tensor.normal_(1.0 if name.endswith("layer_scalar") else 0.0, 0.2)
        if name.endswith(("_min", "_max")):  # limits of clipped matmuls
            sign = -1 if name.endswith("_min") else 1
            tensor.copy_(sign * (tensor.abs() + 0.05))
    model.save_pretrained(job["folder"])


def load(job: dict[str, Any]) -> Any:
    model, info = getattr(transformers, job["class"]).from_pretrained(
        job["folder"],
        dtype=torch.float32,
        output_loading_info=True,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    assert not any(info.values()), info
    return model


def image_inputs(model: Any, images: list[np.ndarray]) -> dict[str, Any]:
    """Return the model's arrays of images, which have the sizes that the model processes."""
    vision = model.config.vision_config
    if model.config.model_type == "gemma4":
        processor = transformers.Gemma4ImageProcessorPil(
            do_resize=False,
            patch_size=vision.patch_size,
            pooling_kernel_size=vision.pooling_kernel_size,
            max_soft_tokens=model.config.vision_soft_tokens_per_image,
        )
    else:
        processor = transformers.Qwen2VLImageProcessorPil(
            do_resize=False,
            patch_size=vision.patch_size,
            merge_size=vision.spatial_merge_size,
            **HALF,
        )
    arrays = processor(images, return_tensors="pt")
    arrays.pop("num_soft_tokens_per_image", None)
    return dict(arrays)


def run(job: dict[str, Any]) -> float:
    model = load(job)
    arrays = np.load(job["arrays"])
    tokens, mask = (torch.from_numpy(arrays[name]) for name in ("tokens", "mask"))
    images = [arrays[f"image_{number}"] for number in range(len(arrays.files) - 2)]
    pixels = image_inputs(model, images)
    is_image = (tokens == model.config.image_token_id).int()
    results: dict[str, Any] = {}
    features = model.model.get_image_features(**pixels, return_dict=True)
    parts = [features.pooler_output, *getattr(features, "deepstack_features", ())]
    joined = torch.cat([torch.cat(tuple(part)) for part in parts], -1)
    results["features"] = joined.detach().numpy()
    if hasattr(model.model, "get_rope_index"):
        positions, _ = model.model.get_rope_index(
            tokens, mm_token_type_ids=is_image, image_grid_thw=pixels["image_grid_thw"]
        )
        results["positions"] = positions.numpy()

    def compute() -> tuple[Any, Any]:
        logits = model(input_ids=tokens, mm_token_type_ids=is_image, **pixels).logits
        losses = torch.nn.functional.cross_entropy(
            logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none"
        )
        return (losses * mask).sum() / mask.sum(), logits

    loss, logits = compute()
    results["logits"] = logits.detach().numpy()
    if "gradients" in job:
        results["greedy"] = greedy(model, job, tokens, images)
        train(model, job, compute)
        model = load(job)
        loss, _ = compute()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(0 * parameter if parameter.grad is None else parameter.grad)
        model.save_pretrained(job["gradients"])
    np.savez(job["results"], **results)
    return float(loss.detach())


def greedy(model: Any, job: dict[str, Any], tokens: Any, images: list[np.ndarray]) -> np.ndarray:
    """Return the greedy continuation of the beginning of each sequence."""
    used, found = 0, []
    for row, length in zip(tokens, job["prompts"], strict=True):
        ids = row[None, :length]
        begins = int(((ids[:, 1:] == model.config.image_token_id).int().diff() == 1).sum())
        pixels = image_inputs(model, images[used : used + begins])
        used += begins
        with torch.no_grad():
            for _ in range(job["count"]):
                is_image = (ids == model.config.image_token_id).int()
                made = model(input_ids=ids, mm_token_type_ids=is_image, **pixels, use_cache=False)
                ids = torch.cat([ids, made.logits[:, -1].argmax(-1, keepdim=True)], 1)
        found.append(ids[0, length:].numpy())
    return np.stack(found)


def train(model: Any, job: dict[str, Any], compute: Any) -> None:
    """Train on the same batch in every step. Vectors have no weight decay."""
    optim = job["optim"]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": optim["decay"]},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=optim["rate"], betas=tuple(optim["betas"]), eps=optim["epsilon"]
    )
    for _ in range(optim["steps"]):
        optimizer.zero_grad()
        compute()[0].backward()
        optimizer.step()
    model.save_pretrained(job["trained"])


def process(job: dict[str, Any]) -> None:
    """Save the tokens and images of a conversation."""
    roles = job.get("roles", {})
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        job["tokenizer"], extra_special_tokens=roles
    )
    template = {"chat_template": tokenizer.chat_template}
    if roles:
        processor = transformers.Gemma4Processor(
            transformers.Gemma4AudioFeatureExtractor(),
            transformers.Gemma4ImageProcessorPil(**job["sizes"]),
            tokenizer,
            transformers.Gemma4VideoProcessor(),
            **template,
        )
    else:
        processor = transformers.Qwen3VLProcessor(
            transformers.Qwen2VLImageProcessorPil(**job["sizes"], **HALF),
            tokenizer,
            transformers.Qwen3VLVideoProcessor(),
            **template,
        )
    text = processor.apply_chat_template(job["messages"], tokenize=False)
    found = processor(
        text=[text],
        images=[[Image.open(path) for path in job["files"]]],
        return_tensors="np",
        add_special_tokens=False,
        padding=False,
    )
    del found["attention_mask"]
    arrays: dict[str, Any] = {name: np.asarray(array) for name, array in found.items()}
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
