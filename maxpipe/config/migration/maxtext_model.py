"""Convert the model keys of MaxText: decoder block, sizes, RoPE and experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from maxpipe.config.migration.conversion import Conversion

_SILU, _GELU = ["silu", "linear"], ["gelu", "linear"]
_DECODER = "decoder_block"

# Values that every convertible model has, and the reason why no other value can be represented.
_REQUIRED: Mapping[str, tuple[Any, str]] = {
    "global_parameter_scale": (1, "maxpipe has no scale for all sizes; set the base_* keys."),
    "use_multimodal": (False, "models support text only."),
    "use_audio": (False, "models support text only."),
    "use_mrope": (False, "multimodal RoPE is not supported."),
    "mhc_expansion_rate": (1, "hyper-connections are not supported."),
    "engram_layers": ([], "engram layers are not supported."),
    "moba": (False, "mixture of block attention is not supported."),
    "share_kv_projections": (False, "shared key/value projections are not supported."),
    "num_kv_shared_layers": (0, "layers that share keys and values are not supported."),
    "hidden_size_per_layer_input": (0, "per-layer embeddings are not supported."),
    "global_head_dim": (0, "a separate head dim in global layers is not supported."),
    "compress_ratios": ([], "compressed attention is not supported."),
    "first_num_hash_layers": (0, "hash routing is not supported."),
    "chunk_attn_window_size": (0, "chunked attention is not supported."),
    "temperature_tuning": (False, "attention temperature tuning is not supported."),
    "nope_layer_interval": (-1, "layers without RoPE are not supported."),
    "trainable_position_size": (-1, "trained position embeddings are not supported."),
    "use_untrainable_positional_embedding": (False, "only RoPE is supported."),
    "attention_output_dim": (-1, "the attention output always has the model's width."),
    "moe_expert_input_dim": (-1, "experts always receive the model's width."),
    "rope_min_timescale": (1, "the smallest RoPE wavelength is fixed."),
}


def convert_model(c: Conversion, model_name: str) -> None:
    """Convert the model, or record why maxpipe cannot represent it."""
    block = c[_DECODER]
    if block not in _FAMILIES:
        known = ", ".join(sorted(_FAMILIES))
        rule = f"is a decoder that maxpipe does not have. Supported decoders: {known}."
        c.reject(_DECODER, rule, "Train this model with MaxText.")
        return
    for key, (value, why) in _REQUIRED.items():
        c.require(key, (value,), why)
    if c.problems:
        return
    _FAMILIES[block](c, model_name)
    if not c.is_default("mtp_num_layers"):
        c.write("model.mtp_heads", c["mtp_num_layers"], "mtp_num_layers")
        c.write("model.mtp_kind", "layer", "mtp_num_layers")
        c.write("model.mtp_loss_weight", c["mtp_loss_scaling_factor"], "mtp_loss_scaling_factor")


def _sizes(c: Conversion, family: str, activation: list[str] = _SILU, **fixed: Any) -> None:
    """Write the keys that all families have, and require the given values of other keys."""
    required = {
        **{"attention_type": "global", "attention_bias": False, "attention_sink": False},
        **{"mlp_bias": False, "use_qk_norm": False, "attn_logits_soft_cap": 0.0},
        **{"final_logits_soft_cap": 0.0, "use_post_attn_norm": False, "use_post_ffw_norm": False},
        **{"num_experts": 1, "partial_rotary_factor": 1.0, "mlp_activations_limit": -1.0},
        "use_indexer": False,
        "mlp_activations": activation,
        **fixed,
    }
    for key, value in required.items():
        if value is not None:
            c.require(key, (value,), f"model.family={family} has no other variant.")
    c.write("model.family", family, _DECODER, *c.if_given("model_name"))
    for ours, theirs in {
        "num_layers": "base_num_decoder_layers",
        "d_model": "base_emb_dim",
        "num_heads": "base_num_query_heads",
        "num_kv_heads": "base_num_kv_heads",
        "head_dim": "head_dim",
        "d_mlp": "base_mlp_dim",
        "vocab_size": "vocab_size",
        "norm_epsilon": "normalization_layer_epsilon",
        "rope_theta": "rope_max_timescale",
    }.items():
        value = c[theirs]
        c.write(f"model.{ours}", float(value) if ours == "rope_theta" else value, theirs)
    tied = "logits_via_embedding"
    c.write("model.tied_embeddings", c[tied], tied)
    if c[tied] and family not in ("gemma2", "gemma3"):
        why = "with logits_via_embedding, MaxText would divide the logits by sqrt(emb_dim)."
        c.require("normalize_embedding_logits", (False,), why)
    rate = c["dropout_rate"] if c["enable_dropout"] else 0.0
    c.write("model.dropout", rate, "dropout_rate", "enable_dropout")


def _scaled_rope(c: Conversion, family: str, model_name: str) -> None:
    """Write the RoPE scaling of a family with the keys of `RopeConfig`."""
    section, kind = f"model.{family}", c["rope_type"]
    if model_name.startswith("llama3.1") or kind.startswith("llama3.1"):
        if c["rope_use_scale"]:
            # MaxText selects this scaling by the name of the model, with fixed constants.
            theirs = ("rope_type", "rope_use_scale", "model_name")
            c.write(f"{section}.rope_type", "llama3", *theirs)
            c.write(f"{section}.rope_factor", 8.0, *theirs)
            c.write(f"{section}.original_max_position_embeddings", 8192, *theirs)
    elif kind == "yarn":
        _yarn(c, section)
        c.write(f"{section}.rope_type", "yarn", "rope_type")
        fast, slow = float(c["beta_fast"]), float(c["beta_slow"])
        c.write(f"{section}.rope_beta_fast", fast, "beta_fast")
        c.write(f"{section}.rope_beta_slow", slow, "beta_slow")
        c.write(f"{section}.rope_truncate", c["rope_truncate"], "rope_truncate")
        if not c["rope_attention_scaling"]:
            c.write(f"{section}.rope_attention_factor", 1.0, "rope_attention_scaling")
    elif c["rope_linear_scaling_factor"] != 1:
        theirs = "rope_linear_scaling_factor"
        c.write(f"{section}.rope_type", "linear", theirs)
        c.write(f"{section}.rope_factor", c[theirs], theirs)
    elif model_name.startswith(("llama3.2", "llama3.3")):
        why = f"MaxText does not scale RoPE for {model_name}, unlike the published model; "
        c.differs("rope_type", f"{why}use rope_type=llama3.1 for model.llama.rope_factor=8.")


def _yarn(c: Conversion, section: str) -> None:
    c.write(f"{section}.rope_factor", float(c["rope_factor"]), "rope_factor")
    theirs = "original_max_position_embeddings"
    c.write(f"{section}.{theirs}", c[theirs], theirs)


def _fixed_yarn(c: Conversion, section: str, **fixed: Any) -> None:
    """Write YaRN scaling of a family whose other YaRN constants are fixed."""
    if c["rope_type"] == "default":
        return
    c.require("rope_type", ("yarn",), f"{section} supports only YaRN.")
    for key, value in {"beta_fast": 32, "beta_slow": 1, **fixed}.items():
        c.require(key, (value,), f"{section} has this constant.")
    _yarn(c, section)


def _dense(family: str, **fixed: Any) -> Callable[[Conversion, str], None]:
    def convert(c: Conversion, model_name: str) -> None:
        _sizes(c, family, **fixed)
        _scaled_rope(c, family, model_name)

    return convert


def _gemma(c: Conversion, family: str, **fixed: Any) -> None:
    norms = {"use_post_attn_norm": True, "use_post_ffw_norm": True}
    _sizes(c, family, _GELU, **norms, **fixed)
    c.require("logits_via_embedding", (True,), f"{family} always ties the output projection.")
    why = f"{family} scales embeddings and logits."
    c.require("normalize_embedding_logits", (True,), why)
    theirs = "sliding_window_size"
    c.write(f"model.{family}.sliding_window", c[theirs], theirs)


def _gemma2(c: Conversion, model_name: str) -> None:
    _gemma(c, "gemma2", attn_logits_soft_cap=None, final_logits_soft_cap=None)
    theirs = "base_num_decoder_layers"
    pairs = "counts layers, but a Gemma 2 layer of MaxText is a pair of local and global layers."
    c.write("model.num_layers", 2 * c[theirs], theirs, differs=pairs)
    for ours, theirs in (
        ("attn_logit_softcapping", "attn_logits_soft_cap"),
        ("final_logit_softcapping", "final_logits_soft_cap"),
    ):
        c.write(f"model.gemma2.{ours}", c[theirs], theirs)
    _scaled_rope(c, "gemma2", model_name)


def _gemma3(c: Conversion, model_name: str) -> None:
    _gemma(c, "gemma3")
    c.require("rope_type", ("default",), "gemma3 supports only linear scaling of RoPE.")
    theirs = "rope_linear_scaling_factor"
    c.write("model.gemma3.rope_factor", c[theirs], theirs)
    theirs, local = "local_rope_max_timescale", c["local_rope_max_timescale"]
    theta = local if local > 0 else c["rope_max_timescale"]
    c.write("model.gemma3.local_rope_theta", float(theta), theirs)
    if model_name == "gemma3-27b":
        # As in `get_query_pre_attn_scalar` of MaxText, which depends on the name of the model.
        scalar = float(c["base_emb_dim"] // c["base_num_query_heads"])
        c.write("model.gemma3.query_pre_attn_scalar", scalar, "model_name")


def _experts(c: Conversion, section: str, layers: int) -> None:
    """Write the keys of experts, in a model with this number of layers with experts."""
    c.write(f"{section}.num_experts", c["num_experts"], "num_experts")
    c.write(f"{section}.top_k", c["num_experts_per_tok"], "num_experts_per_tok")
    width = c["base_moe_mlp_dim"]
    c.write(f"{section}.d_expert", max(0, width), "base_moe_mlp_dim")
    theirs = "load_balance_loss_weight"
    c.write(f"{section}.{theirs}", c[theirs] * c["num_experts_per_tok"] / layers, theirs)
    if c[theirs]:
        c.differs(
            theirs,
            f"{section}.{theirs} is the weight in each layer, of a loss that is 1 for balanced "
            f"experts: the value is multiplied by num_experts_per_tok and divided by {layers} "
            "layers, over which MaxText averages.",
        )
    if c["num_moe_token_chunks"] > 1:
        c.write(f"{section}.all_to_all_chunks", c["num_moe_token_chunks"], "num_moe_token_chunks")
    limit = c["capacity_factor"]
    is_dropless = limit <= 0 or c["sparse_matmul"]
    c.write(f"{section}.capacity_factor", 0.0 if is_dropless else limit, "capacity_factor")
    if is_dropless and limit > 0:
        why = f"{section}.capacity_factor is 0: MaxText drops no token with sparse_matmul=true."
        c.differs("capacity_factor", why)


def _mixtral(c: Conversion, model_name: str) -> None:
    _sizes(c, "moe", num_experts=None)
    c.require("routed_bias", (False,), "Mixtral's router has no bias.")
    c.write("model.moe.num_dense_layers", 0, _DECODER)
    _experts(c, "model.moe", c["base_num_decoder_layers"])
    c.write("model.moe.norm_topk_prob", True, "norm_topk_prob")  # MaxText applies a softmax
    _scaled_rope(c, "moe", model_name)


def _qwen3_moe(c: Conversion, model_name: str) -> None:
    _sizes(c, "qwen3_moe", use_qk_norm=True, num_experts=None)
    _experts(c, "model.qwen3_moe", c["base_num_decoder_layers"])
    c.write("model.qwen3_moe.norm_topk_prob", True, "norm_topk_prob")
    _scaled_rope(c, "qwen3_moe", model_name)


def _qwen3_next(c: Conversion, model_name: str) -> None:
    _sizes(c, "qwen3_next", num_experts=None, partial_rotary_factor=None, shared_experts=1)
    section = "model.qwen3_next"
    _experts(c, section, c["base_num_decoder_layers"])
    c.require("rope_type", ("default",), f"the RoPE of {section} is not scaled by MaxText.")
    c.require("use_qk_norm_in_gdn", (True,), f"{section} normalizes queries and keys.")
    c.write(f"{section}.norm_topk_prob", True, "norm_topk_prob")
    theirs = "inhomogeneous_layer_cycle_interval"
    c.write(f"{section}.full_attention_interval", c[theirs], theirs)
    for ours, theirs in {
        "linear_num_key_heads": "gdn_num_key_heads",
        "linear_num_value_heads": "gdn_num_value_heads",
        "linear_key_head_dim": "gdn_key_head_dim",
        "linear_value_head_dim": "gdn_value_head_dim",
        "linear_conv_kernel_dim": "gdn_conv_kernel_dim",
        "gdn_chunk_size": "gdn_chunk_size",
    }.items():
        c.write(f"{section}.{ours}", c[theirs], theirs)
    dims = int(c["head_dim"] * c["partial_rotary_factor"])
    c.write(f"{section}.rotary_dim", dims, "partial_rotary_factor")
    c.write(f"{section}.d_shared_expert", c["base_moe_mlp_dim"], "shared_experts")


def _gpt_oss(c: Conversion, model_name: str) -> None:
    _sizes(
        c,
        "gpt_oss",
        ["sigmoid", "linear"],
        **{"attention_bias": True, "attention_sink": True, "mlp_bias": True, "routed_bias": True},
        **{"num_experts": None, "mlp_activations_limit": None},
        inhomogeneous_layer_cycle_interval=2,
    )
    section = "model.gpt_oss"
    _experts(c, section, c["base_num_decoder_layers"])
    c.write(f"{section}.sliding_window", c["sliding_window_size"], "sliding_window_size")
    c.write(f"{section}.swiglu_limit", c["mlp_activations_limit"], "mlp_activations_limit")
    _fixed_yarn(c, section, rope_truncate=False, rope_attention_scaling=True)


def _deepseek(c: Conversion, model_name: str) -> None:
    family = "deepseek_v32" if c["use_indexer"] else "deepseek"
    _sizes(c, family, attention_type="mla", num_experts=None, use_indexer=None)
    section, layers = f"model.{family}", c["base_num_decoder_layers"]
    if c["use_indexer"]:
        _indexer(c, section)
    theirs = ("qk_nope_head_dim", "qk_rope_head_dim")
    c.write("model.head_dim", sum(c[key] for key in theirs), *theirs)
    same = ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "v_head_dim")
    for key in (*same, "routed_scaling_factor"):
        c.write(f"{section}.{key}", c[key], key)
    c.write(f"{section}.num_dense_layers", c["first_num_dense_layers"], "first_num_dense_layers")
    c.write(f"{section}.num_shared_experts", c["shared_experts"], "shared_experts")
    _experts(c, section, max(1, layers - c["first_num_dense_layers"]))
    scores = c["routed_score_func"]
    c.require("routed_score_func", ("softmax", "sigmoid"), "other scores are not supported.")
    c.write(f"{section}.score_func", scores, "routed_score_func")
    c.write(f"{section}.norm_topk_prob", scores == "sigmoid", "routed_score_func")
    if c["routed_bias"]:
        c.write(f"{section}.expert_bias", True, "routed_bias")
        rate = "routed_bias_update_rate"
        c.write(f"{section}.expert_bias_update_rate", c[rate], rate)
    if model_name.startswith("deepseek3") and c["n_routing_groups"] > 0:
        c.write(f"{section}.num_expert_groups", c["n_routing_groups"], "n_routing_groups")
        groups = "topk_routing_group"
        c.write(f"{section}.expert_groups_per_token", c[groups], groups)
        c.write(f"{section}.group_scores", "top2", "n_routing_groups")
    fast = c["beta_fast"]
    _fixed_yarn(c, section, beta_fast=fast, rope_truncate=True, rope_attention_scaling=False)
    if c["rope_type"] == "yarn":
        c.write(f"{section}.rope_beta_fast", float(fast), "beta_fast")
        lengths = ("max_position_embeddings", "original_max_position_embeddings")
        if c["rope_factor"] != 1 and c[lengths[0]] <= c[lengths[1]]:
            rule = f"must exceed {lengths[1]} with rope_factor above 1."
            c.reject(lengths[0], rule, "Set rope_factor=1 for a context that is not extended.")
        for ours in ("mscale", "mscale_all_dim"):
            c.write(f"{section}.{ours}", float(c["mscale"]), "mscale", *lengths)


def _indexer(c: Conversion, section: str) -> None:
    """Write the keys of sparse attention. MaxText trains the indexer only if its loss has a
    weight.
    """
    why = f"{section} selects exactly the keys with the largest scores."
    c.require("indexer_use_approx_top_k", (False,), why)
    for ours, theirs in {
        "index_topk": "indexer_topk",
        "num_index_heads": "indexer_n_heads",
        "index_head_dim": "indexer_head_dim",
        "indexer_loss_weight": "indexer_loss_scaling_factor",
    }.items():
        c.write(f"{section}.{ours}", c[theirs], theirs)
    theirs = ("indexer_sparse_training", "indexer_loss_scaling_factor")
    is_dense = c[theirs[1]] > 0 and not c[theirs[0]]
    c.write(f"{section}.indexer_stage", "dense" if is_dense else "sparse", *theirs)


_FAMILIES: Mapping[str, Callable[[Conversion, str], None]] = {
    "default": _dense("llama"),
    "llama2": _dense("llama"),
    "mistral": _dense("mistral"),
    "mixtral": _mixtral,
    "qwen2": _dense("qwen2", attention_bias=True),
    "qwen3": _dense("qwen3", use_qk_norm=True),
    "qwen3_moe": _qwen3_moe,
    "qwen3_next": _qwen3_next,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gpt_oss": _gpt_oss,
    "deepseek": _deepseek,
}
