"""Invalid numbers in the files of a Hugging Face folder."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from maxpipe.config.sections.tokenizer import TokenizerConfig
from maxpipe.data.tokenizer import open_tokenizer
from maxpipe.errors import ConfigError
from maxpipe.huggingface.config_json import read_description
from maxpipe.huggingface.folder import open_folder
from tests.errors import without_codes
from tests.huggingface import maker

GOLDEN = Path(__file__).parents[1] / "golden/tokenizers/folder"
VALUES = {
    "NaN": "NaN",
    "Infinity": "Infinity",
    "-Infinity": "-Infinity",
    "1e308": "1e308",
    "300 digits": "7" * 300,
    "400 digits": "7" * 400,
    "-400 digits": "-" + "7" * 400,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0}
YARN |= {"original_max_position_embeddings": 64, "rope_theta": 1e4}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
OTHERS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 256}
CONFIGS: dict[str, Callable[[], dict[str, Any]]] = {
    "llama": lambda: maker.llama(rope_scaling=LLAMA3, rope_theta=1e4, **OTHERS)[0],
    "llama dynamic": lambda: maker.llama(
        rope_scaling={"rope_type": "dynamic", "factor": 2.0}, rope_theta=1e4, **OTHERS
    )[0],
    "llama yarn": lambda: maker.llama(rope_parameters=YARN, rope_scaling=None, **OTHERS)[0],
    "gemma3": lambda: maker.gemma3()[0] | {"query_pre_attn_scalar": 6, "rope_theta": 1e6},
    "gemma4": lambda: maker.gemma4()[0],
    "mixtral": lambda: maker.mixtral()[0],
    "qwen3_next": lambda: maker.qwen3_next()[0] | {"rope_theta": 1e6},
    "qwen3_5_moe": lambda: maker.qwen3_5_moe()[0] | {"rope_theta": 1e6},
    "glm4_moe": lambda: maker.glm4_moe()[0],
    "minimax_m2": lambda: maker.minimax_m2()[0],
    "gpt_oss": lambda: maker.gpt_oss()[0],
    "granite4": lambda: maker.granite4()[0],
    "nemotron_h": lambda: maker.nemotron_h()[0],
    "kimi_linear": lambda: without(maker.kimi_linear()[0], "head_dim"),  # not read
    "olmo_hybrid": lambda: maker.olmo_hybrid(rope_parameters={"rope_theta": 1e4})[0],
    "ministral3": lambda: maker.ministral3()[0],
    "llama4": lambda: maker.llama4()[0],
    "llama4 lists": lambda: without(
        maker.llama4(no_rope_layers=[1, 0, 1], moe_layers=[1])[0],
        *("no_rope_layer_interval", "interleave_moe_layer_step"),
    ),
}


def without(content: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in content.items() if name not in names}


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of the numbers in a JSON value."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from leaves(inner, (*path, name))
    elif isinstance(value, list):
        for number, inner in enumerate(value[:1]):
            yield from leaves(inner, (*path, number))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path


def changed(content: Any, path: tuple[Any, ...], text: str) -> str:
    content = copy.deepcopy(content)
    inner = content
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = "@@"
    return json.dumps(content).replace('"@@"', text)


@pytest.mark.parametrize("name", CONFIGS)
def test_invalid_numbers_in_config_json_are_rejected(name: str, tmp_path: Path) -> None:
    """The error names the file; keys that are not read accept any number."""
    path, content = tmp_path / "config.json", CONFIGS[name]()
    path.write_text(json.dumps(content))
    read_description(tmp_path)
    accepted = set()
    for place in leaves(content):
        for value in ("NaN", "-Infinity", "1e308", "400 digits"):
            path.write_text(changed(content, place, VALUES[value]))
            try:
                read_description(tmp_path)
            except ConfigError as error:
                lines = str(error).splitlines()
                assert lines[0].startswith(str(path))
                assert len(lines) % 3 == 0
                assert max(map(len, lines)) < 1000
            else:
                accepted.add((place[-1] if isinstance(place[-1], str) else place[0], value))
    assert {key for key, _ in accepted} <= {"eos_token_id", "max_position_embeddings"}
    assert not {value for _, value in accepted} & {"400 digits"}


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("key", ["eos_token_id", "bos_token_id"])
@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_invalid_control_token_ids_are_rejected(
    name: str, key: str, value: str, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(GOLDEN, folder)
    for each in ("generation_config.json", "config.json"):
        (folder / each).unlink(missing_ok=True)
    for text in (VALUES[value], f"[1, {VALUES[value]}]"):
        (folder / name).write_text(f'{{"{key}": {text}}}')
        with pytest.raises(ConfigError) as caught:
            open_tokenizer(TokenizerConfig(kind="auto", path=str(folder)))
        assert f"tokenizer.path = {folder / name}" in str(caught.value)
        assert key in str(caught.value) or "an integer of 400 digits" in str(caught.value)


def test_oversized_integer_in_tokenizer_config_is_rejected(tmp_path: Path) -> None:
    """`model_max_length` is not used: many published models set it to the integer 1e30."""
    folder = tmp_path / "folder"
    shutil.copytree(GOLDEN, folder)
    path = folder / "tokenizer_config.json"
    content = json.loads(path.read_bytes()) | {"model_max_length": int(1e30)}
    path.write_text(json.dumps(content))
    open_tokenizer(TokenizerConfig(kind="auto", path=str(folder)))
    path.write_text(changed(content, ("model_max_length",), "7" * 400))
    with pytest.raises(ConfigError) as caught:
        open_tokenizer(TokenizerConfig(kind="auto", path=str(folder)))
    assert str(path) in str(caught.value)
    assert "an integer of 400 digits" in str(caught.value)


@pytest.mark.parametrize("value", VALUES)
def test_number_as_file_name_in_tensor_index_is_rejected(value: str, tmp_path: Path) -> None:
    config, tensors = maker.llama("F32", rope_scaling=None)
    maker.write(tmp_path, config, tensors, 3)
    path = tmp_path / "model.safetensors.index.json"
    content = json.loads(path.read_bytes())
    name = next(iter(content["weight_map"]))
    path.write_text(changed(content, ("weight_map", name), VALUES[value]))
    with pytest.raises(ConfigError) as caught:
        open_folder(str(tmp_path))
    assert without_codes(caught.value).startswith(f"{path}\n")
