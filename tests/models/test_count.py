"""Parameter counts compared with real trees, FLOP counts compared with the compiler."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from maxpipe.config.load import load
from maxpipe.models import count
from maxpipe.models.config import ModelConfig
from maxpipe.models.llama4 import Llama4Config
from maxpipe.models.registry import describe
from maxpipe.models.spec import Model, Scores
from maxpipe.nn.decoder import Decoder
from maxpipe.optim.state_spec import BYTES
from maxpipe.parallel.axes import MeshConfig
from maxpipe.parallel.sharding import AxisRules
from tests.config.test_training_checks import LARGE

CONFIGS = Path(__file__).parents[2] / "configs" / "model"
RULES = AxisRules.from_config(MeshConfig())


def published(name: str) -> ModelConfig:
    arguments = [str(CONFIGS / f"{name}.yml"), "train.steps=1"]
    if name != "tiny":
        arguments += ["tokenizer.kind=huggingface", "tokenizer.path=tokenizer.json"]
    return load(arguments).config.model


def tree_params(config: ModelConfig) -> int:
    shapes = jax.eval_shape(Decoder(config, RULES).init, jax.random.key(0))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("num_layers", "heads"), [(1, 0), (5, 3)])
def test_counted_params_equal_parameter_tree(tied: bool, num_layers: int, heads: int) -> None:
    config = ModelConfig(
        num_layers=num_layers,
        d_model=24,
        num_heads=6,
        num_kv_heads=2,
        head_dim=10,
        d_mlp=52,
        vocab_size=77,
        tied_embeddings=tied,
        mtp_heads=heads,
    )
    model = describe(config)
    assert count.num_params(model) == tree_params(config)
    layers = jax.eval_shape(Decoder(config, RULES).init, jax.random.key(0))["layers"]
    stacked = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(layers))
    assert num_layers * count.layer_params(model.layer_types[model.layers[0]]) == stacked


def _vision(width: int, mlp: int, depth: int, out: int) -> int:
    """Return the parameter count of Qwen3.5's vision encoder and its projection to `out` dims."""
    layer = 4 * width * (width + 1) + 2 * mlp * width + mlp + width + 4 * width
    embeddings = (2 * 3 * 16 * 16 + 1 + 2_304) * width
    merged = 4 * width
    return embeddings + depth * layer + 2 * width + (merged + 1) * (merged + out)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("tiny", 1_051_520),
        ("tiny-moe", 1_916_288),
        ("mixtral-8x7b", 46_702_792_704),
        ("deepseek-v2-lite", 15_706_484_224),
        ("deepseek-v2", 235_741_434_880),
        # Published as 671B; its folder has 685B, with copies of both tables in the last layer.
        ("deepseek-v3", 671_026_419_200 + 11_610_068_224),
        # DeepSeek-V3 with an indexer in each layer.
        ("deepseek-v3.2", 671_026_419_200 + 11_610_068_224 + 62 * 13_959_424),
        ("deepseek-v4-flash", 284_334_567_511),  # published as 284B
        ("deepseek-v4-pro", 1_572_999_528_803),  # published as 1.6T
        ("glm5-744b-a40b", 753_864_139_008),  # published as 754B
        ("llama3-1b", 1_235_814_400),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
        ("llama3.1-8b", 8_030_261_248),
        ("llama3.1-70b", 70_553_706_496),
        ("llama3.1-405b", 405_853_388_800),
        ("llama2-7b", 6_738_415_616),
        ("llama2-13b", 13_015_864_320),
        ("llama2-70b", 68_976_648_192),
        ("llama3-3b", 3_212_749_824),
        ("mistral-7b", 7_248_023_552),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-1.5b", 1_543_714_304),
        ("qwen2.5-3b", 3_085_938_688),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-14b", 14_770_033_664),
        ("qwen2.5-32b", 32_763_876_352),
        ("qwen2.5-72b", 72_706_203_648),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-1.7b", 1_720_574_976),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-14b", 14_768_307_200),
        ("qwen3-vl-4b", 4_437_815_808),
        ("qwen3-vl-8b", 8_767_123_696),
        ("qwen3.5-0.8b-images", 852_985_920),
        ("qwen3.5-9b-images", 9_409_813_744),
        ("qwen3-32b", 32_762_123_264),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("qwen3-235b-a22b", 235_093_634_560),
        ("qwen3-next-80b-a3b", 79_674_391_296),
        # Published counts, without the vision encoder.
        ("qwen3.5-0.8b", 873_438_784 - _vision(768, 3_072, 12, 1_024)),
        ("qwen3.5-2b", 2_274_069_824 - _vision(1_024, 4_096, 24, 2_048)),
        ("qwen3.5-4b", 4_659_865_088 - _vision(1_024, 4_096, 24, 2_560)),
        ("qwen3.5-9b", 9_653_104_368 - _vision(1_152, 4_304, 27, 4_096)),
        ("qwen3.5-27b", 27_781_427_952 - _vision(1_152, 4_304, 27, 5_120)),
        ("qwen3.5-35b-a3b", 35_951_822_704 - _vision(1_152, 4_304, 27, 2_048)),
        ("qwen3.5-122b-a10b", 125_086_497_008 - _vision(1_152, 4_304, 27, 3_072)),
        ("qwen3.5-397b-a17b", 403_397_928_944 - _vision(1_152, 4_304, 27, 4_096)),
        # Published counts, without the copies of both tables in the last layer.
        ("glm4.5-355b-a32b", 358_337_791_296 - 2 * 151_552 * 5_120),
        ("glm4.5-air-106b-a12b", 110_468_824_832 - 2 * 151_552 * 4_096),
        ("minimax-m2-230b-a10b", 228_689_764_864),
        ("kimi-k2-1t-a32b", 1_026_408_232_448),
        # Published count, with the biases of the routers.
        ("kimi-linear-48b-a3b", 49_122_681_728),
        ("llama3.3-70b", 70_553_706_496),
        ("gpt-oss-20b", 20_914_757_184),
        ("gpt-oss-120b", 116_829_156_672),
        ("gemma2-2b", 2_614_341_888),
        ("gemma2-9b", 9_241_705_984),
        ("gemma2-27b", 27_227_128_320),
        ("phi3-mini", 3_821_079_552),
        ("phi4", 14_659_507_200),
        ("olmo-hybrid-7b", 7_430_870_688),
        ("olmo2-1b", 1_484_916_736),
        ("olmo2-7b", 7_298_617_344),
        ("olmo2-13b", 13_716_198_400),
        ("olmo2-32b", 32_234_279_936),
        ("olmo3-7b", 7_298_011_136),
        ("olmo3-32b", 32_233_522_176),
        ("smollm3-3b", 3_075_098_624),
        # Published as 3.4B, 8.4B and 13.5B parameters, without the vision encoder of 0.4B.
        ("ministral3-3b", 3_429_006_336),
        ("ministral3-8b", 8_489_553_920),
        ("ministral3-14b", 13_506_073_600),
        # Published counts, without the vision encoder and its projections.
        ("llama4-scout-109b-a17b", 108_641_793_536 - 871_932_416),
        ("llama4-maverick-400b-a17b", 401_583_781_376 - 871_932_416),
        ("granite3-2b", 2_533_531_648),
        ("granite3-8b", 8_170_848_256),
        ("nemotron-h-8b", 8_100_852_736),
        ("nemotron-nano2-9b", 8_888_227_328),
        ("nemotron3-nano-30b-a3b", 31_577_940_288),
        # As counted by transformers.
        ("falcon-h1-0.5b", 521_411_104),
        ("falcon-h1-1.5b-deep", 1_554_874_768),
        ("falcon-h1-7b", 7_585_654_880),
        ("falcon-h1-34b", 33_642_516_224),
        ("granite4-h-micro", 3_191_396_096),
        ("granite4-h-tiny", 6_939_037_248),
        ("granite4-h-small", 32_207_337_984),
        # Published as 30.7B and 25.2B parameters.
        ("gemma4-31b", 30_697_345_340),
        ("gemma4-26b-a4b", 25_233_141_790),
        # As counted by transformers, with one scalar per layer.
        ("gemma4-e2b", 4_628_569_344 + 35),
        ("gemma4-e2b-images", 4_628_569_344 + 35 + 168_544_704),
        ("gemma4-26b-a4b-images", 25_233_141_790 + 572_794_416),
        ("gemma4-e4b", 7_463_013_376 + 42),
        ("gemma3-270m", 268_098_176),
        ("gemma3-1b", 999_885_952),
        # Published counts, without the vision tower (416,866,032) and the projector.
        ("gemma3-4b", 4_300_079_472 - 416_866_032 - 1_152 * (2_560 + 1)),
        ("gemma3-4b-images", 4_300_079_472),
        ("gemma3-12b", 12_187_325_040 - 416_866_032 - 1_152 * (3_840 + 1)),
        ("gemma3-27b", 27_432_406_640 - 416_866_032 - 1_152 * (5_376 + 1)),
    ],
)
def test_bundled_models_have_published_param_count(name: str, params: int) -> None:
    config = published(name)
    assert count.num_params(describe(config)) == tree_params(config) == params
    header = (CONFIGS / f"{name}.yml").read_text(encoding="utf-8").split("\nmodel:")[0]
    assert f"{params:,} parameters" in header


