"""Tokenizer classes of `transformers`, and the `tokenizer.json` components that they replace.

`transformers` 5 uses an unmodified `tokenizer.json` only with the class `TokenizersBackend`. Some
classes keep the vocabulary, the merges and the post-processor of the file, and replace all other
components.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from maxpipe.data.tokenizers.byte_bpe import QWEN, QWEN3_5
from maxpipe.data.tokenizers.control import read_object, role_texts

FILE_AS_IT_IS = "TokenizersBackend"
"""Name of the class that uses `tokenizer.json` without changes."""
_SPACE = "\u2581"

_TYPES = {
    FILE_AS_IT_IS: (
        "arctic aria beam bigbird_pegasus camembertv2-base canary chatlm cohere_asr ernie4_5 "
        "ernie4_5_moe EvollaModel flex_olmo fuyu glm glm4 glm4_moe glm4_moe_lite glm4v "
        "glm4v_moe glm_image glmasr got_ocr2 gpt_bigcode gradium_phonon_tts granite "
        "granitemoe granitemoehybrid granitemoeshared h2ovl_chat hyperclovax hyperclovax_vlm "
        "internlm2 internlm3 iquestcoder jamba kimi_k25 kimi_linear kosmos-2 llava llava_next "
        "mimo_v2_flash minicpm3 minicpm_ocr minicpmv minicpmv4_6 minicpmv4_7 minimax_m2 "
        "ministral ministral3 mistral mistral3 mistral_large4 mixtral modernbert "
        "modernbert-decoder molmo molmo2 nemo_speechlm nemotron nvfp4 nystromformer olmo2 olmo3 "
        "olmo_hybrid omniasr opencua openvla paddleocr_vl pegasus_x persimmon phi3 phi3_v "
        "phimoe pix2struct pixtral pocket_tts smolvlm stablelm step3_vl umt5 vipllava voxtral "
        "voxtral_realtime xlm-roberta-xl"
    ),
    "CodeLlamaTokenizer": "code_llama",
    "CohereTokenizer": "aya_vision cohere cohere2",
    "GPT2Tokenizer": (
        "blip-2 codegen dbrx emu3 gpt2 gpt_neo gptj hyperclovax_vision_v2 instructblip "
        "instructblipvideo jais2 opt phi starcoder2"
    ),
    "GPTNeoXTokenizer": "falcon_mamba gpt_neox mamba mamba2 mpt olmo olmoe rwkv xlstm",
    "GemmaTokenizer": (
        "diffusion_gemma gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text recurrent_gemma "
        "shieldgemma2 t5gemma zaya"
    ),
    "LlamaTokenizer": "idefics idefics2",
    "Qwen2Tokenizer": (
        "audioflamingo3 colqwen2 cosmos3_omni dots3_note fun_asr_nano hunyuan_vl internvl "
        "moss_transcribe_diarize ovis2 qianfan_ocr qwen2 qwen2_5_omni qwen2_5_vl qwen2_audio "
        "qwen2_moe qwen2_vl qwen3 qwen3_asr qwen3_moe qwen3_next qwen3_omni_moe qwen3_vl "
        "qwen3_vl_moe"
    ),
    "Qwen3_5Tokenizer": "qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen4_exp",
}
REGISTERED = {kind: name for name, kinds in _TYPES.items() for kind in kinds.split()}
"""Maps `model_type` to its registered class. Other model types use the class that the folder names.
"""

_CORRECTED_TYPES = (
    "arctic camembertv2-base chatlm cohere_asr ernie4_5 ernie4_5_moe fuyu h2ovl_chat "
    "hyperclovax hyperclovax_vision_v2 hyperclovax_vlm internlm2 internlm3 iquestcoder jamba "
    "llava llava_next minicpm3 minicpmv minimax_m2 modernbert modernbert-decoder molmo molmo2 "
    "nemotron nvfp4 opencua openvla paddleocr_vl phi3 phi3_v phimoe qwen2 qwen3_5 qwen3_5_moe "
    "qwen3_5_moe_text qwen4_exp siglip2 smolvlm step3_vl vipllava"
)
CORRECTED = frozenset(_CORRECTED_TYPES.split())
"""Values of `model_type` whose registered class overrides the class that the folder names."""


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """Components of `tokenizer.json` that a tokenizer class replaces."""

    normalizer: Any
    pre_tokenizer: Any
    decoder: Any
    model: Mapping[str, Any]
    roles: Mapping[str, str] = field(default_factory=dict)
    """Maps roles that the settings do not define to control-token strings."""
    before: str | None = None
    """Role of the token that is added before encoded text. An empty string adds no token; None
    keeps the file's post-processor.
    """


def class_name(settings: Mapping[str, Any], config: Mapping[str, Any], *, byte_level: bool) -> str:
    """Return the name of the class that `AutoTokenizer` selects, or an empty string if this class
    uses the file unchanged.

    Args:
        settings: Content of `tokenizer_config.json`.
        config: Content of `config.json`.
        byte_level: Whether the folder has a `tokenizer.json` with a `ByteLevel` component.
    """
    stated = settings.get("tokenizer_class") or config.get("tokenizer_class")
    name = stated.removesuffix("Fast") if isinstance(stated, str) else ""
    kinds = [
        kind for key in ("model_type", "model_name") if isinstance(kind := config.get(key), str)
    ]
    registered = REGISTERED.get(kinds[0], "") if isinstance(config.get("model_type"), str) else ""
    is_corrected = any(kind in CORRECTED for kind in kinds)
    chosen = name or registered
    auto = settings.get("auto_map")
    if name and not (auto.get("AutoTokenizer") if isinstance(auto, dict) else auto):
        if name == "LlamaTokenizer" and byte_level and not is_corrected:
            return ""
        if registered == FILE_AS_IT_IS or (registered and is_corrected):
            chosen = registered
    return chosen if chosen in _PARTS else ""


def folder_class(folder: str, *, byte_level: bool = False) -> tuple[str, Mapping[str, Any]]:
    """Return the `class_name` of a tokenizer folder, and the settings that the class reads."""
    settings = read_object(folder, "tokenizer_config.json")
    config = read_object(folder, "config.json")
    return class_name(settings, config, byte_level=byte_level), settings


def may_keep_file(folder: str) -> bool:
    """Return whether setting `tokenizer_class` to `TokenizersBackend` would take effect."""
    settings = read_object(folder, "tokenizer_config.json") | {"tokenizer_class": FILE_AS_IT_IS}
    config = read_object(folder, "config.json")
    return not any(class_name(settings, config, byte_level=flag) for flag in (True, False))


def rebuild_definition(path: str, raw: bytes, definition: Mapping[str, Any]) -> bytes:
    """Return the content of a `tokenizer.json` after the changes made by its tokenizer class.

    The result is `raw` itself if the class does not change token ids, or if the model is not BPE.
    All of these classes require BPE.
    """
    folder = os.path.dirname(os.path.expanduser(path))
    name, settings = folder_class(folder, byte_level=b'"ByteLevel"' in raw)
    model = definition.get("model")
    if not name or not isinstance(model, dict) or model.get("type", "BPE") != "BPE":
        return raw
    parts = _PARTS[name](settings)
    roles = {k: text for k, text in {**parts.roles, **role_texts(folder)}.items() if text}
    rebuilt = {
        **definition,
        "normalizer": parts.normalizer,
        "pre_tokenizer": parts.pre_tokenizer,
        "decoder": parts.decoder,
        "model": {**model, **_model_changes(model, parts.model, roles)},
        "added_tokens": _added_tokens(definition, settings, [*roles.values()]),
    }
    if parts.before is not None:
        rebuilt["post_processor"] = _post_processor(roles.get(parts.before), definition)
    if _comparable(rebuilt) == _comparable(definition):
        return raw
    return json.dumps(rebuilt, ensure_ascii=False).encode("utf-8", "surrogatepass")


def prepend_scheme(settings: Mapping[str, Any]) -> str:
    """Return when `LlamaTokenizer` adds a space before text: `first`, `always` or `never`."""
    if settings.get("add_prefix_space") not in (None, True):
        return "never"
    return "always" if settings.get("legacy") else "first"


def _model_changes(
    model: Mapping[str, Any], own: Mapping[str, Any], roles: Mapping[str, str]
) -> dict[str, Any]:
    wanted = {**_DEFAULTS, **own}
    if wanted.get("unk_token"):
        wanted["unk_token"] = roles.get("unk_token")
    vocabulary = model.get("vocab") or {}
    if wanted["byte_fallback"] and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        wanted.pop("unk_token", None)  # all bytes have tokens
        wanted.pop("fuse_unk", None)
    return {k: value for k, value in wanted.items() if (model.get(k) or None) != (value or None)}


_DEFAULTS = {
    "dropout": None,
    "ignore_merges": False,
    "byte_fallback": False,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
}


def _added_tokens(
    definition: Mapping[str, Any], settings: Mapping[str, Any], named: list[str]
) -> list[dict[str, Any]]:
    """Return the named control tokens, and the added tokens listed in the settings (or in the file,
    if the settings list none).

    Tokens that are neither in the vocabulary nor listed as added tokens are omitted.
    """
    own = definition.get("added_tokens") or []
    listed = settings.get("added_tokens_decoder")
    if isinstance(listed, dict):
        entries = {
            int(i): entry
            for i, entry in listed.items()
            if re.fullmatch("[0-9]{1,9}", i) and isinstance(entry, dict)
        }
    else:
        entries = {token["id"]: token for token in own}
    tokens = [_added_token(i, item, named) for i, item in sorted(entries.items())]
    known = {token["content"] for token in tokens}
    vocabulary = definition["model"].get("vocab") or {}
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    extra = [token.get("content") if isinstance(token, dict) else token for token in extra]
    for text in dict.fromkeys([*named, *(token for token in extra if isinstance(token, str))]):
        if text in vocabulary and text not in known:
            tokens.append(_added_token(vocabulary[text], {"content": text, "special": True}, named))
    return tokens


def _added_token(i: int, entry: Mapping[str, Any], named: list[str]) -> dict[str, Any]:
    special = bool(entry.get("special"))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": not special}
    flags |= {key: entry[key] for key in flags if isinstance(entry.get(key), bool)}
    content = str(entry.get("content", ""))
    return {"id": i, "content": content, **flags, "special": special or content in named}


def _post_processor(before: str | None, definition: Mapping[str, Any]) -> Any:
    """Return a post-processor that adds the token `before`; None if the token has no id."""
    added = {token["content"]: token["id"] for token in definition.get("added_tokens") or ()}
    ids = {**(definition["model"].get("vocab") or {}), **added}
    if not before or before not in ids:
        return None
    tokens = {before: {"id": before, "ids": [ids[before]], "tokens": [before]}}
    first = {"SpecialToken": {"id": before, "type_id": 0}}
    text = [{"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB")]
    return {
        "type": "TemplateProcessing",
        "single": [first, text[0]],
        "pair": [first, *text],
        "special_tokens": tokens,
    }


def _comparable(definition: Mapping[str, Any]) -> Any:
    """Return the parts of a `tokenizer.json` that affect token ids, normalized for comparison."""
    model = {key: value for key, value in definition["model"].items() if value}
    parts = [_plain(definition.get(key)) for key in ("normalizer", "pre_tokenizer")]
    decoder = _plain(definition.get("decoder"))
    parts.append("bytes" if isinstance(decoder, tuple) else decoder)
    added = sorted(definition.get("added_tokens") or (), key=lambda token: token["id"])
    return model, parts, definition.get("post_processor"), added


def _plain(part: Any) -> Any:
    """Drop offset options and default values, and unwrap one-element sequences."""
    if isinstance(part, list):
        return [_plain(item) for item in part]
    if not isinstance(part, dict):
        return part
    if part.get("type") == "ByteLevel":
        return bool(part.get("add_prefix_space", True)), bool(part.get("use_regex", True))
    inner = [part[key] for key in _LISTS if isinstance(part.get(key), list)]
    if part.get("type") == "Sequence" and inner and len(inner[0]) == 1:
        return _plain(inner[0][0])
    return {key: _plain(value) for key, value in part.items() if value}


_LISTS = ("normalizers", "pretokenizers", "decoders")


def _llama(settings: Mapping[str, Any]) -> TokenizerParts:
    scheme = prepend_scheme(settings)
    return TokenizerParts(
        None,
        _metaspace(scheme),
        _spaced_decoder(strips=scheme != "never"),
        {"byte_fallback": True, "fuse_unk": True, "unk_token": None},
        {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    )


def _code_llama(settings: Mapping[str, Any]) -> TokenizerParts:
    scheme = "never" if settings.get("add_prefix_space") not in (None, True) else "first"
    roles = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    infilling = {"prefix": "PRE", "middle": "MID", "suffix": "SUF", "eot": "EOT"}
    return TokenizerParts(
        None,
        _metaspace(scheme),
        _spaced_decoder(strips=True),
        {"byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>"},
        roles | {f"{role}_token": f"{_SPACE}<{name}>" for role, name in infilling.items()},
        before="bos_token",
    )


def _gemma(settings: Mapping[str, Any]) -> TokenizerParts:
    split = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious"}
    names = ("unk", "bos", "eos", "pad", "mask")
    return TokenizerParts(
        {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
        {**split, "invert": False},
        _spaced_decoder(strips=False),
        {"byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>"},
        {f"{name}_token": f"<{name}>" for name in names},
    )


def _metaspace(scheme: str) -> dict[str, Any]:
    return {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": scheme, "split": False}


def _spaced_decoder(*, strips: bool) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if strips:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}


_NFC = {"type": "NFC"}
_TEXT_END = "<|endoftext|>"


def _qwen(pattern: str) -> Callable[[Mapping[str, Any]], TokenizerParts]:
    def parts(settings: Mapping[str, Any]) -> TokenizerParts:
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
        steps = [{**split, "invert": False}, _byte_level(settings, use_regex=False)]
        roles: dict[str, str] = dict.fromkeys(("unk_token", "eos_token", "pad_token"), _TEXT_END)
        return _bytes(_NFC, {"type": "Sequence", "pretokenizers": steps}, roles)

    return parts


def _gpt2(settings: Mapping[str, Any]) -> TokenizerParts:
    roles: dict[str, str] = dict.fromkeys(("unk_token", "bos_token", "eos_token"), _TEXT_END)
    return _bytes(None, _byte_level(settings), roles)


def _gpt_neox(settings: Mapping[str, Any]) -> TokenizerParts:
    roles: dict[str, str] = dict.fromkeys(("unk_token", "bos_token", "eos_token"), _TEXT_END)
    return _bytes(_NFC, _byte_level(settings), {**roles, "pad_token": "<|padding|>"}, before="")


def _cohere(settings: Mapping[str, Any]) -> TokenizerParts:
    steps = [{"type": "Digits", "individual_digits": True}, _byte_level(settings)]
    roles = {"unk": "<UNK>", "bos": "<BOS_TOKEN>", "eos": "<|END_OF_TURN_TOKEN|>", "pad": "<PAD>"}
    roles |= {"cls": "<CLS>", "sep": "<SEP>", "mask": "<MASK_TOKEN>"}
    named = {f"{role}_token": text for role, text in roles.items()}
    return _bytes(_NFC, {"type": "Sequence", "pretokenizers": steps}, named)


def _byte_level(settings: Mapping[str, Any], *, use_regex: bool = True) -> dict[str, Any]:
    prefix = settings.get("add_prefix_space") is True
    options = {"add_prefix_space": prefix, "trim_offsets": True, "use_regex": use_regex}
    return {"type": "ByteLevel", **options}


def _bytes(
    normalizer: Any, pre_tokenizer: Any, roles: Mapping[str, str], before: str | None = None
) -> TokenizerParts:
    decoder = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}
    decoder["use_regex"] = True
    return TokenizerParts(normalizer, pre_tokenizer, decoder, {}, roles, before)


_PARTS: dict[str, Callable[[Mapping[str, Any]], TokenizerParts]] = {
    "LlamaTokenizer": _llama,
    "CodeLlamaTokenizer": _code_llama,
    "GemmaTokenizer": _gemma,
    "Qwen2Tokenizer": _qwen(QWEN),
    "Qwen3_5Tokenizer": _qwen(QWEN3_5),
    "GPT2Tokenizer": _gpt2,
    "GPTNeoXTokenizer": _gpt_neox,
    "CohereTokenizer": _cohere,
}
