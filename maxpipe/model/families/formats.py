"""What the Hugging Face folders of several families have in common."""

from __future__ import annotations

from maxpipe.model.huggingface import Fixed, Kept, Key, Row, Tensor


def sizes(
    *,
    layers: int = 32,
    width: int = 4096,
    heads: int = 32,
    kv_heads: int | None = None,
    head_size: int | None = None,
    mlp: int,
    vocab: int = 32000,
    epsilon: float = 1e-6,
    tied: bool = False,
) -> tuple[Row, ...]:
    """Keys of nearly all models, with the defaults of a class of transformers.

    None: as many key/value heads as heads; heads that share the width.
    """
    return (
        Key("num_hidden_layers", "num_layers", layers),
        Key("hidden_size", "d_model", width),
        Key("num_attention_heads", "num_heads", heads),
        Key("num_key_value_heads", "num_kv_heads", kv_heads or (lambda ours: ours["num_heads"])),
        Key(
            "head_dim",
            "head_size",
            head_size or (lambda ours: ours["d_model"] // max(ours["num_heads"], 1)),
        ),
        Key("intermediate_size", "d_mlp", mlp),
        Key("vocab_size", "vocab_size", vocab),
        Key("rms_norm_eps", "norm_epsilon", epsilon),
        Key("tie_word_embeddings", "tied_embeddings", tied),
        Fixed("quantization_config", (None,)),
        *KEPT,
    )


KEPT = tuple(
    Kept(name)
    for name in (
        *("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings"),
        *("attention_dropout", "initializer_range", "use_cache", "pretraining_tp"),
    )
)
"""Keys that change no logits."""

ENDS = (
    Tensor("embedding", "model.embed_tokens.weight", "v d -> v d"),
    Tensor("final_norm.scale", "model.norm.weight", "d -> d"),
    Tensor("head", "lm_head.weight", "d v -> v d"),
)

_LAYER = "model.layers.{layer}."

ATTENTION = (
    Tensor("attention.query", _LAYER + "self_attn.q_proj.weight", "d n h -> (n h) d"),
    Tensor("attention.key", _LAYER + "self_attn.k_proj.weight", "d n h -> (n h) d"),
    Tensor("attention.value", _LAYER + "self_attn.v_proj.weight", "d n h -> (n h) d"),
    Tensor("attention.out", _LAYER + "self_attn.o_proj.weight", "n h d -> d (n h)"),
)

HEAD_NORMS = (
    Tensor("attention.query_norm", _LAYER + "self_attn.q_norm.weight", "h -> h"),
    Tensor("attention.key_norm", _LAYER + "self_attn.k_norm.weight", "h -> h"),
)

MLP = (
    Tensor("mlp.gate", _LAYER + "mlp.gate_proj.weight", "d f -> f d"),
    Tensor("mlp.up", _LAYER + "mlp.up_proj.weight", "d f -> f d"),
    Tensor("mlp.down", _LAYER + "mlp.down_proj.weight", "f d -> d f"),
)


def experts(prefix: str, router: str, gate: str, up: str, down: str) -> tuple[Tensor, ...]:
    """A router and experts, each a tensor of its own; names below the layer's `prefix`."""
    below, each = f"{_LAYER}{prefix}.", f"{_LAYER}{prefix}.experts.{{expert}}."
    return (
        Tensor("experts.router", f"{below}{router}.weight", "d expert -> expert d"),
        Tensor("experts.gate", f"{each}{gate}.weight", "d expert f -> f d"),
        Tensor("experts.up", f"{each}{up}.weight", "d expert f -> f d"),
        Tensor("experts.down", f"{each}{down}.weight", "expert f d -> d f"),
    )


def norms(**names: str) -> tuple[Tensor, ...]:
    """Scales of a layer's norms: part of ours to name of theirs."""
    return tuple(
        Tensor(f"{part}.scale", f"{_LAYER}{name}.weight", "d -> d") for part, name in names.items()
    )
