"""Names of topologies: what they mean, and what is said of wrong ones."""

from __future__ import annotations

import pytest

from maxpipe.errors import ConfigError
from maxpipe.plan.topology import parse


@pytest.mark.parametrize(
    ("text", "slices", "devices", "platform"),
    [
        ("v5p:2x4x4", 1, 32, "tpu"),
        ("v5p:8x8x8", 2, 1024, "tpu"),
        ("v5e:4x4", 1, 16, "tpu"),
        ("v3:2x2", 1, 8, "tpu"),
        ("cpu:8", 1, 8, "cpu"),
        ("h100:8", 4, 32, "cuda"),
    ],
)
def test_sizes(text: str, slices: int, devices: int, platform: str) -> None:
    found = parse(text, slices)
    assert (found.num_devices, found.platform, found.name) == (devices, platform, text)


@pytest.mark.parametrize(
    ("text", "slices", "says"),
    [
        ("v9:4", 1, "is not a kind of device"),
        ("v5:2x2x2", 1, "Did you mean v5"),
        ("v5p", 1, "Write v5p:2x4x4."),
        ("v5p:4x4", 1, "must have 3 numbers"),
        ("v5e:2x2x2", 1, "must have 2 numbers"),
        ("v5e:32x32", 1, "join at most 256"),
        ("h100:4x2", 1, "must have one number"),
        ("cpu:0", 1, "Write cpu:8."),
    ],
)
def test_mistakes_are_explained(text: str, slices: int, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, slices)
    assert says in str(caught.value)
    where, rule, action = str(caught.value).splitlines()
    assert where.startswith("command line: --") and rule.startswith("  ")
    assert action.startswith("  ")