# Matmuls dominate: norms, rotations and softmax are a small part of the FLOPs.
WIDE = ModelConfig(
    num_layers=1,
    d_model=256,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    d_mlp=768,
    vocab_size=512,
    compute_dtype="float32",
)


@pytest.mark.parametrize("tokens", [12, 20, 23])
def test_flops_of_chunked_attention_count_visible_pairs(tokens: int) -> None:
    """Half of the pair of a token with itself is counted, as for causal attention."""
    own = Llama4Config(num_experts=2, attention_chunk_size=5, no_rope_layer_interval=2)
    config = dataclasses.replace(WIDE, num_layers=2, family="llama4", own=own)
    whole = dataclasses.replace(config, own=dataclasses.replace(own, attention_chunk_size=0))
    chunked, full = (count.forward_flops_per_token(describe(c), tokens) for c in (config, whole))
    seen = sum(t % 5 + 0.5 for t in range(tokens)) / tokens
    pairs = 4 * config.num_heads * config.head_dim
    assert full - chunked == pytest.approx(pairs * (tokens // 2 - seen), abs=1)


def compiled_flops(config: ModelConfig, length: int) -> float:
    """Return the FLOPs of one sequence's forward pass; the compiler counts a loop's body once."""
    assert config.num_layers == 1
    decoder = Decoder(config, RULES)
    row = jax.ShapeDtypeStruct((1, length), jnp.int32)
    batch = {"tokens": row, "segment_ids": row, "positions": row}
    params = jax.eval_shape(decoder.init, jax.random.key(0))
    cost: Any = jax.jit(decoder.apply).lower(params, batch).compile().cost_analysis()
    return cost["flops"]


def computed_flops_per_token(model: Model, length: int) -> int:
    """Return the forward FLOPs per token, including all scored pairs."""
    head = count.size(model.ends.head or model.ends.embedding)
    return round(sum(count.layer_costs(model, length)) + 2 * head)


@pytest.mark.parametrize(
    ("changes", "length"),
    [
        ({}, 64),
        ({}, 256),
        ({"num_kv_heads": 4, "d_mlp": 256}, 128),
        ({"tied_embeddings": True, "num_heads": 8, "vocab_size": 1024}, 64),
    ],
    ids=["short", "long", "full heads", "tied"],
)
def test_forward_flops_equal_compiler_cost_analysis(changes: dict[str, Any], length: int) -> None:
    config = dataclasses.replace(WIDE, **changes)
    counted = length * computed_flops_per_token(describe(config), length)
    assert counted == pytest.approx(compiled_flops(config, length), rel=0.03)


def test_flops_grow_with_layers_and_causal_mask_halves_scores() -> None:
    def flops(num_layers: int, length: int, causal: bool) -> int:
        model = describe(dataclasses.replace(WIDE, num_layers=num_layers))
        if causal:
            return count.forward_flops_per_token(model, length)
        return computed_flops_per_token(model, length)

    one, two, five = (flops(n, 128, False) for n in (1, 2, 5))
    assert five - two == 3 * (two - one)
    # Scores and mixing: two matmuls over all heads, 2 operations each, per pair.
    per_pair = 2 * 2 * WIDE.num_heads * WIDE.head_dim
    assert flops(1, 129, False) - flops(1, 128, False) == per_pair
    assert flops(1, 128, False) - flops(1, 128, True) == 64 * per_pair
    assert count.train_flops_per_token(describe(WIDE), 128) == 3 * flops(1, 128, True)


def test_training_llama3_8b_takes_about_six_flops_per_parameter() -> None:
    config = published("llama3-8b")
    embedding = config.vocab_size * config.d_model
    six = 6 * (count.num_params(describe(config)) - embedding)
    train = count.train_flops_per_token(describe(config), 8192)
    assert six < train < 1.2 * six


@pytest.mark.parametrize("tied", [False, True])
def test_mtp_heads_count_in_train_flops(tied: bool) -> None:
    """Each head adds one output projection and its own matrix."""
    plain = dataclasses.replace(WIDE, tied_embeddings=tied)
    models = (describe(dataclasses.replace(plain, mtp_heads=heads)) for heads in (0, 3))
    without, three = (count.train_flops_per_token(model, 128) for model in models)
    assert three - without == 6 * 3 * WIDE.d_model * (WIDE.vocab_size + WIDE.d_model)


def test_mtp_layers_count_as_layers_with_projections() -> None:
    """A layer after the network costs as much as one more layer, plus its projections."""
    config = dataclasses.replace(published("gemma3-270m"), num_layers=5)
    longer = describe(dataclasses.replace(config, num_layers=6))
    one = dataclasses.replace(config, mtp_heads=1, mtp_kind="layer")
    tokens, width, vocab = 4096, config.d_model, config.vocab_size

    def more(frozen: list[str], counted: Callable[..., int], *arguments: int) -> int:
        changed = (dataclasses.replace(each, frozen=frozen) for each in (config, one))
        without, ahead = (counted(describe(each), *arguments) for each in changed)
        return ahead - without

    # The sixth layer is the first with full attention; an MTP layer after the fifth has none.
    layer = count.forward_flops_per_token(longer, tokens)
    layer -= count.forward_flops_per_token(describe(config), tokens)
    heads = longer.layer_types["layer"].parts["attention"].operations
    (scores,) = (each for each in heads if isinstance(each, Scores))
    window = longer.values[scores.window][0]
    pairs = (tokens // 2) - (window - window**2 / (2 * tokens))
    layer -= round(4 * scores.heads * scores.head_dim * pairs)
    projections = 2 * (2 * width**2 + width * vocab)
    assert more([], count.forward_flops_per_token, tokens) == layer + projections
    assert more([], count.train_flops_per_token, tokens) == 3 * (layer + projections)
    frozen = more(["ahead.projection", "ahead.layer.mlp.*"], count.train_flops_per_token, tokens)
    mlp = 3 * width * config.d_mlp
    assert frozen == 3 * (layer + projections) - 2 * (2 * width**2 + mlp)
    params = more([], count.num_params)
    assert params == count.layer_params(longer.layer_types["layer"]) + 2 * width**2 + 3 * width
    assert count.num_params(describe(one)) == tree_params(one)


def test_mtp_layers_count_only_active_experts() -> None:
    config = published("tiny-moe")
    one = dataclasses.replace(config, mtp_heads=2, mtp_kind="layer")
    unused = [
        count.num_params(model) - count.active_params(model)
        for model in (describe(config), describe(one))
    ]
    layers = describe(config).layers.count("experts")
    assert unused[1] * layers == unused[0] * (layers + 2)


def test_forecasts_know_size_of_every_fixed_dtype() -> None:
    """Parameters can have a fixed dtype, such as tables of integers."""
    configs = (load([name, "train.steps=1"]).config for name in LARGE)
    models = {config.model.family: describe(config.model) for config in configs}
    for family, model in models.items():
        params = [*model.ends.params.values()]
        params += [param for kind in model.layer_types.values() for param in kind.params.values()]
        assert {param.own_dtype or "float32" for param in params} <= {*BYTES}, family
