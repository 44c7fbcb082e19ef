"""Folders with quantized weights: values, sharded reads, errors and commands."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from maxpipe.cli import main
from maxpipe.distributed import runtime
from maxpipe.errors import Code, ConfigError
from maxpipe.huggingface import dequantize
from maxpipe.huggingface.config_json import read_description
from maxpipe.huggingface.folder import open_folder
from maxpipe.huggingface.mapping import map_tensors
from maxpipe.huggingface.quantization import parse_quantization
from maxpipe.huggingface.quantize import BlockScales
from maxpipe.huggingface.safetensors import SafetensorsReader
from maxpipe.models.registry import describe
from tests.huggingface import maker, quantized

BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], quantized.Folders]:
    @cache
    def folders_of(name: str) -> quantized.Folders:
        return quantized.write(tmp_path_factory.mktemp("quantized") / "x", name)

    return folders_of


def bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


@pytest.mark.parametrize("name", quantized.CASES)
def test_import_equals_import_of_dequantized_folder(
    name: str, folders, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = folders(name)
    for kind in ("quantized", "dequantized"):
        folder = getattr(made, kind)
        assert main(["import", str(folder), "--out", str(tmp_path / f"{kind}-ckpt")]) == 0
        assert main(["export", str(tmp_path / f"{kind}-ckpt"), str(tmp_path / kind)]) == 0
    assert ("(dequantized from " in capsys.readouterr().out) and len(made.tensors) > len(made.plain)
    exported = maker.read(tmp_path / "quantized")
    maker.same_bits(exported, made.plain)
    maker.same_bits(exported, maker.read(tmp_path / "dequantized"))
    texts = [
        (tmp_path / f"{kind}/config.json").read_text() for kind in ("quantized", "dequantized")
    ]
    assert texts[0] == texts[1] and "quantization_config" not in texts[0]


@pytest.mark.parametrize("name", quantized.CASES)
def test_every_part_equals_the_same_part_of_the_whole(
    name: str, folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = folders(name)
    source, plain = open_folder(str(made.quantized)), open_folder(str(made.dequantized))
    draw = np.random.default_rng(3)
    monkeypatch.setattr(dequantize, "_CHUNK", 700)  # several chunks for each read
    for param, shape in plain.mapping.shapes.items():
        whole = plain.read_region(param, plain.stored_dtype(param), [slice(None)] * len(shape))
        dtype = whole.dtype
        for number in range(4):
            ends = [sorted(draw.choice(size + 1, 2, replace=False)) for size in shape]
            part = tuple(slice(int(a), int(b)) for a, b in ends)
            part = part if number else (slice(None),) * len(shape)
            assert (bits(source.read_region(param, dtype, part)) == bits(whole[part])).all()
            same = plain.read_region(param, dtype, part)  # columns of plain tensors
            assert (bits(same) == bits(whole[part])).all()


def test_device_reads_only_its_codes_and_scales(folders, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_folder(str(folders("deepseek").quantized))
    sizes: dict[str, int] = {}
    read = SafetensorsReader.read

    def counted(self: SafetensorsReader, name: str, *given: Any, **named: Any) -> np.ndarray:
        values = read(self, name, *given, **named)
        sizes[name] = sizes.get(name, 0) + values.size
        return values

    monkeypatch.setattr(SafetensorsReader, "read", counted)
    name = "model.layers.1.self_attn.q_b_proj.weight"  # [140, 130], with 2 x 2 scales
    part = (slice(0, 1), slice(0, 128), slice(1, 2), slice(0, 70))
    found = source.read_region("layers.experts.attention.query_up", BF16, part)
    assert found.shape == (1, 128, 1, 70)
    assert sizes == {name: 70 * 128, f"{name}_scale_inv": 2}
    sizes.clear()
    source.read_region(
        "layers.experts.attention.query_up", BF16, (*part[:1], slice(128, 130), *part[2:])
    )
    assert sizes == {name: 140, f"{name}_scale_inv": 2}


def test_blocks_of_stacked_matrices_begin_in_each_matrix(tmp_path: Path) -> None:
    """Rows of all experts are numbered together, but no block extends over two experts."""
    parts = [quantized.fp8(f"{number}", (130, 140)) for number in range(3)]
    tensors = {
        name: np.stack([tensors[f"{number}{end}"] for number, (tensors, _) in enumerate(parts)])
        for name, end in (("x", ""), ("x_scale_inv", "_scale_inv"))
    }
    whole = np.stack([values for _, values in parts]).reshape(390, 140)
    file = tmp_path / "x.safetensors"
    file.write_bytes(maker.encoded(tensors))
    reader = SafetensorsReader(file)
    quantization = parse_quantization({"quantization_config": quantized.FP8}, "bfloat16")
    assert quantization is not None
    found = dequantize.dequantized(tmp_path, dict.fromkeys(tensors, reader), quantization)["x"]
    assert found.entries["x"].shape == (3, 130, 140)
    for first, end in ((0, 390), (127, 131), (129, 259), (257, 390), (260, 261)):
        part = found.read("x", (first, end), (140,), (3, 135))
        assert (bits(part) == bits(whole[first:end, 3:135])).all()


@pytest.mark.parametrize("name", ["deepseek", "qwen3", "gpt-oss", "kimi"])
def test_eval_and_generate_equal_those_of_dequantized_folder(
    name: str,
    folders,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Use the devices of the test process.
    monkeypatch.setattr(runtime, "start", lambda *_, **__: None)
    made = folders(name)
    (tmp_path / "text.txt").write_text("The cat sat on the mat.")
    bytes_ = ["tokenizer.kind=bytes", "tokenizer.path="]
    prompt = ["--prompt", "ab", "--temperature", "0", "--max-tokens", "4", "--json", *bytes_]
    data = ["--data", str(tmp_path), "--json", "train.sequence_length=32", *bytes_]
    layout = ["mesh.ici_fsdp=2", "mesh.ici_data=4"]
    found = []
    for folder in (made.quantized, made.dequantized):
        answers = []
        for command in (["generate", f"hf:{folder}", *prompt], ["eval", str(folder), *data]):
            capsys.readouterr()
            assert main([*command, *layout]) == 0
            answers.append(json.loads(capsys.readouterr().out))
        generated, evaluated = answers
        found.append(
            [
                generated["tokens"],
                generated["text"],
                evaluated["nats_per_token"],
                evaluated["tokens"],
            ]
        )
    assert found[0] == found[1] and found[0][3] > 20


def _matrices(tensors: maker.Tensors) -> set[str]:
    """Return the names of the matrices that an FP8 export quantizes."""
    plain = ("embed_tokens", "head", "mlp.gate.", "eh_proj", "norm")
    names = {name for name, array in tensors.items() if array.ndim == 2}
    return {name for name in names if not any(each in name for each in plain)}


def _dequantized(tensors: maker.Tensors, name: str) -> np.ndarray:
    codes, scales = tensors[name], tensors[f"{name}_scale_inv"]
    spread = np.kron(scales, np.ones((128, 128), np.float32))
    return codes.astype(np.float32) * spread[: codes.shape[0], : codes.shape[1]]


@pytest.mark.parametrize("name", ["deepseek", "qwen3"])
def test_fp8_export_is_imported_with_its_dequantized_values(
    name: str, folders, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = folders(name)
    plain = {key: array.copy() for key, array in made.plain.items()}
    matrices = _matrices(plain)
    first, second = sorted(matrices)[:2]
    plain[first][:] = 0
    plain[second][:] = np.float32(1e-38)  # too small for a reciprocal scale
    config = {key: each for key, each in made.config.items() if key != "quantization_config"}
    folder = maker.write(tmp_path / "hf", config, plain)
    assert main(["import", str(folder), "--out", str(tmp_path / "ckpt")]) == 0
    out = tmp_path / "fp8"
    assert main(["export", str(tmp_path / "ckpt"), str(out), "--quantize", "fp8"]) == 0
    assert "of weights in FP8 and bfloat16" in capsys.readouterr().out

    found = maker.read(out)
    assert found.keys() == plain.keys() | {f"{matrix}_scale_inv" for matrix in matrices}
    wanted = {key: array for key, array in plain.items() if key not in matrices}
    maker.same_bits({key: found[key] for key in wanted}, wanted)
    for matrix in matrices:
        values, before = _dequantized(found, matrix), plain[matrix].astype(np.float32)
        assert found[matrix].dtype == maker.CODES["F8_E4M3"]
        blocks = np.kron(found[f"{matrix}_scale_inv"], np.ones((128, 128), np.float32))
        blocks = blocks[: before.shape[0], : before.shape[1]]
        error = np.abs(values - before)
        assert (error <= np.maximum(np.abs(before) / 16, blocks * 2**-10) * 1.001).all()
        wanted[matrix] = values.astype(BF16)
    said = json.loads((out / "config.json").read_text())["quantization_config"]
    assert said["weight_block_size"] == [128, 128] and "lm_head" in said["modules_to_not_convert"]

    assert main(["import", str(out), "--out", str(tmp_path / "again")]) == 0
    assert main(["export", str(tmp_path / "again"), str(tmp_path / "plain")]) == 0
    maker.same_bits(maker.read(tmp_path / "plain"), wanted)


@pytest.mark.parametrize(
    ("name", "more", "reason"),
    [
        ("gpt-oss", [], "mlp.experts.gate_up_proj contains the matrices of all experts"),
        ("qwen3", ["--adapter"], "cannot be combined with --adapter"),
    ],
)
def test_unsupported_fp8_export_is_rejected(
    name: str,
    more: list[str],
    reason: str,
    folders,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["import", str(folders(name).quantized), "--out", str(tmp_path / "ckpt")]) == 0
    out = tmp_path / "out"
    assert main(["export", str(tmp_path / "ckpt"), str(out), "--quantize=fp8", *more]) == 2
    assert reason in capsys.readouterr().err and not out.exists()


def test_fp8_scales_do_not_depend_on_the_order_of_rows(tmp_path: Path) -> None:
    """Slabs of any size, which begin inside blocks, give the scales of whole blocks."""
    config, _ = maker.llama(hidden_size=300, intermediate_size=200)
    (tmp_path / "config.json").write_text(json.dumps(config))
    said = read_description(tmp_path)
    table = map_tensors(describe(said.config), said.table)
    scales = BlockScales(table), BlockScales(table)
    name = "model.layers.1.mlp.gate_proj.weight"
    values = np.random.default_rng(1).normal(size=table.tensors[name]).astype(np.float32)
    scales[0].add(name, values, 0)
    ends = [0, 1, 120, 135, 199, 200]
    for first, end in reversed([*itertools.pairwise(ends)]):
        scales[1].add(name, values[first:end], first)
    assert (scales[0].scales[f"{name}_scale_inv"] == scales[1].scales[f"{name}_scale_inv"]).all()
    parts = [scales[1].quantize(name, values[a:b], a) for a, b in itertools.pairwise(ends)]
    assert (
        np.concatenate(parts).view(np.uint8) == scales[0].quantize(name, values, 0).view(np.uint8)
    ).all()


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("qwen3", "model.layers.0.self_attn.o_proj.activation_scale"),
        ("qwen3", "model.layers.0.mlp.experts.down_proj_activation_scale"),
        ("fp8 rows", "model.layers.0.self_attn.o_proj.input_scale"),
        ("fp8 rows", "model.layers.0.self_attn.k_scale"),
        ("kimi", "model.layers.1.mlp.experts.2.up_proj.output_scale"),
    ],
)
def test_scales_of_activations_are_ignored(name: str, scale: str, folders, tmp_path: Path) -> None:
    made = folders(name)
    tensors = made.tensors | {scale: np.ones((), np.float32)}
    source = open_folder(str(maker.write(tmp_path / "hf", made.config, tensors)))
    plain = open_folder(str(made.dequantized))
    for param, shape in source.mapping.shapes.items():
        whole = [slice(None)] * len(shape)
        found, wanted = (each.read_region(param, BF16, whole) for each in (source, plain))
        assert found.tobytes() == wanted.tobytes(), param


# Errors.

Change = Callable[[maker.Tensors, dict[str, Any]], object]
Q = "model.layers.0.self_attn.o_proj.weight"
E = "model.layers.1.mlp.experts.2.up_proj.weight"
G = "model.layers.1.mlp.experts.gate_up_proj"
V4 = "layers.1.ffn.experts.2.w1"


def _with_scale(name: str, value: float) -> Change:
    def change(tensors: maker.Tensors, config: dict[str, Any]) -> None:
        tensors[name] = tensors[name].copy()
        tensors[name].flat[-1] = value

    return change


def _with_flipped_bit(name: str, bit: int) -> Change:
    def change(tensors: maker.Tensors, config: dict[str, Any]) -> None:
        tensors[name] = tensors[name].copy()
        flat = tensors[name].reshape(-1).view(f"u{tensors[name].itemsize}")
        flat[0] ^= flat.dtype.type(1 << bit)

    return change


def _without(name: str) -> Change:
    return lambda tensors, config: tensors.pop(name)


def _as(name: str, convert: Callable[[np.ndarray], np.ndarray]) -> Change:
    def change(tensors: maker.Tensors, config: dict[str, Any]) -> None:
        tensors[name] = convert(tensors[name])

    return change


def _in_config(**values: Any) -> Change:
    return lambda tensors, config: config["quantization_config"].update(values)


def _weights(**values: Any) -> Change:
    def change(tensors: maker.Tensors, config: dict[str, Any]) -> None:
        config["quantization_config"]["config_groups"]["group_0"]["weights"].update(values)

    return change


SCALE = "must have scales from 0 to 65536"
BAD: dict[str, tuple[str, Change, Code, str, str]] = {
    "NaN scale": ("deepseek", _with_scale(f"{Q}_scale_inv", np.nan), Code.HF_DAMAGED, Q, SCALE),
    "inf scale": ("deepseek", _with_scale(f"{Q}_scale_inv", np.inf), Code.HF_DAMAGED, Q, SCALE),
    "negative scale": ("qwen3", _with_flipped_bit(f"{Q}_scale_inv", 15), Code.HF_DAMAGED, Q, SCALE),
    "exponent bit": (
        "deepseek",
        _with_flipped_bit(f"{Q}_scale_inv", 30),
        Code.HF_DAMAGED,
        Q,
        SCALE,
    ),
    "NaN power": (
        "deepseek v3.1",
        _with_scale(f"{Q}_scale_inv", np.nan),
        *(Code.HF_DAMAGED, Q, SCALE),
    ),
    "int4 scale": ("kimi", _with_scale(f"{E}_scale", -0.01), Code.HF_DAMAGED, E, SCALE),
    "MXFP4 NaN": ("gpt-oss", _with_scale(f"{G}_scales", 255), Code.HF_DAMAGED, G, SCALE),
    "MXFP4 bit": ("gpt-oss", _with_flipped_bit(f"{G}_scales", 7), Code.HF_DAMAGED, G, SCALE),
    "NaN code": (
        "deepseek",
        _as(Q, lambda x: np.full_like(x, np.nan)),
        *(Code.HF_DAMAGED, Q, "must be finite"),
    ),
    "no scale": (
        "deepseek",
        _without(f"{Q}_scale_inv"),
        *(Code.HF_QUANTIZED, f"{Q}_scale_inv", "the scales of"),
    ),
    "no codes": ("deepseek", _without(Q), Code.HF_QUANTIZED, Q, "the codes of"),
    "no int4 scale": (
        "kimi",
        _without(f"{E}_scale"),
        Code.HF_QUANTIZED,
        f"{E}_scale",
        "the scales",
    ),
    "no int4 shape": ("kimi", _without(f"{E}_shape"), Code.HF_QUANTIZED, f"{E}_shape", "the shape"),
    "no int4 codes": (
        "kimi",
        _without(f"{E}_packed"),
        Code.HF_QUANTIZED,
        f"{E}_packed",
        "the codes",
    ),
    "no MXFP4 scale": ("gpt-oss", _without(f"{G}_scales"), Code.HF_QUANTIZED, G, "the scales of"),
    "scale shape": (
        "deepseek",
        _as(f"{Q}_scale_inv", lambda x: np.ascontiguousarray(x[:, :1])),
        *(Code.HF_QUANTIZED, f"{Q}_scale_inv = 2 x 1", "must have the shape 2 x 2: one scale"),
    ),
    "MXFP4 scale shape": (
        "gpt-oss",
        _as(f"{G}_scales", lambda x: x.swapaxes(1, 2).copy()),
        *(Code.HF_QUANTIZED, f"{G}_scales = 3 x 3 x 128", "must have the shape 3 x 128 x 3"),
    ),
    "int4 scale shape": (
        "kimi",
        _as(f"{E}_scale", lambda x: x[1:]),
        *(Code.HF_QUANTIZED, f"{E}_scale = 95 x 5", "must have the shape 96 x 5"),
    ),
    "block size": (
        "deepseek",
        _in_config(weight_block_size=[64, 128]),
        *(Code.HF_QUANTIZED, "_scale_inv", "block of 64 x 128 entries"),
    ),
    "MXFP4 block": (
        "gpt-oss",
        _as(f"{G}_blocks", lambda x: x.reshape(*x.shape[:2], 6, 8)),
        *(Code.HF_QUANTIZED, f"{G}_blocks = 3 x 128 x 6 x 8", "blocks of 16 bytes"),
    ),
    "group size": (
        "kimi",
        _weights(group_size=16),
        *(Code.HF_QUANTIZED, "_scale = ", "block of 1 x 16 entries"),
    ),
    "plain dtype": (
        "deepseek",
        _as(Q, lambda x: x.astype(BF16)),
        *(Code.HF_QUANTIZED, f"{Q} = BF16", "must have dtype F8_E4M3 in FP8 weights"),
    ),
    "scale dtype": (
        "deepseek",
        _as(f"{Q}_scale_inv", lambda x: x.astype(np.uint8)),
        *(
            Code.HF_QUANTIZED,
            f"{Q}_scale_inv = U8",
            "must have dtype F32 or BF16 or F16 or F8_E8M0",
        ),
    ),
    "int4 dtype": (
        "kimi",
        _as(f"{E}_packed", lambda x: x.astype(np.int64)),
        *(Code.HF_QUANTIZED, f"{E}_packed = I64", "must have dtype I32 in int4 weights"),
    ),
    "MXFP4 dtype": (
        "gpt-oss",
        _as(f"{G}_blocks", lambda x: x.view(np.int8)),
        *(Code.HF_QUANTIZED, f"{G}_blocks = I8", "must have dtype U8 in MXFP4 weights"),
    ),
    "packed shape": (
        "kimi",
        _as(f"{E}_shape", lambda x: x - [0, 8]),
        *(Code.HF_QUANTIZED, f"{E}_packed = 96 x 20", "must have the shape 96 x 19 to pack"),
    ),
    "shape of shape": (
        "kimi",
        _as(f"{E}_shape", lambda x: x[:1]),
        *(Code.HF_QUANTIZED, f"{E}_shape = 1", "must have 2 elements"),
    ),
    "other model": (
        "kimi",
        _as(f"{E}_shape", lambda x: x - [0, 1]),
        *(Code.HF_TENSORS, f"{E}", "must have the shape"),
    ),
    "excluded": (
        "deepseek",
        _in_config(modules_to_not_convert=["model.layers.0.self_attn"]),
        *(Code.HF_QUANTIZED, "model.layers.0.self_attn", "excludes 'model.layers.0.self_attn'"),
    ),
    "one plain layer": (
        "gpt-oss",
        lambda tensors, config: (
            tensors.pop(f"{G}_blocks"),
            tensors.pop(f"{G}_scales"),
            tensors.update({G: np.zeros((3, 128, 96), BF16)}),
        ),
        *(Code.HF_QUANTIZED, G, "must be quantized like"),
    ),
    "codes and values": (
        "gpt-oss",
        lambda tensors, config: tensors.update({G: np.zeros((3, 128, 96), BF16)}),
        *(Code.HF_QUANTIZED, G, "must not be present in addition to"),
    ),
    "other format": (
        "deepseek",
        _in_config(quant_method="mxfp4"),
        *(Code.HF_TENSORS, "_scale_inv", "quantization_config in config.json does not describe"),
    ),
    "V4 without scales": (
        "deepseek v4",
        _without(f"{V4}.scale"),
        *(Code.HF_QUANTIZED, f"lacks the tensor '{V4}.scale'", f"the scales of {V4}.weight"),
    ),
    "V4 scale dtype": (
        "deepseek v4",
        _as(f"{V4}.scale", lambda x: x.astype(np.float32)),
        *(Code.HF_QUANTIZED, f"{V4}.scale = F32", "must have dtype F8_E8M0 in FP4 weights"),
    ),
    "V4 scale shape": (
        "deepseek v4",
        _as(f"{V4}.scale", lambda x: x[:, :-1]),
        *(Code.HF_QUANTIZED, f"{V4}.scale", "must have the shape 96 x 5"),
    ),
    "V4 codes of 8 bits": (
        "deepseek v4",
        lambda tensors, config: config.pop("expert_dtype"),
        *(Code.HF_QUANTIZED, "layers.0.ffn.experts.0.w1.weight = I8", "with expert_dtype fp4"),
    ),
    "V4 plain dtype": (
        "deepseek v4",
        _as(f"{V4}.weight", lambda x: x.astype(BF16)),
        *(Code.HF_QUANTIZED, f"{V4}.weight = BF16", "must have dtype F8_E4M3 or I8"),
    ),
    "V4 expert dtype": (
        "deepseek v4",
        lambda tensors, config: config.update(expert_dtype="int4"),
        *(Code.HF_UNSUPPORTED, 'expert_dtype = "int4"', "must be null or 'fp8' or 'fp4'"),
    ),
    "V4 embedding with two names": (
        "deepseek v4",
        lambda tensors, config: tensors.update(
            {"model.embed_tokens.weight": tensors["embed.weight"]}
        ),
        *(Code.HF_TENSORS, "'model.embed_tokens.weight'", "which are the same tensor"),
    ),
    "no declaration": (
        "deepseek",
        lambda tensors, config: config.pop("quantization_config"),
        *(Code.HF_TENSORS, "_scale_inv", "quantization_config in config.json does not describe"),
    ),
}


@pytest.mark.parametrize("problem", BAD)
def test_damaged_folders_are_rejected(problem: str, folders, tmp_path: Path) -> None:
    name, change, code, where, rule = BAD[problem]
    made = folders(name)
    tensors, config = dict(made.tensors), json.loads(json.dumps(made.config))
    change(tensors, config)
    folder = maker.write(tmp_path / "hf", config, tensors)
    with pytest.raises(ConfigError) as caught:
        source = open_folder(str(folder))
        for param, shape in source.mapping.shapes.items():
            source.read_region(param, BF16, [slice(None)] * len(shape))
    (found,) = caught.value.problems
    text = str(caught.value)
    assert (found.code, where in text, rule in text) == (code, True, True), text
    assert found.action


def _compressed(**values: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, **values}
    return quantized.compressed("pack-quantized", [], **weights)


COMPRESSED = "config_groups.group_0.weights"
BAD_CONFIGS: dict[str, tuple[Any, str, str]] = {
    "a list": ([], "quantization_config = []", "must be an object"),
    "no method": ({"bits": 4}, "quant_method = null", "must be one of fp8, mxfp4, compressed"),
    "AWQ": ({"quant_method": "awq"}, 'quant_method = "awq"', "unquantized weights"),
    "GPTQ": ({"quant_method": "gptq"}, 'quant_method = "gptq"', "unquantized weights"),
    "bitsandbytes": ({"quant_method": "bitsandbytes"}, "bitsandbytes", ".dequantize().save_pretr"),
    "method as a list": ({"quant_method": ["fp8"]}, 'quant_method = ["fp8"]', "must be one of"),
    "e5m2": ({**quantized.FP8, "fmt": "e5m2"}, "fmt", "FineGrainedFP8Config as C"),
    "scale format": ({**quantized.FP8, "scale_fmt": "x"}, "scale_fmt", "'float' or 'ue8m0'"),
    "FP4 experts": ({**quantized.FP8, "expert_dtype": "fp4"}, "expert_dtype", "must be null or"),
    "one block size": (
        {**quantized.FP8, "weight_block_size": [128]},
        "weight_block_size = [128]",
        "two positive integers",
    ),
    "empty blocks": (
        {**quantized.FP8, "weight_block_size": [0, 128]},
        "weight_block_size = [0, 128]",
        "two positive integers",
    ),
    "names": (
        {**quantized.FP8, "modules_to_not_convert": "lm_head"},
        "modules_to_not_convert",
        "must be a list",
    ),
    "MXFP4 names": (
        {"quant_method": "mxfp4", "modules_to_not_convert": [1]},
        "modules_to_not_convert",
        "must be a list",
    ),
    "8 bits": (
        _compressed(num_bits=8),
        f"{COMPRESSED}.num_bits = 8",
        "CompressedTensorsConfig as C",
    ),
    "asymmetric": (_compressed(symmetric=False), f"{COMPRESSED}.symmetric = false", "must be True"),
    "1 for true": (_compressed(symmetric=1), f"{COMPRESSED}.symmetric = 1", "must be True"),
    "order": (_compressed(actorder="group"), f"{COMPRESSED}.actorder", "must be null or"),
    "strategy": (_compressed(strategy="x"), f"{COMPRESSED}.strategy", "'group' or 'channel'"),
    "group size": (
        _compressed(group_size=-1),
        f"{COMPRESSED}.group_size = -1",
        "a positive integer",
    ),
    "format": (
        {**_compressed(), "format": "nvfp4-pack-quantized"},
        "quantization_config.format",
        "pack-quantized or float-quantized",
    ),
    "two groups": (
        {**_compressed(), "config_groups": {"a": {}, "b": {}}},
        "config_groups",
        "exactly one group",
    ),
    "no groups": ({**_compressed(), "config_groups": None}, "config_groups = null", "an object"),
    "no weights": (
        {**_compressed(), "config_groups": {"a": {"weights": None}}},
        "config_groups.a.weights = null",
        "must be an object",
    ),
    "sparse": ({**_compressed(), "sparsity_config": {"x": 1}}, "sparsity_config", "must be empty"),
    "ignore": ({**_compressed(), "ignore": {}}, "ignore = {}", "must be a list"),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_invalid_quantization_config_is_rejected(name: str, tmp_path: Path) -> None:
    given, where, rule = BAD_CONFIGS[name]
    config = {**quantized.DEEPSEEK, "quantization_config": given}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError) as caught:
        read_description(tmp_path)
    (found,) = caught.value.problems
    text = str(caught.value)
    assert found.code == Code.HF_UNSUPPORTED and where in text and rule in text, text


def test_weights_are_dequantized_to_the_dtype_in_config_json(folders, tmp_path: Path) -> None:
    made = folders("deepseek")
    config = {**made.config, "torch_dtype": "float32", "dtype": None}
    source = open_folder(str(maker.write(tmp_path / "hf", config, made.tensors)))
    found = source.read_region(
        "layers.dense.attention.out", np.dtype(np.float32), [slice(None)] * 4
    )
    codes, scales = made.tensors[Q].astype(np.float32), made.tensors[f"{Q}_scale_inv"]
    wanted = codes * np.kron(scales, np.ones((128, 128), np.float32))[:136, :134]
    assert (bits(found[0].reshape(134, 136).T) == bits(wanted)).all()


def test_all_mxfp4_codes_and_scales_equal_products() -> None:
    """Codes of 4 bits are multiplied by powers of two, from the smallest to the largest scale."""
    pairs = dequantize._float4_pairs().view(np.uint16).reshape(256, 256, 2)
    bytes_of_codes = np.arange(256)[:, None] >> np.array([0, 4]) & 15
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[bytes_of_codes & 7]
    values = np.where(bytes_of_codes & 8, -magnitudes, magnitudes)
    for code in range(255):  # 255 is NaN
        with np.errstate(over="ignore"):
            wanted = (values * 2.0 ** (code - 127)).astype(np.float32)
        assert (pairs[code] == wanted.astype(ml_dtypes.bfloat16).view(np.uint16)).all(), code
