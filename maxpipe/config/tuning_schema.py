"""The declaration of the config keys of fine-tuning, beside those of `schema.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterConfig:
    """Low-rank changes of a frozen model's matrices, which are trained in place of it."""

    rank: int = 0
    """Rank of each change (LoRA, arXiv:2106.09685): of a matrix W of `K x N` the product of a
    `K x rank` and a `rank x N` matrix. 0 trains the model itself."""
    kind: Literal["lora", "dora"] = "lora"
    """`lora` adds the change to the matrix. `dora` norms each column of the sum besides, and
    multiplies it with a length that is trained, too (arXiv:2402.09353)."""
    alpha: float = 16.0
    """Changes are multiplied with `alpha / rank`."""
    scale_by: Literal["rank", "root"] = "rank"
    """`root` multiplies them with `alpha / sqrt(rank)` (rsLoRA, arXiv:2312.03732)."""
    dropout: float = 0.0
    """Fraction of the inputs of changes set to zero in training."""
    targets: list[str] = field(default_factory=list, hash=False)  # a list has no hash
    """Matrices that get a change: patterns over their names in checkpoints, as in `model.frozen`,
    such as `layers.attention.*`. Empty: all that can have one, the projections of attention and of
    MLPs. Embeddings, norms, routers and experts that are chosen by one have none."""
    base: Literal["default", "int8", "nf4"] = "default"
    """How the frozen matrices of layers are held: in `model.param_dtype`; in `int8`, with a scale
    for each row; or in `nf4`, 4 bits with a scale for each 64 numbers (QLoRA, arXiv:2305.14314).
    They are gathered as they are held and multiplied in `model.compute_dtype`."""
