"""Every model family in the engine against autodiff of the unpipelined model."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from maxpipe.models.deepseek import DeepseekConfig
from maxpipe.models.deepseek_v4 import DeepseekV4Config
from maxpipe.models.deepseek_v32 import DeepseekV32Config
from maxpipe.models.falcon_h1 import FalconH1Config
from maxpipe.models.gemma2 import Gemma2Config
from maxpipe.models.gemma3 import Gemma3Config
from maxpipe.models.gemma4 import Gemma4Config
from maxpipe.models.glm4_moe import Glm4MoeConfig
from maxpipe.models.glm_moe_dsa import GlmMoeDsaConfig
from maxpipe.models.gpt_oss import GptOssConfig
from maxpipe.models.granite import GraniteConfig
from maxpipe.models.granite4 import Granite4Config
from maxpipe.models.kimi_linear import KimiLinearConfig
from maxpipe.models.llama4 import Llama4Config
from maxpipe.models.minimax_m2 import MinimaxM2Config
from maxpipe.models.ministral3 import Ministral3Config
from maxpipe.models.mistral import MistralConfig
from maxpipe.models.moe import MoeConfig, RoutedConfig
from maxpipe.models.nemotron_h import NemotronHConfig
from maxpipe.models.olmo2 import Olmo2Config
from maxpipe.models.olmo3 import Olmo3Config
from maxpipe.models.olmo_hybrid import OlmoHybridConfig
from maxpipe.models.phi3 import Phi3Config
from maxpipe.models.qwen2 import Qwen2Config
from maxpipe.models.qwen3 import Qwen3Config
from maxpipe.models.qwen3_5 import Qwen35Config
from maxpipe.models.qwen3_5_moe import Qwen35MoeConfig
from maxpipe.models.qwen3_moe import Qwen3MoeConfig
from maxpipe.models.qwen3_next import Qwen3NextConfig
from maxpipe.models.registry import FAMILIES
from maxpipe.models.smollm3 import Smollm3Config
from maxpipe.nn import stream_backends, stream_kernels
from maxpipe.nn.attention.interface import shard_axes
from maxpipe.nn.stream_backends import StreamShards
from maxpipe.parallel.sequence_parallel import SequenceParallel
from tests.cases import MODEL, Case, keeping
from tests.pipeline.test_engine import check_gradients, matrix

GEMMA = Gemma3Config(
    sliding_window=3, sliding_window_pattern=3, rope_factor=2.0, query_pre_attn_scalar=7.0
)
# Gemma 4 does not scale scores, so that rounding of a parameter changes gradients by up to 1e-4 if
# the norm epsilon is small. All cases therefore have an epsilon of 1.
GEMMA4 = Gemma4Config(
    sliding_window=3,
    sliding_window_pattern=3,
    global_head_dim=6,
    num_global_kv_heads=2,
    global_rotary_dim=4,
    attention_k_eq_v=True,
    final_logit_softcapping=1.5,
)
GEMMA4_SMALL = replace(
    GEMMA4,
    attention_k_eq_v=False,
    num_kv_shared_layers=3,
    use_double_wide_mlp=True,
    hidden_size_per_layer_input=8,
)
GEMMA4_MOE = replace(GEMMA4, num_experts=5, d_expert=12, load_balance_loss_weight=0.3)
MOE = MoeConfig(
    num_experts=5, num_dense_layers=2, d_expert=12, load_balance_loss_weight=0.3, dispatch="dense"
)
GROUPED = replace(MOE, dispatch="grouped")
ROOM = MoeConfig(
    num_experts=5,
    num_dense_layers=2,
    d_expert=12,
    capacity_factor=0.8,
    num_shared_experts=1,
    score_func="sigmoid",
    routed_scaling_factor=1.5,
    z_loss_weight=0.1,
)
NO_DENSE = MoeConfig(num_experts=3, num_dense_layers=0, norm_topk_prob=False)
V3 = DeepseekConfig(
    num_experts=6,
    num_dense_layers=2,
    d_expert=12,
    num_shared_experts=1,
    kv_lora_rank=6,
    q_lora_rank=10,
    qk_rope_head_dim=2,
    v_head_dim=6,
    rope_factor=4.0,
    original_max_position_embeddings=64,
    mscale=0.7,
    mscale_all_dim=1.2,
    num_expert_groups=3,
    expert_groups_per_token=2,
    group_scores="top2",
    score_func="sigmoid",
    routed_scaling_factor=2.5,
    expert_bias=True,
)
SPARSE: dict[str, Any] = {
    **{field.name: getattr(V3, field.name) for field in fields(V3)},
    **{"index_topk": 3, "num_index_heads": 4, "index_head_dim": 6, "indexer_loss_weight": 0.7},
}
V32 = DeepseekV32Config(**SPARSE)
WARM_UP = replace(V32, indexer_stage="dense")
GLM5 = GlmMoeDsaConfig(**{**SPARSE, "rope_factor": 1.0})
# All residual streams are almost equal at initialization, so that norms almost cancel the gradients
# of their coefficients if the norm epsilon is small.
V4 = DeepseekV4Config(
    attention_pattern="WHSH",
    sliding_window=3,
    sparse_compress_rate=2,
    heavy_compress_rate=3,
    q_lora_rank=10,
    qk_rope_head_dim=2,
    o_groups=4,
    o_lora_rank=6,
    rope_factor=4.0,
    original_max_position_embeddings=64,
    index_topk=2,
    num_index_heads=4,
    index_head_dim=6,
    indexer_loss_weight=0.7,
    num_hash_layers=2,
    swiglu_limit=0.8,
    num_residual_streams=2,
    sinkhorn_iterations=3,
    num_experts=6,
    d_expert=12,
    score_func="sqrtsoftplus",
    routed_scaling_factor=1.5,
    expert_bias=True,
    load_balance_loss_weight=0.3,
)
V4_WARM_UP = replace(V4, indexer_stage="dense")
V2 = replace(V3, q_lora_rank=0, score_func="softmax", group_scores="max", expert_bias=False)
MISTRAL = MistralConfig(sliding_window=3)
QWEN2 = Qwen2Config(rope_factor=4.0, original_max_position_embeddings=64)
QWEN3 = Qwen3Config(rope_factor=2.0)
QWEN3_MOE = Qwen3MoeConfig(
    num_experts=5, d_expert=12, moe_layer_interval=2, dense_layers=[1], load_balance_loss_weight=0.3
)
GPT_OSS = GptOssConfig(
    num_experts=5,
    d_expert=12,
    sliding_window=3,
    swiglu_limit=0.8,
    rope_factor=4.0,
    load_balance_loss_weight=0.3,
)
GEMMA2 = Gemma2Config(sliding_window=3, attn_logit_softcapping=2.0, final_logit_softcapping=1.5)
PHI = Phi3Config(
    sliding_window=4, rope_size=2, rope_short_factor=[1.7], rope_long_factor=[2.5], rope_factor=4.0
)
GRANITE = GraniteConfig(
    embedding_multiplier=3.0, attention_multiplier=0.4, residual_multiplier=0.3, logit_divisor=1.6
)
MAMBA2: dict[str, Any] = {
    "mamba_num_heads": 6,
    "mamba_head_dim": 5,
    "mamba_num_groups": 2,
    "mamba_state_dim": 7,
    "mamba_conv_kernel_dim": 3,
    "mamba_chunk_size": 4,
}
GRANITE4 = Granite4Config(
    attention_layers=[1, 4],
    embedding_multiplier=3.0,
    residual_multiplier=0.3,
    rotary_positions=True,
    **MAMBA2,
)
GRANITE4_MOE = replace(
    GRANITE4, num_experts=5, d_expert=12, load_balance_loss_weight=0.3, rotary_positions=False
)
NEMOTRON = NemotronHConfig(
    hybrid_override_pattern="ME*-",
    num_experts=6,
    d_expert=12,
    d_shared_expert=10,
    score_func="sigmoid",
    num_expert_groups=3,
    expert_groups_per_token=2,
    group_scores="top2",
    routed_scaling_factor=2.5,
    expert_bias=True,
    mamba_min_time_step=0.01,
    **MAMBA2,
)
FALCON = FalconH1Config(
    embedding_multiplier=3.0,
    lm_head_multiplier=0.4,
    key_multiplier=0.7,
    attention_in_multiplier=1.2,
    attention_out_multiplier=0.8,
    ssm_in_multiplier=1.3,
    ssm_out_multiplier=0.6,
    ssm_multipliers=[0.4, 0.7, 1.3, 0.5, 1.6],
    mlp_multipliers=[0.6, 1.4],
    **MAMBA2,
)
FALCON_NORMED = replace(FALCON, mamba_rms_norm=True)
KIMI = KimiLinearConfig(
    attention_layers=[2, 5, 8],
    linear_num_heads=4,
    linear_head_dim=6,
    linear_conv_kernel_dim=3,
    kda_chunk_size=4,
    kv_lora_rank=6,
    qk_rope_head_dim=2,
    v_head_dim=6,
    num_experts=6,
    num_dense_layers=1,
    d_expert=12,
    num_shared_experts=1,
    score_func="sigmoid",
    routed_scaling_factor=2.5,
    expert_bias=True,
)
HYBRID: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 3,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 3,
    "gdn_chunk_size": 4,
    "rotary_dim": 2,
}
HYBRID_MOE: dict[str, Any] = {
    **HYBRID,
    **{"num_experts": 5, "d_expert": 12, "d_shared_expert": 6, "load_balance_loss_weight": 0.3},
}
NEXT = Qwen3NextConfig(**HYBRID_MOE)
# With 3 dims, normalized queries and keys amplify rounding of their parameters to more than 1e-5.
WIDE: dict[str, Any] = {"linear_key_head_dim": 8}
QWEN3_5 = Qwen35Config(**HYBRID | WIDE)
QWEN3_5_MOE = Qwen35MoeConfig(**HYBRID_MOE | WIDE)
OLMO_HYBRID = OlmoHybridConfig(
    attention_layers=[2, 5, 8],
    rotary_positions=True,
    **{name: value for name, value in (HYBRID | WIDE).items() if name != "rotary_dim"},
)
GLM = Glm4MoeConfig(
    num_experts=6,
    num_dense_layers=2,
    d_expert=12,
    num_shared_experts=1,
    rotary_dim=2,
    attention_bias=True,
    use_qk_norm=True,
    score_func="sigmoid",
    num_expert_groups=3,
    expert_groups_per_token=2,
    group_scores="top2",
    routed_scaling_factor=2.5,
    expert_bias=True,
)
MINIMAX = MinimaxM2Config(num_experts=5, d_expert=12, rotary_dim=2, rope_factor=4.0)
OLMO3 = Olmo3Config(
    sliding_window=3,
    sliding_window_pattern=2,
    local_rope_theta=50.0,
    rope_factor=4.0,
    original_max_position_embeddings=4,
)
SMOLLM3 = Smollm3Config(no_rope_layer_interval=2)
MINISTRAL3 = Ministral3Config(rope_factor=4.0, original_max_position_embeddings=3)
LLAMA4 = Llama4Config(
    num_experts=5,
    d_expert=12,
    top_k=2,
    moe_layer_interval=2,
    no_rope_layer_interval=3,
    attention_chunk_size=3,
    floor_scale=2,
    load_balance_loss_weight=0.3,
)
CASES = [
    Case(2, 2, 3, own=GEMMA, tied=True, layers=7, fsdp=2, tensor=2),
    Case(4, 1, 9, own=GEMMA, tied=True, layers=6, schedule="zb_h1", remat="names", data=2),
    Case(3, 2, 4, own=GEMMA, tied=True, layers=8, outside=2, remat="chunk", idle="compute"),
    Case(4, 2, 8, own=GEMMA, tied=True, layers=9, schedule="zb_v", remat="none", dropout=0.3),
    Case(2, 3, 4, own=GEMMA, tied=True, layers=6, gather="window", fsdp=2, idle="compute"),
    Case(2, 1, 2, own=GEMMA, tied=True, layers=5, gather="step", schedule="1f1b", data=2),
    Case(2, 2, 3, own=GEMMA4, epsilon=1.0, tied=True, layers=7, fsdp=2, tensor=2, remat="names"),
    Case(4, 1, 9, own=GEMMA4, epsilon=1.0, tied=True, layers=6, schedule="zb_h1", data=2),
    Case(
        2,
        2,
        5,
        own=GEMMA4_MOE,
        epsilon=1.0,
        tied=True,
        layers=5,
        schedule="zb_v",
        remat="none",
        fsdp=2,
    ),
    Case(
        *(3, 2, 4),
        own=GEMMA4_MOE,
        epsilon=1.0,
        tied=True,
        layers=8,
        outside=2,
        remat="chunk",
        idle="compute",
    ),
    Case(
        2,
        3,
        4,
        own=GEMMA4_MOE,
        epsilon=1.0,
        tied=True,
        layers=6,
        gather="window",
        tensor=2,
        dropout=0.3,
    ),
    Case(
        2,
        2,
        3,
        own=GEMMA4_SMALL,
        epsilon=1.0,
        tied=True,
        layers=7,
        fsdp=2,
        tensor=2,
        remat="names",
    ),
    Case(4, 1, 5, own=GEMMA4_SMALL, epsilon=1.0, tied=True, layers=8, schedule="zb_h1", data=2),
    Case(
        2,
        2,
        5,
        own=GEMMA4_SMALL,
        epsilon=1.0,
        tied=True,
        layers=7,
        schedule="zb_v",
        remat="none",
        fsdp=2,
    ),
    Case(
        *(2, 2, 3),
        own=GEMMA4_SMALL,
        epsilon=1.0,
        tied=True,
        layers=8,
        outside=2,
        remat="chunk",
        idle="compute",
    ),
    Case(
        2,
        1,
        2,
        own=GEMMA4_SMALL,
        epsilon=1.0,
        tied=True,
        layers=7,
        gather="window",
        dropout=0.3,
        ahead=2,
    ),
    Case(2, 2, 3, own=ROOM, layers=7, fsdp=2, tensor=2),
    Case(4, 1, 9, own=GROUPED, layers=6, schedule="zb_h1", remat="names", tensor=2),
    Case(3, 2, 4, own=MOE, layers=9, outside=2, remat="chunk", idle="compute", dropout=0.3),
    Case(4, 2, 8, own=ROOM, layers=9, schedule="zb_v", remat="none", fsdp=2),
    Case(2, 3, 4, own=GROUPED, layers=7, gather="window", fsdp=2, idle="compute", tied=True),
    Case(2, 1, 5, own=MOE, layers=6, outside=3, gather="step", schedule="1f1b", remat="none"),
    Case(2, 2, 3, own=V3, layers=5, fsdp=2, tensor=2, remat="names", schedule="zb_v"),
    Case(2, 2, 3, own=V32, layers=5, fsdp=2, tensor=2, remat="names", schedule="zb_v"),
    Case(4, 1, 5, own=V32, layers=6, schedule="zb_h1", remat="none", data=2, ahead=1, form="layer"),
    Case(2, 1, 3, own=WARM_UP, layers=5, fsdp=2, tensor=2, remat="none", schedule="zb_h1"),
    Case(3, 2, 4, own=GLM5, layers=8, outside=2, remat="chunk", idle="compute", dropout=0.3),
    Case(
        *(2, 2, 3),
        own=V4,
        heads=(8, 1),
        layers=6,
        fsdp=2,
        tensor=2,
        remat="names",
        schedule="zb_v",
        epsilon=0.1,
    ),
    Case(
        *(4, 1, 5),
        own=V4,
        heads=(8, 1),
        layers=8,
        schedule="zb_h1",
        remat="none",
        expert=2,
        epsilon=0.1,
    ),
    Case(2, 1, 3, own=V4_WARM_UP, heads=(8, 1), layers=5, schedule="zb_h1", data=2),
    Case(
        *(3, 2, 4),
        own=V4,
        heads=(8, 1),
        layers=8,
        outside=2,
        remat="chunk",
        idle="compute",
        epsilon=0.1,
    ),
    Case(
        *(2, 1, 3),
        own=V4,
        heads=(8, 1),
        layers=5,
        tensor=2,
        split="sequence",
        dropout=0.3,
        epsilon=0.1,
    ),
    *(
        replace(case, own=own, attention="blockwise")
        for own, case in (
            (V32, Case(2, 2, 3, layers=5, fsdp=2, tensor=2, remat="names", schedule="zb_v")),
            (GLM5, Case(2, 1, 5, layers=6, schedule="zb_h1", remat="none", context=2, tensor=2)),
            (V32, Case(2, 2, 4, layers=7, context=2, data=2, remat="chunk", idle="compute")),
            (V32, Case(2, 1, 3, layers=5, tensor=2, split="sequence", context=2, dropout=0.3)),
        )
    ),
    Case(2, 2, 3, own=QWEN2, layers=5, fsdp=2, tensor=2, remat="names", schedule="zb_v"),
    Case(2, 2, 3, own=Olmo2Config(), layers=5, fsdp=2, tensor=2, remat="names", schedule="zb_v"),
    Case(2, 1, 5, own=GRANITE, tied=True, layers=5, gather="step", schedule="zb_h1", dropout=0.3),
    Case(2, 2, 5, own=QWEN3_MOE, layers=7, fsdp=2, tensor=2, remat="names", schedule="zb_v"),
    Case(4, 1, 7, own=NEXT, epsilon=0.01, layers=9, schedule="zb_h1", remat="names", data=2),
    Case(
        2, 2, 3, own=NEXT, epsilon=0.01, layers=5, schedule="zb_v", remat="none", fsdp=2, tensor=2
    ),
    Case(4, 1, 7, own=GRANITE4_MOE, layers=9, schedule="zb_h1", remat="names", data=2),
    Case(4, 1, 7, own=NEMOTRON, layers=9, schedule="zb_h1", remat="names", data=2),
    Case(2, 2, 3, own=NEMOTRON, layers=5, schedule="zb_v", remat="none", fsdp=2, tensor=2),
    Case(2, 2, 3, own=GRANITE4, tied=True, layers=5, schedule="zb_v", fsdp=2, tensor=2),
    Case(4, 1, 7, own=QWEN3_5, epsilon=0.1, layers=9, schedule="zb_h1", remat="names", data=2),
    Case(
        2,
        2,
        3,
        own=QWEN3_5_MOE,
        epsilon=0.1,
        layers=5,
        schedule="zb_v",
        remat="none",
        fsdp=2,
        tensor=2,
    ),
    Case(2, 2, 3, own=GLM, layers=5, fsdp=2, tensor=2, remat="names", schedule="zb_v"),
    Case(2, 1, 5, own=MINIMAX, layers=5, fsdp=2, tensor=2, remat="none", schedule="zb_h1"),
    Case(2, 1, 5, own=GPT_OSS, layers=5, fsdp=2, tensor=2, remat="none", schedule="zb_h1"),
    Case(2, 2, 5, own=NO_DENSE, layers=5, schedule="v_half", tensor=2, idle="compute"),
    Case(2, 2, 3, own=OLMO3, layers=5, fsdp=2, tensor=2, remat="names", schedule="zb_v"),
    Case(2, 1, 5, own=SMOLLM3, tied=True, layers=5, data=2, remat="none", schedule="zb_h1"),
    Case(2, 2, 3, own=MINISTRAL3, layers=5, fsdp=2, tensor=2, remat="names", schedule="zb_v"),
    Case(2, 2, 3, own=LLAMA4, layers=6, fsdp=2, tensor=2, remat="names", schedule="zb_v"),
    Case(4, 1, 7, own=LLAMA4, layers=9, schedule="zb_h1", remat="none", data=2),
    Case(4, 1, 7, own=KIMI, epsilon=0.01, layers=9, schedule="zb_h1", remat="names", data=2),
    Case(
        2, 2, 3, own=KIMI, epsilon=0.01, layers=5, schedule="zb_v", remat="none", fsdp=2, tensor=2
    ),
    Case(4, 1, 7, own=OLMO_HYBRID, epsilon=1.0, layers=9, schedule="zb_h1", remat="names", data=2),
    Case(
        *(2, 2, 3),
        own=OLMO_HYBRID,
        epsilon=1.0,
        layers=5,
        schedule="zb_v",
        remat="none",
        fsdp=2,
        tensor=2,
    ),
    # Recurrent states pass from one shard of a sequence to the next.
    Case(
        *(2, 1, 3),
        own=KIMI,
        epsilon=0.01,
        layers=5,
        schedule="zb_h1",
        remat="none",
        context=2,
        tensor=2,
        length=20,
    ),
    Case(2, 1, 3, own=NEXT, epsilon=0.01, layers=5, schedule="1f1b", remat="names", context=4),
    Case(
        *(2, 2, 4),
        own=OLMO_HYBRID,
        epsilon=1.0,
        layers=7,
        schedule="zb_v",
        remat="names",
        context=2,
        data=2,
    ),
    Case(2, 2, 4, own=QWEN3_5, epsilon=0.1, layers=7, remat="chunk", context=2, idle="compute"),
    Case(
        *(2, 1, 3),
        own=GRANITE4_MOE,
        layers=5,
        context=2,
        tensor=2,
        split="sequence",
        dropout=0.3,
        length=20,
    ),
    Case(2, 2, 3, own=NEMOTRON, layers=5, schedule="zb_v", remat="none", context=2, fsdp=2),
    # Two branches read one normalized array.
    Case(4, 1, 7, own=FALCON, layers=9, schedule="zb_h1", remat="names", data=2),
    Case(4, 1, 5, own=FALCON_NORMED, layers=7, schedule="1f1b", remat="none", tensor=2),
    Case(2, 1, 3, own=FALCON, tied=True, layers=4, schedule="1f1b", context=2, tensor=2, length=20),
    Case(2, 2, 3, own=FALCON, layers=5, schedule="zb_v", remat="none", context=2, fsdp=2),
    Case(
        *(2, 1, 3),
        own=FALCON_NORMED,
        layers=5,
        schedule="zb_h1",
        context=2,
        tensor=2,
        split="sequence",
        dropout=0.3,
        length=20,
    ),
]


@pytest.mark.parametrize("case", keeping(CASES, 11, 23, 36, 38), ids=str)
def test_model_families_match_unpipelined_model(case: Case) -> None:
    check_gradients(case)


@pytest.mark.slow
def test_stream_kernels_match_unpipelined_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels run as JAX operations, with registers as wide as the model."""

    def select(sizes: Any, x: Any, rules: Any) -> StreamShards:
        axis = "" if rules is None else SequenceParallel.from_rules(rules).axis
        return StreamShards(shard_axes(len(x), 1)[0], axis or None)

    case = Case(
        *(2, 2, 3),
        own=V4,
        heads=(8, 1),
        layers=6,
        fsdp=2,
        tensor=2,
        remat="names",
        schedule="zb_v",
        split="sequence",
        epsilon=0.1,
    )
    monkeypatch.setattr(stream_kernels, "LANES", MODEL.d_model)
    monkeypatch.setattr(stream_backends, "select_shards", select)
    check_gradients(case)


