"""Tables about configs of MaxText and torchtitan, and the data from which configs are converted.

    python scripts/migration_table.py --names                        # equivalent names of keys
    python scripts/migration_table.py --maxtext DIR --torchtitan DIR # results for all configs
    python scripts/migration_table.py --maxtext DIR --torchtitan DIR --update-defaults

DIR is a checkout of MaxText, and one of torchtitan at the last commit with TOML configs. The first
command prints a table of docs/guides/migrate.md, and the second one docs/reference/peer_configs.md.
The third one writes `maxtext.yml` and `torchtitan.yml` in `maxpipe/config/migration/`. Python files
of the checkouts are parsed, and never executed.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from maxpipe.config.migration import maxtext, torchtitan  # noqa: E402
from maxpipe.config.migration.peer_files import published, tables  # noqa: E402
from maxpipe.config.schema import KEYS, default_of  # noqa: E402
from maxpipe.config.translation import (  # noqa: E402
    CONTEXT_KEYS,
    TranslationContext,
    translate,
)
from maxpipe.errors import ConfigError  # noqa: E402
from maxpipe.models.count import num_params  # noqa: E402
from maxpipe.models.registry import describe  # noqa: E402

DATA = ROOT / "maxpipe" / "config" / "migration"
_CONFIGS = "src/maxtext/configs"
_SHARDING = (
    *("logical_axis_rules", "logical_axis_rules_for_eval", "data_sharding", "mesh_axes"),
    "input_data_sharding_logical_axes",
)
_ENCODERS = ("_for_vit", "_for_audio")

# Names of two trainers whose configs are command-line arguments.
MEGATRON = (
    "num-layers hidden-size ffn-hidden-size num-attention-heads num-query-groups kv-channels "
    "seq-length global-batch-size micro-batch-size train-iters lr min-lr lr-decay-style "
    "lr-warmup-iters lr-warmup-fraction weight-decay adam-beta1 adam-beta2 adam-eps clip-grad "
    "tensor-model-parallel-size pipeline-model-parallel-size context-parallel-size "
    "expert-model-parallel-size num-experts moe-router-topk moe-ffn-hidden-size "
    "moe-aux-loss-coeff moe-z-loss-coeff norm-epsilon rotary-base hidden-dropout data-path "
    "tokenizer-model save-interval eval-interval eval-iters log-interval recompute-granularity "
    "use-distributed-optimizer params-dtype seed padded-vocab-size mtp-num-layers load"
)
NANOCHAT = (
    "depth head-dim max-seq-len num-iterations device-batch-size total-batch-size weight-decay "
    "matrix-lr warmup-steps warmdown-ratio final-lr-frac eval-every sample-every save-every"
)
_SHOWN_SECTIONS = ("model", "mesh", "pipeline", "train", "optim", "data", "tokenizer")
_SHOWN = ("checkpoint.every", "eval.every", "eval.batches", "log.every", "run.seed", "run.name")


def names_table() -> str:
    """Return a Markdown table of maxpipe keys and their names in four trainers."""
    names = {
        "MaxText": published(maxtext.NAME).defaults,
        "torchtitan": published(torchtitan.NAME).defaults,
        "Megatron-LM": [f"--{name}" for name in MEGATRON.split()],
        "nanochat": [f"--{name}" for name in NANOCHAT.split()],
    }
    found = {peer: _by_key(each) for peer, each in names.items()}
    rows = ["| maxpipe | MaxText | torchtitan | Megatron-LM | nanochat |", "|---|---|---|---|---|"]
    for key in KEYS:
        is_shown = key in _SHOWN or (key.count(".") == 1 and key.split(".")[0] in _SHOWN_SECTIONS)
        is_shown = is_shown or key.startswith("model.moe.")
        cells = [", ".join(f"`{name}`" for name in found[peer].get(key, [])[:2]) for peer in names]
        if is_shown and sum(map(bool, cells)) >= 1:
            rows.append(f"| `{key}` | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def _by_key(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the names that are equivalent to each maxpipe key."""
    values = {key: default_of(key) for key in CONTEXT_KEYS}
    values |= {"mesh.cpu_devices": 1, "runtime.platform": "cpu", "train.steps": 100}
    found: dict[str, list[str]] = {}
    for name in names:
        path = name.removeprefix("--").replace("-", "_").split(".")
        if path[0] in ("validation", "quantize", "profiling", "debug") or "per_op" in name:
            continue  # names of other sections that end like a key
        translated = translate(path, "1", TranslationContext(values))
        if translated.is_exact and translated.key:
            found.setdefault(translated.key, []).append(name)
    return found


