"""Values of configs in `transformers`. Usage: statements_oracle.py JOBS ANSWERS.

JOBS is a JSON list of objects with `config`, a config.json, and `path`, the attribute names
that lead to a value. ANSWERS receives the values.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import transformers  # pyright: ignore[reportMissingImports]


def main() -> None:
    transformers.logging.set_verbosity_error()
    jobs = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps([value(**job) for job in jobs]))


def value(config: dict[str, Any], path: list[str]) -> Any:
    """Return the value at `path` of a config with this content."""
    found = transformers.AutoConfig.for_model(config["model_type"]).__class__.from_dict(config)
    found.standardize_rope_params()  # as its frequencies are computed
    for name in path:
        found = found[name] if isinstance(found, dict) else getattr(found, name)
    return str(found).removeprefix("torch.") if path == ["dtype"] else found


if __name__ == "__main__":
    main()
