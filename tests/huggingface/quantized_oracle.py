"""Reference dequantization of transformers and compressed-tensors.

Usage: quantized_oracle.py JOBS ANSWERS. JOBS is a JSON list of objects. `action` is `tensors`,
`folder` or `quantize`. The tensors of `file` are read and the results are written to `out`, a
safetensors file. `folder` is loaded with dequantized weights and saved to `out`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from compressed_tensors.compressors import (  # pyright: ignore[reportMissingImports]
    BaseCompressor,
)
from compressed_tensors.quantization import (  # pyright: ignore[reportMissingImports]
    QuantizationArgs,
    QuantizationScheme,
)
from compressed_tensors.quantization.lifecycle.forward import (  # pyright: ignore[reportMissingImports]
    dequantize,
)
from safetensors.torch import load_file, save_file  # pyright: ignore[reportMissingImports]
from transformers.integrations import finegrained_fp8  # pyright: ignore[reportMissingImports]
from transformers.integrations.mxfp4 import (  # pyright: ignore[reportMissingImports]
    convert_moe_packed_tensors,
)


def main() -> None:
    transformers.logging.set_verbosity_error()
    jobs, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    actions = {"tensors": tensors, "folder": folder, "quantize": quantize}
    for job in jobs:
        actions[job["action"]](job)
    out.write_text(json.dumps([None] * len(jobs)))


def tensors(job: dict[str, Any]) -> None:
    """Dequantize the tensor `x` of a file to bfloat16."""
    stored, found = load_file(job["file"]), {}
    if job["kind"] == "fp8":
        codes, scales = stored["x"], stored["x_scale_inv"]
        # This function derives the block size from the shapes, which is wrong for partial blocks.
        sizes = zip(codes.shape, scales.shape, job["block"], strict=True)
        if all(size == count * block or count == 1 for size, count, block in sizes):
            converter = finegrained_fp8.Fp8Dequantize(None)
            found["transformers"] = converter._dequantize_one(codes, scales, torch.bfloat16)
        found["transformers, any shape"] = finegrained_fp8._dequantize_fp8_weight(
            codes, scales.float(), job["block"], torch.float32
        ).bfloat16()
        args = QuantizationArgs(
            num_bits=8, type="float", strategy="block", block_structure=job["block"]
        )
        found["compressed-tensors"] = dequantize(codes, scales.float(), args=args).bfloat16()
    elif job["kind"] == "fp4":
        codes, scales = stored["x.experts.weight"], stored["x.experts.scale"]
        converter = finegrained_fp8.Fp8Dequantize(None)
        found["transformers"] = converter._dequantize_one(codes, scales, torch.bfloat16)
    elif job["kind"] == "mxfp4":
        found["transformers"] = convert_moe_packed_tensors(stored["x_blocks"], stored["x_scales"])
    else:
        kind, weights = job["kind"], QuantizationArgs(**job["weights"])
        scheme = QuantizationScheme(targets=["Linear"], weights=weights, format=kind)
        names = ("", "_packed", "_scale", "_shape")
        state = {f"weight{end}": stored[f"x{end}"] for end in names if f"x{end}" in stored}
        decompressed = BaseCompressor.get_value_from_registry(kind).decompress(state, scheme)
        found["compressed-tensors"] = decompressed["weight"].bfloat16()
    save_file({name: each.contiguous() for name, each in found.items()}, job["out"])


def folder(job: dict[str, Any]) -> None:
    """Load a folder with dequantized weights, and save it."""
    config = getattr(transformers, job["config_class"])(dequantize=True)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        job["folder"], dtype="bfloat16", quantization_config=config, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["mismatched_keys"], info
    model.save_pretrained(job["out"], save_original_format=False)


def quantize(job: dict[str, Any]) -> None:
    """Quantize the tensors of a file to FP8 with 128 x 128 blocks."""

    class Quantizer:
        quantization_config = transformers.FineGrainedFP8Config()

    converter, found = finegrained_fp8.Fp8Quantize(Quantizer()), {}
    for name, values in load_file(job["file"]).items():
        found |= converter._quantize_one(name, values)
    save_file(found, job["out"])


if __name__ == "__main__":
    main()
