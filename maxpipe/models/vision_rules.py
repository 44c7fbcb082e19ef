"""Config rules that vision towers for images of different sizes share."""

from __future__ import annotations

from collections.abc import Iterator

from maxpipe.errors import Code, RuleViolation
from maxpipe.io.formatting import format_divisors
from maxpipe.models.config import ModelConfig
from maxpipe.models.layers.patch_tower import PatchTower


def tower_rules(config: ModelConfig, tower: PatchTower) -> Iterator[RuleViolation]:
    """Yield violations of rules for heads, token IDs and multi-token prediction heads."""
    section, code = f"model.{config.family}", Code.MODEL_IMAGES
    if tower.width % tower.num_heads or tower.head_dim % 4:
        action = f"Set {section}.num_vision_heads to {format_divisors(tower.width // 4)}."
        if tower.width % 4:
            action = f"Set {section}.d_vision to a multiple of 4."
        rule = f"must divide {section}.d_vision ({tower.width}) into heads of a multiple of 4 dims."
        yield RuleViolation(code, f"{section}.num_vision_heads", rule, action)
    if tower.image_token_id >= config.vocab_size:
        rule = f"must be less than model.vocab_size ({config.vocab_size})."
        action = f"Set {section}.image_token_id to the ID of the tokenizer's image token."
        yield RuleViolation(code, f"{section}.image_token_id", rule, action)
    if config.mtp_heads:
        rule = "must be 0 in models with a vision tower, because MTP heads cannot predict images."
        action = f"Set model.mtp_heads=0, or {section}.num_vision_layers=0."
        yield RuleViolation(code, "model.mtp_heads", rule, action)