def rows_together(case: Case, over: str) -> np.ndarray:
    """Return the indices of sequences that share a balance loss, one row per group."""
    devices = case.data * case.fsdp
    rows = np.arange(case.rows).reshape(devices, case.microbatches, -1)
    if over == "devices":
        return rows.swapaxes(0, 1).reshape(case.microbatches, -1)
    return rows.reshape(devices * case.microbatches, -1)


BALANCED = [
    pytest.param(
        "microbatch",
        Case(2, 1, 3, schedule="zb_h1", data=2, layers=4),
        marks=pytest.mark.layouts,
    ),
    pytest.param(
        "devices",
        Case(2, 1, 3, schedule="zb_h1", data=2, fsdp=2, layers=4, remat="names"),
        marks=pytest.mark.layouts,
    ),
    *(
        pytest.param(over, case, marks=pytest.mark.matrix)
        for over, case in (
            ("microbatch", Case(4, 2, 5, schedule="zb_v", fsdp=2, layers=9)),
            ("devices", Case(4, 2, 5, schedule="zb_v", fsdp=2, layers=9)),
            ("devices", Case(2, 2, 4, idle="compute", data=2, tensor=2, layers=6)),
            ("devices", Case(2, 1, 3, schedule="1f1b", data=2, fsdp=2, layers=4, outside=1)),
            ("devices", Case(1, 1, 1, data=2, fsdp=2, layers=3)),
        )
    ),
]


