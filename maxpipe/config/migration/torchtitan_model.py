"""Convert the model that a torchtitan config selects by name and flavor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import date
from typing import Any

from maxpipe.config.migration.conversion import Conversion
from maxpipe.config.rules import did_you_mean

_FLAVOR, _NAME = "model.flavor", "model.name"

Args = Mapping[str, Any]
"""Arguments of a torchtitan model, including its defaults."""


def convert_model(c: Conversion, tables: Mapping[str, Any], before: date | None) -> None:
    """Write the model section, or record why maxpipe cannot represent the model.

    `before` is a date before which the config was written, or None.
    """
    name, models = c[_NAME], tables["models"]
    known = "llama3" if name == "llama3_ft" else name
    if known not in models:
        supported = ", ".join(models)
        rule = f"is a model that maxpipe does not have. Supported models: {supported}."
        c.reject(_NAME, rule, "Train this model with torchtitan.")
        return
    flavors = models[known]["flavors"]
    if c[_FLAVOR] not in flavors:
        guess = did_you_mean(c[_FLAVOR], flavors)
        action = f"Did you mean {guess}?" if guess else f"Use one of {', '.join(flavors)}."
        c.reject(_FLAVOR, f"is not a flavor of {name}.", action)
        return
    args: dict[str, Any] = {**models[known]["defaults"], **flavors[c[_FLAVOR]]}
    args["moe_args"] = {**tables["experts"], **args.get("moe_args", {})}
    if before is not None:
        c.differs(_FLAVOR, f"the flavor has the values of {tables['date']}.")
    for each in tables["changed_models"]:
        if each["model"] == known and before is not None and before <= each["date"]:
            args |= each["args"]
            why = f"Keys of the file are older than {before}, so {', '.join(each['args'])} has its "
            c.differs(_FLAVOR, f"{why}value before {each['date']}.")
    _MODELS[known](c, args)
    if args["attn_mask_type"] == "causal":
        why = "attention is limited to a document; this flavor also attends to earlier documents."
        c.differs(_FLAVOR, why)


_MODEL_KEYS = {
    "num_layers": "n_layers",
    "d_model": "dim",
    "num_heads": "n_heads",
    "vocab_size": "vocab_size",
    "norm_epsilon": "norm_eps",
}
"""Keys of the model section with an argument of the same meaning in all models."""


def _write_model(c: Conversion, family: str, args: Args, **values: Any) -> None:
    """Write the model section: the keys of all models, and `values` of one."""
    shared = {ours: args[theirs] for ours, theirs in _MODEL_KEYS.items()}
    rope_theta = float(args["rope_theta"])
    _write(c, "model", family=family, **shared, rope_theta=rope_theta, **values)


def _write(c: Conversion, section: str, **values: Any) -> None:
    for name, value in values.items():
        c.write(f"{section}.{name}", value, _NAME, _FLAVOR)


def _llama3(c: Conversion, args: Args) -> None:
    width, heads = args["dim"], args["n_heads"]
    # As in `FeedForward` of torchtitan's Llama 3.
    hidden = int(2 * (4 * width) / 3)
    if args["ffn_dim_multiplier"] is not None:
        hidden = int(args["ffn_dim_multiplier"] * hidden)
    multiple = args["multiple_of"]
    scaling = args["rope_scaling_args"]
    _write_model(
        c,
        "llama",
        args,
        num_kv_heads=args["n_kv_heads"] or heads,
        head_dim=width // heads,
        d_mlp=multiple * -(-hidden // multiple),
    )
    if scaling is None:
        _write(c, "model.llama", rope_factor=1.0)
        return
    _write(
        c,
        "model.llama",
        rope_type="llama3",
        rope_factor=scaling["scaling_factor"],
        original_max_position_embeddings=scaling["original_max_position_embeddings"],
        rope_beta_fast=scaling["high_freq_factor"],
        rope_beta_slow=scaling["low_freq_factor"],
    )


def _qwen3(c: Conversion, args: Args) -> None:
    family = "qwen3_moe" if args["moe_enabled"] else "qwen3"
    _write_model(
        c,
        family,
        args,
        num_kv_heads=args["n_kv_heads"],
        head_dim=args["head_dim"],
        d_mlp=args["hidden_dim"],
        tied_embeddings=args["enable_weight_tying"],
    )
    if args["moe_enabled"]:
        experts = args["moe_args"]
        section = "model.qwen3_moe"
        _write(c, section, **_experts(args), norm_topk_prob=experts["route_norm"])


def _experts(args: Args) -> dict[str, Any]:
    """Return the keys of experts that have the same meaning in all families."""
    experts = args["moe_args"]
    return {
        "num_experts": experts["num_experts"],
        "top_k": experts["top_k"],
        "d_expert": args["moe_inter_dim"],
        "load_balance_loss_weight": 0.0,
    }


def _deepseek(c: Conversion, args: Args) -> None:
    experts, rope = args["moe_args"], args["qk_rope_head_dim"]
    _write_model(
        c,
        "deepseek",
        args,
        num_kv_heads=args["n_heads"],
        head_dim=args["qk_nope_head_dim"] + rope,
        d_mlp=args["inter_dim"],
    )
    groups = experts["num_expert_groups"] or 1
    _write(
        c,
        "model.deepseek",
        **{name: args[name] for name in ("kv_lora_rank", "q_lora_rank", "v_head_dim")},
        qk_rope_head_dim=rope,
        num_dense_layers=args["n_dense_layers"],
        **_experts(args),
        num_shared_experts=experts["num_shared_experts"],
        score_func=experts["score_func"],
        norm_topk_prob=experts["route_norm"],
        routed_scaling_factor=experts["route_scale"],
        num_expert_groups=groups,
        expert_groups_per_token=experts["num_limited_groups"] or 1,
        group_scores="top2" if groups > 1 else "max",
        expert_bias=experts["load_balance_coeff"] is not None,
        expert_bias_update_rate=experts["load_balance_coeff"] or 0.0,
    )
    # torchtitan extends the context only for sequences longer than the original context.
    length = "training.seq_len"
    if c[length] > args["original_seq_len"]:
        _write(
            c,
            "model.deepseek",
            rope_factor=float(args["rope_factor"]),
            original_max_position_embeddings=args["original_seq_len"],
            mscale=args["mscale"],
            mscale_all_dim=args["mscale"],
        )
    if args["norm_eps"] != 1e-6:
        why = "the norms of the latents use an epsilon of 1e-6; model.norm_epsilon sets the others."
        c.differs(_NAME, why)


def _gpt_oss(c: Conversion, args: Args) -> None:
    _write_model(
        c,
        "gpt_oss",
        args,
        num_kv_heads=args["n_kv_heads"],
        head_dim=args["head_dim"],
        d_mlp=args["moe_inter_dim"],
    )
    _write(
        c,
        "model.gpt_oss",
        **_experts(args),
        sliding_window=args["sliding_window_size"],
        swiglu_limit=args["swiglu_limit"],
        rope_factor=float(args["rope_factor"]),
        original_max_position_embeddings=args["original_seq_len"],
    )
    if args["moe_args"]["load_balance_coeff"]:
        why = "torchtitan balances experts with a bias, which model.gpt_oss does not have; set "
        c.differs(_NAME, f"{why}model.gpt_oss.load_balance_loss_weight for a balance loss.")


_MODELS: Mapping[str, Callable[[Conversion, Args], None]] = {
    "llama3": _llama3,
    "qwen3": _qwen3,
    "deepseek_v3": _deepseek,
    "gpt_oss": _gpt_oss,
}
