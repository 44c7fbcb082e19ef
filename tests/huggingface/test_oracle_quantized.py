"""Quantized weights are dequantized as in transformers and compressed-tensors."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from maxpipe.cli import main
from maxpipe.errors import ConfigError
from maxpipe.huggingface.dequantize import dequantized
from maxpipe.huggingface.folder import open_folder
from maxpipe.huggingface.quantization import parse_quantization
from maxpipe.huggingface.safetensors import SafetensorsReader
from tests.huggingface import maker, quantized
from tests.huggingface.test_oracle import PYTHON, oracle_answers, reason

pytestmark = pytest.mark.oracle

BF16 = np.dtype(ml_dtypes.bfloat16)

GROUP = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
CHANNEL = {"num_bits": 4, "type": "int", "strategy": "channel"}
FLOAT = {"num_bits": 8, "type": "float", "strategy": "channel"}

SHAPES = ((128, 128), (256, 384), (1, 1), (127, 129), (129, 127), (300, 5), (576, 640))
TENSORS: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
    *(("fp8", shape, {"dtype": dtype}) for shape in SHAPES for dtype in (np.float32, BF16)),
    ("fp8", (100, 70), {"block": (32, 64)}),
    *(("fp4", (rows, 32 * count), {}) for rows, count in ((1, 1), (5, 2), (7, 9))),
    *(("mxfp4", (experts, 32 * count, 5), {}) for experts, count in ((1, 1), (3, 2), (2, 7))),
    *(
        ("pack-quantized", (7, 32 * count), {"group": 32, "dtype": dtype})
        for count in (1, 2, 5)
        for dtype in (BF16, np.float16, np.float32)
    ),
    *(("pack-quantized", (3, columns), {"group": 0}) for columns in (1, 7, 8, 9, 61)),
    *(("float-quantized", (5, 67), {"dtype": dtype}) for dtype in (BF16, np.float32)),
]


def _made(
    kind: str, shape: tuple[int, ...], more: dict[str, Any]
) -> tuple[maker.Tensors, dict[str, Any], dict[str, Any]]:
    """Return the tensors, their `quantization_config` and a job for the oracle."""
    if kind == "fp8":
        block = [*more.get("block", (128, 128))]
        tensors, _ = quantized.fp8("x", shape, **more)
        return tensors, {**quantized.FP8, "weight_block_size": block}, {"block": block}
    if kind == "fp4":
        tensors, _ = quantized.deepseek_v4("x.experts.weight", shape)
        return tensors, {**quantized.FP8, "expert_dtype": "fp4"}, {}
    if kind == "mxfp4":
        return quantized.mxfp4("x", shape)[0], {"quant_method": "mxfp4"}, {}
    if kind == "pack-quantized":
        weights = GROUP if more["group"] else CHANNEL
        tensors, _ = quantized.int4("x", shape, **more)
    else:
        weights = FLOAT
        tensors, _ = quantized.fp8("x", shape, (1, shape[1]), suffix="_scale", **more)
    return tensors, quantized.compressed(kind, [], **weights), {"weights": weights}


def test_tensors_are_dequantized_bit_for_bit(tmp_path: Path) -> None:
    if why := reason("compressed_tensors"):
        pytest.skip(f"no compressed-tensors in {PYTHON}: {why}")
    jobs, found = [], []
    for number, (kind, shape, more) in enumerate(TENSORS):
        tensors, config, job = _made(kind, shape, more)
        file = tmp_path / f"{number}.safetensors"
        file.write_bytes(maker.encoded(tensors))
        out = str(tmp_path / f"{number}-out.safetensors")
        jobs.append({"action": "tensors", "kind": kind, "file": str(file), "out": out, **job})
        reader = SafetensorsReader(file)
        family = {"model_type": "deepseek_v4"} if kind == "fp4" else {}
        quantization = parse_quantization({"quantization_config": config, **family}, "bfloat16")
        assert quantization is not None
        readers = dequantized(tmp_path, dict.fromkeys(reader.entries, reader), quantization)
        ((name, tensor),) = readers.items()
        assert name == ("x.experts.weight" if kind == "fp4" else "x")
        values = tensor.read(name)
        found.append(values.swapaxes(1, 2) if kind == "mxfp4" else values)
    oracle_answers("quantized_oracle.py", jobs, tmp_path)
    for number, values in enumerate(found):
        answers = SafetensorsReader(tmp_path / f"{number}-out.safetensors")
        for name in answers.entries:
            wanted = answers.read(name)
            assert wanted.shape == values.shape and wanted.tobytes() == values.tobytes(), (
                name,
                TENSORS[number],
            )


WHOLE = {
    **{"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 64},
}
FOLDERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt-oss": ("gpt-oss", "Mxfp4Config", {}),
    "qwen3": ("qwen3", "FineGrainedFP8Config", WHOLE),
    "kimi": ("kimi", "CompressedTensorsConfig", {"model_type": "deepseek_v3"}),
}
"""Case, class of the config that dequantizes the weights, and changes to config.json."""


@pytest.fixture(scope="module")
def dequantized_folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if why := reason("compressed_tensors"):
        pytest.skip(f"no compressed-tensors in {PYTHON}: {why}")
    base, jobs = tmp_path_factory.mktemp("folders"), []
    for name, (case, kind, changes) in FOLDERS.items():
        made = quantized.write(base / name, case, **changes)
        job = {"action": "folder", "folder": str(made.quantized), "config_class": kind}
        jobs.append({**job, "out": str(base / name / "NEW")})
    oracle_answers("quantized_oracle.py", jobs, base)
    return base


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_are_dequantized_bit_for_bit(name: str, dequantized_folders: Path) -> None:
    base = dequantized_folders / name
    assert "quantization_config" not in json.loads((base / "NEW" / "config.json").read_text())
    source, wanted = open_folder(str(base / "quantized")), open_folder(str(base / "NEW"))
    assert source.mapping.shapes == wanted.mapping.shapes
    for param, shape in source.mapping.shapes.items():
        whole = [slice(None)] * len(shape)
        found, theirs = (each.read_region(param, BF16, whole) for each in (source, wanted))
        assert found.tobytes() == theirs.tobytes(), param


def test_suggested_command_dequantizes_other_folders(dequantized_folders: Path) -> None:
    """Two config groups, which maxpipe does not read, although the second one matches nothing."""
    base = dequantized_folders / "kimi"
    folder, path = base / "DIR", base / "quantized" / "config.json"
    shutil.copytree(base / "quantized", folder)
    content = json.loads(path.read_text())
    groups = content["quantization_config"]["config_groups"]
    groups["group_1"] = {**groups["group_0"], "targets": ["re:none"]}
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="exactly one group") as caught:
        open_folder(str(folder))
    (code,) = re.findall(r"python -c '(.*)'", str(caught.value))
    code = code.replace("NEW", "OTHER")
    run = subprocess.run(
        [PYTHON, "-c", code], cwd=base, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    maker.same_bits(maker.read(base / "OTHER"), maker.read(base / "NEW"))


def test_fp8_export_equals_quantization_of_transformers(tmp_path: Path) -> None:
    if why := reason("compressed_tensors"):
        pytest.skip(f"no compressed-tensors in {PYTHON}: {why}")
    made = quantized.write(tmp_path / "x", "qwen3", **WHOLE)
    assert main(["import", str(made.dequantized), "--out", str(tmp_path / "ckpt")]) == 0
    out = tmp_path / "out"
    assert main(["export", str(tmp_path / "ckpt"), str(out), "--quantize=fp8"]) == 0
    found = maker.read(out)
    matrices = {name: made.plain[name] for name in found if f"{name}_scale_inv" in found}
    file, answers = tmp_path / "plain.safetensors", tmp_path / "answers.safetensors"
    file.write_bytes(maker.encoded(matrices))
    job = {"action": "quantize", "file": str(file), "out": str(answers)}
    load = {"action": "folder", "folder": str(out), "config_class": "FineGrainedFP8Config"}
    jobs = [job, {**load, "out": str(tmp_path / "loaded")}]
    oracle_answers("quantized_oracle.py", jobs, tmp_path)
    wanted = SafetensorsReader(answers)
    names = {*matrices, *(f"{name}_scale_inv" for name in matrices)}
    assert len(matrices) == 14 and wanted.entries.keys() == names
    for name in names:
        assert found[name].tobytes() == wanted.read(name).tobytes(), name
    # transformers loads the exported folder, with the dequantized values of an import.
    source, theirs = open_folder(str(out)), open_folder(str(tmp_path / "loaded"))
    for param, shape in source.mapping.shapes.items():
        whole = [slice(None)] * len(shape)
        mine, other = (each.read_region(param, BF16, whole) for each in (source, theirs))
        assert mine.tobytes() == other.tobytes(), param
