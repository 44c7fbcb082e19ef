"""Other layouts of a folder's tensors, found by the names that its files hold.

The family's table has the layout of published folders. Training and serving tools save the same
numbers under other prefixes, with projections fused, or with all experts in one tensor
(`save_original_format=False` of transformers 5).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from maxpipe.models.huggingface import HuggingFace, Tensor

_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
"""Modules that torch puts around others anywhere in a name."""

_ROOTS = r"(?:(?:base_model|module|model|language_model|text_model)\.)*"
_BODY = re.compile(rf"{_ROOTS}((?:embed_tokens|layers|norm|rotary_emb)\..*)", re.DOTALL)
_HEAD = re.compile(rf"{_ROOTS}(lm_head\..*)", re.DOTALL)

_FUSED = (
    (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "self_attn.qkv_proj"),
    (("gate_proj", "up_proj"), "gate_up_proj"),
    (("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"), "self_attn.fused_qkv_a_proj_with_mqa"),
)
"""Modules, and the one that has their rows one after the other."""

_STACKED = (
    (("gate", "up"), ("gate_up_proj", "gate_up_proj.weight", "w13_weight")),
    (("down",), ("down_proj", "down_proj.weight", "w2_weight")),
    (("gate",), ("gate_proj", "gate_proj.weight")),
    (("up",), ("up_proj", "up_proj.weight")),
)
"""Parameters of experts, and tensors that have those of all experts: `[E, 2F, D]`, `[E, D, F]`."""

_MOVED = ((".block_sparse_moe.", ".mlp."),)
"""Modules that transformers 5 has renamed."""


def canonical(name: str) -> str:
    """Return the name of a tensor without the prefixes that tools put in front of it."""
    name = _WRAPPERS.sub("", name)
    if body := _BODY.fullmatch(name):
        return f"model.{body[1]}"
    if head := _HEAD.fullmatch(name):
        return head[1]
    return name


def arranged(table: HuggingFace, names: Iterable[str]) -> HuggingFace:
    """Return the table with the rows of those tensors that `names` holds in another layout."""
    present = {_pattern(name) for name in names}
    rows = {row.ours: row for row in table.tensors}
    rows |= _moved(rows, present)
    for other in (*_stacked(rows), *_fused(rows)):
        rows |= _if_present(rows, other, present)
    return replace(table, tensors=tuple(rows.values()))


_Rows = dict[str, Tensor]


def _pattern(name: str) -> str:
    """Return a name, or a table's template of names, without the numbers of layers and experts."""
    return re.sub(r"(?<=\.)(?:\d+|\{layer\}|\{expert\})(?=\.)", "#", name)


def _if_present(rows: _Rows, other: _Rows, present: set[str]) -> _Rows:
    """Return the other rows if the files have all their tensors and none that they replace."""
    wanted = {_pattern(row.theirs) for row in other.values()}
    replaced = {_pattern(rows[name].theirs) for name in other} - wanted
    return other if wanted <= present and not replaced & present else {}


def _moved(rows: _Rows, present: set[str]) -> _Rows:
    for old, new in _MOVED:
        if any(old in name for name in present):
            continue
        if any(f"{new}experts." in name for name in present):
            return {
                name: replace(row, theirs=row.theirs.replace(old, new))
                for name, row in rows.items()
            }
    return {}


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