@pytest.mark.parametrize(("over", "case"), BALANCED, ids=str)
def test_load_balance_scopes_match_unpipelined_model(over: Any, case: Case) -> None:
    """The balance loss depends only on the sequences that share it, not on the schedule."""
    own = replace(GROUPED, num_dense_layers=1, load_balance_scope=over)
    check_gradients(replace(case, own=own), rows_together(case, over))


FAMILIES_IN_MATRIX: tuple[dict[str, Any], ...] = (
    {"own": GEMMA, "tied": True},
    {"own": GEMMA4, "epsilon": 1.0, "tied": True},
    {"own": GEMMA4_MOE, "epsilon": 1.0, "tied": True},
    {"own": GEMMA4_SMALL, "epsilon": 1.0, "tied": True, "layers": 7},
    {"own": MOE},
    {"own": GROUPED},
    {"own": ROOM},
    {"own": NEXT, "epsilon": 0.01},
    *({"own": own} for own in (GRANITE4, GRANITE4_MOE, NEMOTRON, FALCON, FALCON_NORMED)),
    *({"own": own, "epsilon": 0.1} for own in (QWEN3_5, QWEN3_5_MOE)),
    *({"own": own} for own in (MISTRAL, QWEN2, QWEN3, PHI, Olmo2Config(), GRANITE)),
    *({"own": own} for own in (QWEN3_MOE, GPT_OSS, GLM, MINIMAX)),
    *({"own": own} for own in (OLMO3, SMOLLM3, MINISTRAL3, LLAMA4)),
    {"own": GEMMA2, "tied": True},
    {"own": V3},
    {"own": V2},
    {"own": V32},
    {"own": WARM_UP},
    {"own": GLM5},
    {"own": KIMI, "epsilon": 0.01},
    {"own": V4, "heads": (8, 1), "layers": 7, "epsilon": 0.1},
    {"own": V4_WARM_UP, "heads": (8, 1), "layers": 7},
    {"own": OLMO_HYBRID, "epsilon": 1.0},
)


@pytest.mark.matrix
@pytest.mark.parametrize("family", FAMILIES_IN_MATRIX, ids=lambda each: str(each["own"])[:40])
@pytest.mark.parametrize("number", range(0, len(matrix()), 53))
def test_config_matrix_sample(number: int, family: dict[str, Any]) -> None:
    """Covers every schedule, gather, remat and idle mode, tensor 2, dropout and prologue layers.

    Each family uses a different sample.
    """
    case = matrix()[(number + FAMILIES_IN_MATRIX.index(family)) % len(matrix())]
    case = replace(case, **family)
    if isinstance(case.own, RoutedConfig):
        dense = min(case.own.num_dense_layers, case.layers - 1)
        case = replace(case, own=replace(case.own, num_dense_layers=dense))
    check_gradients(case)


def test_every_family_except_llama_is_covered() -> None:
    """Llama is covered by `test_engine`."""
    tried = {type(each["own"]) for each in FAMILIES_IN_MATRIX}
    assert tried == {each.section for name, each in FAMILIES.items() if name != "llama"}
    assert tried >= {type(case.own) for case in CASES}
