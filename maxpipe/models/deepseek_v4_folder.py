"""Hugging Face format of DeepSeek-V4: tables of config keys and tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from maxpipe.models import huggingface
from maxpipe.models.huggingface import (
    Fixed,
    HuggingFace,
    Kept,
    Key,
    Only,
    Ours,
    Rotary,
    Tensor,
    Theirs,
    UnsupportedError,
)

_SECTION = "deepseek_v4"
_TYPES = {
    "W": "sliding_attention",
    "S": "compressed_sparse_attention",
    "H": "heavily_compressed_attention",
}
"""Names of the attention types in `config.json`."""
_LETTERS = {name: letter for letter, name in _TYPES.items()}
_OF_RATIO = {0: "W", 4: "S", 128: "H"}
"""Attention types in published folders, which list the number of tokens per entry."""
_RATES = {"S": ("compress_rate_csa", 4), "H": ("compress_rate_hca", 128)}
"""Older key of the number of tokens per entry, and its default."""
_KEYS = {"S": "sparse_compress_rate", "H": "heavy_compress_rate"}


def _whole(pattern: str, layers: int) -> str:
    repeated = pattern[-2:]
    return (pattern + repeated * layers)[:layers]


def _shortest(pattern: str) -> str:
    """Return the shortest pattern whose last two letters repeat to the given one."""
    count = next(
        n for n in range(1, len(pattern) + 1) if _whole(pattern[:n], len(pattern)) == pattern
    )
    return pattern[:count]


@dataclass(frozen=True)
class _AttentionTypes:
    """Key-table row for the attention type of each layer and the numbers of tokens per entry."""

    names = (
        "layer_types",
        "compress_ratios",
        "compress_rates",
        *(key for key, _ in _RATES.values()),
    )

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        """Return the pattern and the compression rates."""
        count = ours["num_layers"]
        types, ratios = theirs.get("layer_types"), theirs.get("compress_ratios")
        if types is not None:
            self._check("layer_types", types, count, _LETTERS)
            if len(types) != count:
                raise UnsupportedError("layer_types", types, f"must list {count} layers.")
            pattern = "".join(_LETTERS[name] for name in types)
        elif ratios is not None:
            self._check("compress_ratios", ratios, count, _OF_RATIO)
            pattern = "".join(_OF_RATIO[ratio] for ratio in ratios[:count])
        else:
            pattern = ("HH" + "HS" * count)[:count]  # as in transformers
        rates = huggingface.an_object(theirs, "compress_rates")
        found: dict[str, Any] = {f"{_SECTION}.attention_pattern": _shortest(pattern)}
        for letter, (key, default) in _RATES.items():
            rate = theirs.get(key)
            rate = (
                rates.get(_TYPES[letter], default if not rates else None) if rate is None else rate
            )
            if rate is None:
                rule = f"must have an entry {_TYPES[letter]!r}."
                raise UnsupportedError("compress_rates", dict(rates), rule)
            found[f"{_SECTION}.{_KEYS[letter]}"] = rate
        return found

    def write(self, ours: Ours) -> Theirs:
        pattern = _whole(ours[f"{_SECTION}.attention_pattern"], ours["num_layers"])
        rates = {_TYPES[letter]: ours[f"{_SECTION}.{key}"] for letter, key in _KEYS.items()}
        return {"layer_types": [_TYPES[letter] for letter in pattern], "compress_rates": rates}

    @staticmethod
    def _check(key: str, entries: Any, count: int, known: Any) -> None:
        valid = isinstance(entries, list) and len(entries) >= count
        if not valid or not all(
            isinstance(entry, str | int) and not isinstance(entry, bool) and entry in known
            for entry in entries
        ):
            names = ", ".join(map(repr, known))
            raise UnsupportedError(key, entries, f"must list {count} layers, each one of {names}.")


@dataclass(frozen=True)
class _RouterTypes:
    """Key-table row for the layers in which a table selects the experts: the leading layers."""

    names = ("mlp_layer_types", "num_hash_layers")

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        """Return the number of leading layers whose experts are selected by a table."""
        types, count = theirs.get("mlp_layer_types"), ours["num_layers"]
        hashed = theirs.get("num_hash_layers")
        hashed = min(3, count) if hashed is None else hashed
        if types is not None:
            hashed = types.count("hash_moe") if isinstance(types, list) else 0
            if types != self._types(hashed, count):
                rule = f"must list {count} layers: 'hash_moe' first and 'moe' last."
                raise UnsupportedError("mlp_layer_types", types, rule)
        return {f"{_SECTION}.num_hash_layers": hashed}

    def write(self, ours: Ours) -> Theirs:
        hashed = ours[f"{_SECTION}.num_hash_layers"]
        return {
            "mlp_layer_types": self._types(hashed, ours["num_layers"]),
            "num_hash_layers": hashed,
        }

    @staticmethod
    def _types(hashed: int, layers: int) -> list[str]:
        return ["hash_moe"] * hashed + ["moe"] * (layers - hashed)


@dataclass(frozen=True)
class _RopeDims:
    """Key-table row for the number of RoPE dims, which transformers computes from a fraction."""

    names = ("partial_rotary_factor", "qk_rope_head_dim")

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        """Return the number of RoPE dims per head."""
        share, count = (theirs.get(name) for name in self.names)
        if share is None:
            count = ours["head_dim"] * 64 // 512 if count is None else count
        else:
            count = dims_of(self.names[0], share, ours)
        return {f"{_SECTION}.qk_rope_head_dim": count}

    def write(self, ours: Ours) -> Theirs:
        return {
            "qk_rope_head_dim": ours[f"{_SECTION}.qk_rope_head_dim"],
            "partial_rotary_factor": share_of(ours),
        }


def dims_of(key: str, share: Any, ours: Ours) -> int:
    """Return the number of RoPE dims for a fraction of the head dim."""
    if type(share) not in (int, float) or not 0 < share <= 1:
        raise UnsupportedError(key, share, "must be a number above 0 and at most 1.")
    return int(ours["head_dim"] * share)


def share_of(ours: Ours) -> float:
    """Return the fraction of rotated dims, from which transformers computes their number."""
    count, size = ours[f"{_SECTION}.qk_rope_head_dim"], ours["head_dim"]
    share = count / size
    return share if int(size * share) == count else (count + 0.5) / size


@dataclass(frozen=True)
class _Share:
    """Key-table row for the fraction of rotated dims of a layer type, which all types share."""

    names = ("partial_rotary_factor",)

    def read(self, theirs: Theirs, ours: Ours) -> Ours:
        """Check the fraction."""
        share = theirs.get(self.names[0])
        if share is not None:
            wanted = ours[f"{_SECTION}.qk_rope_head_dim"]
            if dims_of(self.names[0], share, ours) != wanted:
                rule = f"must select {wanted} of the {ours['head_dim']} dims, as in all layers."
                raise UnsupportedError(f"rope_parameters.*.{self.names[0]}", share, rule)
        return {}

    def write(self, ours: Ours) -> Theirs:
        return {self.names[0]: share_of(ours)}


class _Rope(Rotary):
    """Rotary keys of one layer type, which always state the fraction of rotated dims."""

    def write(self, ours: Ours) -> Theirs:
        written = dict(super().write(ours))
        inner = {**written["rope_parameters"][self.layers], **_Share().write(ours)}
        return written | {"rope_parameters": {self.layers: inner}}


_YARN = (
    Key("factor", f"{_SECTION}.rope_factor"),
    Key("original_max_position_embeddings", f"{_SECTION}.original_max_position_embeddings"),
    Fixed("attention_factor", (1.0, 1)),
    Fixed("beta_fast", (32, 32.0), 32),
    Fixed("beta_slow", (1, 1.0), 1),
    Fixed("truncate", (True,), True),
)

_KEY_ROWS = (
    *(
        row
        for row in huggingface.sizes(
            layers=43,
            width=4096,
            heads=64,
            kv_heads=1,
            head_dim=512,
            mlp=2048,
            vocab=129280,
            mlp_key="moe_intermediate_size",
        )
    ),
    Only(f"{_SECTION}.d_expert", 0),
    _AttentionTypes(),
    _RouterTypes(),
    _RopeDims(),
    _Rope(
        "rope_theta",
        10000.0,
        {"default": (_Share(),)},
        unscaled={},
        layers="main",
        reads_flat=True,
    ),
    _Rope(
        f"{_SECTION}.compress_rope_theta",
        160000.0,
        {"default": (_Share(),), "yarn": (_Share(), *_YARN)},
        unscaled={f"{_SECTION}.rope_factor": 1.0},
        select_type=lambda ours: "default" if ours[f"{_SECTION}.rope_factor"] == 1 else "yarn",
        layers="compress",
        legacy_theta_key="compress_rope_theta",
        reads_flat=True,
    ),
    Key("sliding_window", f"{_SECTION}.sliding_window", 128),
    Key("q_lora_rank", f"{_SECTION}.q_lora_rank", 1024),
    Key("o_groups", f"{_SECTION}.o_groups", 8),
    Key("o_lora_rank", f"{_SECTION}.o_lora_rank", 1024),
    Key("index_n_heads", f"{_SECTION}.num_index_heads", 64),
    Key("index_head_dim", f"{_SECTION}.index_head_dim", 128),
    Key("index_topk", f"{_SECTION}.index_topk", 512),
    Key("n_routed_experts", f"{_SECTION}.num_experts", 256, also="num_local_experts"),
    Key("num_experts_per_tok", f"{_SECTION}.top_k", 6),
    Key("routed_scaling_factor", f"{_SECTION}.routed_scaling_factor", 1.5),
    Key("swiglu_limit", f"{_SECTION}.swiglu_limit", 10.0),
    Key("hc_mult", f"{_SECTION}.num_residual_streams", 4),
    Key("hc_sinkhorn_iters", f"{_SECTION}.sinkhorn_iterations", 20),
    Key("hc_eps", f"{_SECTION}.hyper_connection_epsilon", 1e-6),
    Fixed("n_shared_experts", (1,), 1),
    Fixed("scoring_func", ("sqrtsoftplus",), "sqrtsoftplus"),
    Only(f"{_SECTION}.score_func", "sqrtsoftplus"),
    Fixed("norm_topk_prob", (True,), True),
    Only(f"{_SECTION}.norm_topk_prob", True),
    Fixed("topk_method", ("noaux_tc",), "noaux_tc"),
    Only(f"{_SECTION}.expert_bias", True),
    Only(f"{_SECTION}.num_expert_groups", 1),
    Fixed("hidden_act", ("silu",), "silu"),
    Fixed("attention_bias", (False,), False),
    Fixed("mlp_bias", (False,), False),
    *huggingface.BALANCED,
    # Multi-token prediction layers are ignored, as in transformers.
    Kept("num_nextn_predict_layers"),
    # Exports have dequantized weights and no dtype of experts.
    Fixed("expert_dtype", (None, "fp8", "fp4")),
)

_LAYER = "model.layers.{layer}."
_ATTENTION, _EXPERTS = f"{_LAYER}attn.", f"{_LAYER}ffn."


def _compression(name: str, prefix: str) -> tuple[Tensor, ...]:
    """Return the tensor-table rows of a compression."""
    return (
        Tensor(f"attention.{name}_value", f"{prefix}wkv.weight", "d h -> h d"),
        Tensor(f"attention.{name}_gate", f"{prefix}wgate.weight", "d h -> h d"),
        Tensor(f"attention.{name}_bias", f"{prefix}ape", "t h -> t h"),
        Tensor(f"attention.{name}_norm", f"{prefix}norm.weight", "h -> h"),
    )


def _connection(ours: str, theirs: str) -> tuple[Tensor, ...]:
    """Return the tensor-table rows of a hyper-connection."""
    return (
        Tensor(f"{ours}.project", f"{theirs}fn", "d c -> c d"),
        Tensor(f"{ours}.bias", f"{theirs}base", "c -> c"),
        Tensor(f"{ours}.scale", f"{theirs}scale", "s -> s"),
    )


_INDEXER = f"{_ATTENTION}indexer."
_TENSORS = (
    *huggingface.ENDS[:2],
    Tensor("head", "head.weight", "d v -> v d"),
    *_connection("final_norm.stream_head", "model.hc_head.hc_"),
    Tensor("attention_norm.scale", f"{_LAYER}attn_norm.weight", "d -> d"),
    Tensor("experts_norm.scale", f"{_LAYER}ffn_norm.weight", "d -> d"),
    *_connection("attention_connection", f"{_LAYER}hc_attn_"),
    *_connection("experts_connection", f"{_LAYER}hc_ffn_"),
    Tensor("attention.query_down", f"{_ATTENTION}wq_a.weight", "d r -> r d"),
    Tensor("attention.query_norm", f"{_ATTENTION}q_norm.weight", "r -> r"),
    Tensor("attention.query_up", f"{_ATTENTION}wq_b.weight", "r n h -> (n h) r"),
    Tensor("attention.key_value", f"{_ATTENTION}wkv.weight", "d h -> h d"),
    Tensor("attention.key_value_norm", f"{_ATTENTION}norm.weight", "h -> h"),
    Tensor("attention.sinks", f"{_ATTENTION}attn_sink", "n -> n"),
    Tensor("attention.group_out", f"{_ATTENTION}wo_a.weight", "g k r -> (g r) k"),
    Tensor("attention.out", f"{_ATTENTION}wo_b.weight", "g r d -> d (g r)"),
    *_compression("entry", f"{_ATTENTION}compressor."),
    *_compression("index", f"{_INDEXER}compressor."),
    Tensor("attention.index_query", f"{_INDEXER}wq_b.weight", "r n h -> (n h) r"),
    Tensor("attention.index_weights", f"{_INDEXER}weights_proj.weight", "d n -> n d"),
    Tensor("experts.router", f"{_EXPERTS}gate.weight", "d e -> e d"),
    Tensor("experts.router_bias", f"{_EXPERTS}gate.bias", "e -> e"),
    Tensor("experts.token_experts", f"{_EXPERTS}gate.tid2eid", "v k -> v k"),
    Tensor("experts.gate", f"{_EXPERTS}experts.{{expert}}.w1.weight", "d expert f -> f d"),
    Tensor("experts.up", f"{_EXPERTS}experts.{{expert}}.w3.weight", "d expert f -> f d"),
    Tensor("experts.down", f"{_EXPERTS}experts.{{expert}}.w2.weight", "expert f d -> d f"),
    Tensor("experts.shared_gate", f"{_EXPERTS}shared_experts.w1.weight", "d f -> f d"),
    Tensor("experts.shared_up", f"{_EXPERTS}shared_experts.w3.weight", "d f -> f d"),
    Tensor("experts.shared_down", f"{_EXPERTS}shared_experts.w2.weight", "f d -> d f"),
)

HUGGINGFACE = HuggingFace(
    "DeepseekV4ForCausalLM",
    "deepseek_v4",
    keys=_KEY_ROWS,
    tensors=_TENSORS,
    unused=("*.rotary_emb.inv_freq", "mtp.*", "model.mtp.*"),
    duplicate_keys=(huggingface.Twice("num_local_experts", "n_routed_experts"),),
    # Published folders have the first names, and transformers saves the second ones.
    other_names=(
        ("embed.weight", "model.embed_tokens.weight"),
        (".attn.kv_norm.weight", ".attn.norm.weight"),
        *((f"hc_head_{part}", f"model.hc_head.hc_{part}") for part in ("fn", "base", "scale")),
    ),
)
"""The class of transformers that is equivalent to the family."""