def configs_page(of_maxtext: Path, of_torchtitan: Path) -> str:
    """Return the page with the result of converting every config of both trainers."""
    base = of_maxtext / _CONFIGS
    models = sorted((base / "models").glob("*.yml"))
    left_out = ("models/", "custom_mesh_and_rule/", "quantization/")
    recipes = [
        path
        for path in sorted(base.rglob("*.yml"))
        if not str(path.relative_to(base)).startswith(left_out)
        and path.name not in ("base.yml", "lora_module_path.yml")
    ]
    jobs = sorted(path for path in of_torchtitan.rglob("*.toml") if path.name != "pyproject.toml")
    parts = [
        ("MaxText: model configs", models, base, maxtext.convert),
        ("MaxText: other configs", recipes, base, maxtext.convert),
        ("torchtitan: job configs", jobs, of_torchtitan, torchtitan.convert),
    ]
    text = ["# Configs of MaxText and torchtitan", ""]
    text += _wrap(
        "This page lists the result of `maxpipe config from-maxtext` and `from-torchtitan` for all "
        f"YAML configs of MaxText (commit {_commit(of_maxtext)}) and all TOML configs of "
        f"torchtitan (commit {_commit(of_torchtitan)}). "
        "`python scripts/migration_table.py --maxtext DIR --torchtitan DIR` writes the page. "
        "[Coming from other trainers](../guides/migrate.md) describes the commands."
    )
    for title, files, root, convert in parts:
        rows = [_row(path, root, convert) for path in files]
        done = sum(is_converted for is_converted, _ in rows)
        text += ["", f"## {title}", "", f"{done} of {len(rows)} configs are converted.", ""]
        text += ["| config | model | parameters or reason |", "|---|---|---|"]
        text += [row for _, row in rows]
    return "\n".join([*text, ""])


def _row(path: Path, root: Path, convert: Callable[..., Any]) -> tuple[bool, str]:
    name = f"`{path.relative_to(root)}`"
    try:
        model = convert(str(path), [], None).load().config.model
    except ConfigError as error:
        first = error.problems[0]
        key, rule = first.where.rpartition(": ")[2], first.rule.partition(". Supp")[0].rstrip(".")
        value = f" = {first.value}" if first.value and len(first.value) < 20 else ""
        return False, f"| {name} | | `{key}{value}` {rule} |"
    return True, f"| {name} | `{model.family}` | {num_params(describe(model)) / 1e9:,.2f} B |"


def _commit(folder: Path) -> str:
    known = {"maxtext": tables(maxtext.NAME), "torchtitan": tables(torchtitan.NAME)}
    table = known["maxtext" if (folder / _CONFIGS).is_dir() else "torchtitan"]
    command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    commit = done.stdout.strip() if (folder / ".git").exists() else table["commit"]
    return f"{commit[:12]}, {table['date']}" if commit == table["commit"] else commit[:12]


def _wrap(text: str, indent: str = "") -> list[str]:
    options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(text, 96, initial_indent=indent, subsequent_indent=indent, **options)


# Data files.


