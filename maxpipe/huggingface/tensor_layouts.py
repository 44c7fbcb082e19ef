"""Alternative tensor layouts of Hugging Face folders: wrapper prefixes, fused and stacked tensors.

A family's conversion table describes the tensor layout of published Hugging Face checkpoints.
Training and serving tools save the same weights with other prefixes, with fused projections, or
with all experts in one tensor (`save_original_format=False` in transformers 5). `adapt_table`
detects the layout from the tensor names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from maxpipe.models.huggingface import HuggingFace, Tensor, VisionTable, Whole

_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
"""Names of PyTorch wrapper modules, which may occur anywhere in a tensor name."""

_ROOTS = r"(?:(?:base_model|module|model|language_model|text_model)\.)*"
_PARTS = "embed_tokens|layers|norm|rotary_emb"
_PARTS += "|embed_tokens_per_layer|per_layer_model_projection|per_layer_projection_norm"
_BODY = re.compile(rf"{_ROOTS}((?:{_PARTS})\..*)", re.DOTALL)
_HEAD = re.compile(rf"{_ROOTS}(lm_head\..*)", re.DOTALL)
_VISION = re.compile(
    r"(?:model\.)*(vision_tower\.|multi_modal_projector\.|visual\.|embed_vision\.)(?:vision_model\.)?(.*)",
    re.DOTALL,
)
_TEXT_PREFIX, _TOWER = "language_model.", "vision_tower."
_NESTED = ("visual.", _TOWER, "embed_vision.")
"""Parts of composite models whose tensor names begin with `model.` in published models."""

_FUSED = (
    (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "self_attn.qkv_proj"),
    (("gate_proj", "up_proj"), "gate_up_proj"),
    (("self_attn.q_conv1d", "self_attn.k_conv1d", "self_attn.v_conv1d"), "self_attn.conv1d"),
    (
        ("linear_attn.q_conv1d", "linear_attn.k_conv1d", "linear_attn.v_conv1d"),
        "linear_attn.conv1d",
    ),
    (("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"), "self_attn.fused_qkv_a_proj_with_mqa"),
)
"""Names of separate modules, and the name of the fused module that concatenates their rows."""

_STACKED = (
    (("gate", "up"), ("gate_up_proj", "gate_up_proj.weight", "w13_weight")),
    (("down",), ("down_proj", "down_proj.weight", "w2_weight")),
    (("gate",), ("gate_proj", "gate_proj.weight")),
    (("up",), ("up_proj", "up_proj.weight")),
)
"""Expert parameters, and the names of tensors that stack them over all experts, with the shape
`[E, 2F, D]` or `[E, D, F]`."""

_RENAMED_MODULES = (
    (".block_sparse_moe.", ".mlp.", ".mlp.experts."),
    ("backbone.", "model.", "model.layers.#.mixer."),
    # transformers 5.24 saves the MLPs of Kimi Linear under the names of the layers with experts.
    (".mlp.", ".block_sparse_moe.", "layers.#.block_sparse_moe.gate_proj."),
    (".attention_layer_norm.", ".input_layernorm.", "layers.#.input_layernorm."),
    (
        ".feedforward_layer_norm.",
        ".post_attention_layernorm.",
        "layers.#.post_attention_layernorm.",
    ),
    # transformers 5.24 saves a norm of the attention layers of OLMo Hybrid under the name of a norm
    # of the other layers.
    (
        ".post_attention_layernorm.",
        ".feedforward_layer_norm.",
        "layers.#.feedforward_layer_norm.",
    ),
)
"""Names of modules in published checkpoints and in transformers 5, and a part of the tensor names
that identifies the second layout."""


def canonical(name: str) -> str:
    """Return a tensor name without the prefixes that training tools add."""
    name = _WRAPPERS.sub("", name)
    if body := _BODY.fullmatch(name):
        return f"model.{body[1]}"
    if head := _HEAD.fullmatch(name):
        return head[1]
    if vision := _VISION.fullmatch(name):
        return vision[1] + vision[2]
    return name


def composite_name(name: str, *, is_nested: bool = False) -> str:
    """Return the name of a tensor in published vision-language models, given its name in a
    conversion table. See `VisionTable.is_nested`.
    """
    if is_nested:
        body = name.removeprefix("model.")
        if name.startswith(_NESTED):
            return f"model.{name}"
        return f"model.{_TEXT_PREFIX}{body}" if body != name else name
    if name.startswith("multi_modal_projector."):
        return name
    if name.startswith(_TOWER):
        return f"{_TOWER}vision_model.{name.removeprefix(_TOWER)}"
    return f"{_TEXT_PREFIX}{name}"


def composite_table(table: HuggingFace, whole: Whole, vision: VisionTable) -> HuggingFace:
    """Return the conversion table of a composite model with a vision tower."""
    return replace(
        table,
        architecture=whole.architecture,
        model_type=whole.model_type,
        tensors=(*table.tensors, *vision.tensors),
    )


def adapt_table(
    table: HuggingFace, names: Iterable[str], transposed: Iterable[str] = ()
) -> HuggingFace:
    """Return the conversion table with rows adapted to the layout of the tensors in `names`.

    The names in `transposed` have the last two dims of stacked expert matrices in reverse order.
    """
    present = {name_pattern(name) for name in names}
    reverse = {name_pattern(name) for name in transposed}
    renamed = (*_RENAMED_MODULES, *((old, new, new) for old, new in table.modules))
    tensors, of_heads = (
        _adapt_rows(rows, present, reverse, renamed)
        for rows in (table.tensors, table.mtp_layer_tensors)
    )
    return replace(table, tensors=tensors, mtp_layer_tensors=of_heads)


_Rows = dict[str, Tensor]


def _adapt_rows(
    tensors: Iterable[Tensor],
    present: set[str],
    reverse: set[str],
    renamed: Iterable[tuple[str, str, str]],
) -> tuple[Tensor, ...]:
    rows = {row.ours: row for row in tensors}
    rows |= {
        name: _transposed(row) for name, row in rows.items() if name_pattern(row.theirs) in reverse
    }
    rows |= _renamed_rows(rows, present, renamed)
    for other in (*_stacked(rows), *_fused(rows)):
        rows |= _if_present(rows, other, present)
    return tuple(rows.values())


def _transposed(row: Tensor) -> Tensor:
    ours, theirs = row.dims.split(" -> ")
    stack, *matrix = theirs.split()
    if len(matrix) != 2:
        return row
    return replace(row, dims=f"{ours} -> {' '.join((stack, *reversed(matrix)))}")


def name_pattern(name: str) -> str:
    """Return a tensor name or name template with `#` in place of layer and expert indices."""
    return re.sub(r"(?<=\.)(?:\d+|\{layer\}|\{expert\})(?=\.)", "#", name)


def _if_present(rows: _Rows, other: _Rows, present: set[str]) -> _Rows:
    """Return the rows `other` if the files contain all tensors of these rows; otherwise, no rows.

    The result is also empty if the files contain a tensor that `other` would replace.
    """
    wanted = {name_pattern(row.theirs) for row in other.values()}
    replaced = {name_pattern(rows[name].theirs) for name in other} - wanted
    return other if wanted <= present and not replaced & present else {}


def _renamed_rows(rows: _Rows, present: set[str], renamed: Iterable[tuple[str, str, str]]) -> _Rows:
    for old, new, evidence in renamed:
        if any(old in name for name in present):
            continue
        if any(evidence in name for name in present):
            rows = {
                name: replace(row, theirs=row.theirs.replace(old, new))
                for name, row in rows.items()
            }
    return rows


def _stacked(rows: _Rows) -> Iterator[_Rows]:
    for parts, targets in _STACKED:
        mine = {f"experts.{part}": rows.get(f"experts.{part}") for part in parts}
        found = {name: row for name, row in mine.items() if row and "{expert}" in row.theirs}
        if len(found) < len(parts):
            continue
        for target in targets:
            yield {
                name: replace(row, theirs=row.theirs.partition("{expert}")[0] + target)
                for name, row in found.items()
            }


def _fused(rows: _Rows) -> Iterator[_Rows]:
    by_tensor: dict[str, list[Tensor]] = {}
    for row in rows.values():
        by_tensor.setdefault(row.theirs, []).append(row)
    for parts, joined in _FUSED:
        for first in by_tensor:
            for part in (parts[0], joined):
                stem, found, ending = first.partition(f"{part}.")
                if not found or (stem and not stem.endswith(".")):
                    continue
                apart = [by_tensor.get(f"{stem}{each}.{ending}", []) for each in parts]
                together = by_tensor[first]
                whole = f"{stem}{joined}.{ending}"
                if part == parts[0] and all(apart):
                    yield {row.ours: replace(row, theirs=whole) for each in apart for row in each}
                if part == joined and len(together) == len(parts):
                    yield {
                        row.ours: replace(row, theirs=f"{stem}{each}.{ending}")
                        for row, each in zip(together, parts, strict=True)
                    }