class _Loader(yaml.SafeLoader):
    """YAML loader that reads `1e-6` as a number, as OmegaConf does."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?([0-9][0-9_]*)(\.[0-9_]*)?[eE][-+]?[0-9]+|[-+]?[0-9][0-9_]*\.[0-9_]*"),
    list("-+0123456789"),
)


def _flow(value: Any) -> str:
    options: dict[str, Any] = {"default_flow_style": True, "width": 10**9, "sort_keys": False}
    return yaml.safe_dump(value, **options).strip().removesuffix("...").strip()


def _read_yaml(path: Path) -> dict[str, Any]:
    values = _Loader(path.read_text(encoding="utf-8")).get_single_data()
    return {
        key: None if isinstance(value, str) and value.lower() == "none" else value
        for key, value in values.items()
    }


def maxtext_data(checkout: Path, head: str) -> Iterator[str]:
    """Yield the lines of `maxtext.yml` for a checkout; `head` is the comment and the source."""
    base = _read_yaml(checkout / _CONFIGS / "base.yml")
    base |= {key: [] for key in _SHARDING}
    types = (checkout / _CONFIGS / "types.py").read_text(encoding="utf-8")
    fields = set(re.findall(r"^  (\w+): .*=", types, re.MULTILINE))
    yield head
    yield "# Every key of base.yml with its default.\ndefaults:"
    yield from (f"  {key}: {_flow(value)}" for key, value in base.items())
    yield "\n# Keys that MaxText accepts but base.yml does not set.\nother_keys: >-"
    yield from _wrap(" ".join(sorted(fields - base.keys())), "  ")
    yield "\n# Keys that each model file sets, by value of model_name.\nmodels:"
    for path in sorted((checkout / _CONFIGS / "models").glob("*.yml")):
        values = {
            key: value
            for key, value in _read_yaml(path).items()
            if not key.endswith(_ENCODERS) and key not in _SHARDING
        }
        yield f"  {path.stem}: {_flow(values)}"


def torchtitan_data(checkout: Path, head: str) -> Iterator[str]:
    """Yield the lines of `torchtitan.yml` for a checkout; `head` is the comment and the source."""
    package = checkout / "torchtitan"
    classes = _classes(package / "config" / "job_config.py")
    yield head
    yield "# Every key of JobConfig with its default.\ndefaults:"
    defaults = _flatten(_defaults(classes, "JobConfig"))
    yield from (f"  {key}: {_flow(value)}" for key, value in defaults.items())
    extended = _classes(package / "components" / "ft" / "config" / "job_config.py")
    others = {f"fault_tolerance.{name}" for name in _defaults(extended, "FaultTolerance")}
    yield "\n# Keys of the fault-tolerance module, which are not part of JobConfig.\nother_keys: >-"
    yield from _wrap(" ".join(sorted(others - defaults.keys())), "  ")
    experts = _defaults(_classes(package / "models" / "moe" / "moe.py"), "MoEArgs")
    yield f"\n# Default arguments of the experts of all models.\nexperts: {_flow(experts)}"
    yield "\n# Model arguments: the defaults of each model, and the values of each flavor.\nmodels:"
    for name, arguments in {
        "llama3": "TransformerModelArgs",
        "qwen3": "Qwen3ModelArgs",
        "deepseek_v3": "DeepSeekV3ModelArgs",
        "gpt_oss": "GptOssModelArgs",
    }.items():
        folder = package / "models" / name
        yield f"  {name}:"
        values = _defaults(_classes(folder / "model" / "args.py"), arguments)
        yield f"    defaults: {_flow({k: v for k, v in values.items() if k != 'moe_args'})}"
        yield "    flavors:"
        for flavor, given in _flavors(folder / "__init__.py").items():
            yield f"      {flavor}: {_flow(given)}"


def _classes(path: Path) -> dict[str, ast.ClassDef]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _defaults(classes: dict[str, ast.ClassDef], name: str) -> dict[str, Any]:
    """Return the defaults of a dataclass; those of nested dataclasses are nested dicts."""
    found: dict[str, Any] = {}
    for node in classes[name].body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        if isinstance(node.value, ast.Call):
            [factory] = [each.value for each in node.value.keywords]
            if isinstance(factory, ast.Lambda):
                found[node.target.id] = _literal(factory.body)
            elif isinstance(factory, ast.Name):
                is_nested = factory.id in classes
                nested = _defaults(classes, factory.id) if is_nested else []
                found[node.target.id] = nested
        elif node.value is not None:
            found[node.target.id] = _literal(node.value)
    return found


def _flavors(path: Path) -> dict[str, dict[str, Any]]:
    """Return the arguments of each flavor in a module-level dict of calls."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            pairs = zip(node.value.keys, node.value.values, strict=True)
            return {_literal(key): _literal(value) for key, value in pairs if key is not None}
    raise ValueError(f"{path} has no flavors")


def _literal(node: ast.expr) -> Any:
    """Evaluate a literal, a product of literals, or the keyword arguments of a call."""
    if isinstance(node, ast.Call):
        return {str(each.arg): _literal(each.value) for each in node.keywords}
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return _literal(node.left) * _literal(node.right)
    return ast.literal_eval(node)


def _flatten(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in nested.items():
        inner = isinstance(value, dict)
        flat |= _flatten(value, f"{prefix}{name}.") if inner else {f"{prefix}{name}": value}
    return flat


def update_defaults(of_maxtext: Path, of_torchtitan: Path) -> None:
    """Write both data files. Their comments and sources are kept, up to the first empty line after
    them.
    """
    for name, lines in (
        ("maxtext.yml", lambda head: maxtext_data(of_maxtext, head)),
        ("torchtitan.yml", lambda head: torchtitan_data(of_torchtitan, head)),
    ):
        path = DATA / name
        head = path.read_text(encoding="utf-8").partition("\n\n")[0] + "\n"
        path.write_text("\n".join([*lines(head), ""]), encoding="utf-8")


def main() -> None:
    """Print a table, or write the data files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--maxtext", type=Path, metavar="DIR")
    parser.add_argument("--torchtitan", type=Path, metavar="DIR")
    parser.add_argument("--names", action="store_true", help="print the names of keys")
    parser.add_argument("--update-defaults", action="store_true", help="write the data files")
    options = parser.parse_args()
    if options.names:
        print(names_table(), end="")
    elif not (options.maxtext and options.torchtitan):
        parser.error("--maxtext and --torchtitan are required without --names")
    elif options.update_defaults:
        update_defaults(options.maxtext, options.torchtitan)
    else:
        print(configs_page(options.maxtext, options.torchtitan), end="")


if __name__ == "__main__":
    main()
