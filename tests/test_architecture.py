"""The rules of CONTRIBUTING.md that a program can check."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "maxpipe"

# From the lowest layer to the highest: a folder imports folders above it in this list only.
LAYERS = {
    "errors": "error types and exit codes",
    "io": "files, JSON, YAML, secret redaction, worker processes",
    "schedule": "pipeline schedules as verified tables, and their diagrams",
    "parallel": "device mesh, sharding, collectives, sharded matmuls",
    "pipeline": "the engine: runs a schedule over any stage function",
    "models": "specs of model families, without jax",
    "nn": "forward passes of the layers in a model spec",
    "config": "sections, keys and rules; translation of other trainers' configs",
    "hardware": "published accelerator specifications",
    "rewards": "reward functions, run in worker processes",
    "checkpoint": "storage, manifests, saving and restoring",
    "data": "sources, tokenizers, packing, batches by sample index",
    "distributed": "startup, heartbeats and shutdown of multi-process runs",
    "telemetry": "console output, metrics, run records",
    "optim": "optimizers and their state",
    "objectives": "fine-tuning losses",
    "step": "the compiled train and eval steps",
    "huggingface": "import from and export to Hugging Face folders",
    "maxtext": "import of MaxText checkpoints",
    "planner": "memory and time predictions, layout search, compile reports",
    "profiles": "traces of training steps, and the measured bubble",
    "restore": "initial weights of a run",
    "generation": "text generation",
    "posttrain": "teachers, reference models, rollouts",
    "evals": "validation, multiple-choice tasks, lm-evaluation-harness",
    "report": "HTML pages with the records of runs",
    "launch": "launchers for local processes and clusters",
    "diagnosis": "`maxpipe doctor` and `maxpipe env`",
    "train": "the training loop",
    "api": "the functions and classes of `import maxpipe`",
    "commands": "all commands except `maxpipe train`",
    "cli": "the command-line parser, and `maxpipe train`",
    "__main__": "`python -m maxpipe`",
}

# (importer, imported module, reason): forbidden everywhere, including inside functions.
FORBIDDEN = [
    ("maxpipe.nn", "maxpipe.pipeline", "only maxpipe.step combines layers and pipeline"),
    ("maxpipe.data", "maxpipe.models", "data consists of token IDs, independent of the model"),
    ("maxpipe.config", "jax", "commands that only read a config must start fast"),
    ("maxpipe.data", "jax", "data can be inspected without devices"),
    ("maxpipe.telemetry", "jax", "telemetry receives plain Python numbers"),
    ("maxpipe.schedule", "jax", "schedules are built and verified without devices"),
    ("maxpipe.huggingface.folder", "jax", "a folder can be inspected without devices"),
    ("maxpipe.models", "jax", "model specs are built without devices"),
    ("maxpipe.errors", "jax", "errors are raised in modules that do not import jax"),
    ("maxpipe.hardware", "jax", "plans are computed without devices"),
    ("maxpipe.diagnosis.environment", "jax", "devices are inspected in a separate process"),
    ("maxpipe.diagnosis.doctor", "jax", "devices are inspected in a separate process"),
    ("maxpipe.launch", "jax", "the launcher must not occupy devices"),
    ("maxpipe.checkpoint.storage", "jax", "also used by launch and doctor, which run without jax"),
    ("maxpipe.checkpoint.address", "jax", "also used by launch and doctor, which run without jax"),
]

# Importing one of these (or anything below it) imports no jax, not even indirectly.
JAX_FREE = (
    "maxpipe.errors",
    "maxpipe.hardware",
    "maxpipe.io",
    "maxpipe.parallel.axes",
    "maxpipe.schedule",
    "maxpipe.distributed.protocol",
    "maxpipe.distributed.control_channel",
    "maxpipe.diagnosis.environment",
    "maxpipe.diagnosis.doctor",
    "maxpipe.config",
    "maxpipe.checkpoint.storage",
    "maxpipe.checkpoint.address",
    "maxpipe.data",
    "maxpipe.telemetry",
    "maxpipe.models",
    "maxpipe.huggingface.folder",
    "maxpipe.rewards",
    "maxpipe.optim.state_spec",
    "maxpipe.parallel.scopes",
    "maxpipe.planner.report",
    "maxpipe.commands.plan",
    "maxpipe.planner.topology",
    "maxpipe.launch",
    "maxpipe.api.config",
    "maxpipe.api.plan",
    "maxpipe.api.schedule",
    "maxpipe.commands",
    "maxpipe.cli",
)

# Modules that may use the complete config; every other module accepts only its own section.
ROOT_CONFIG = (
    "maxpipe.config",
    "maxpipe.step.build",
    "maxpipe.data.datasets",
    "maxpipe.train.session",
    "maxpipe.train.loop",
    "maxpipe.train.memory_check",
    "maxpipe.train.run",
    "maxpipe.train.set_up",
    "maxpipe.train.tensorboard",
    "maxpipe.train.tracking",
    "maxpipe.train.resume",
    "maxpipe.restore.initial_weights",
    "maxpipe.evals.evaluate",
    "maxpipe.restore.open_model",
    "maxpipe.posttrain.distill",
    "maxpipe.evals.multiple_choice",
    "maxpipe.generation.load_model",
    "maxpipe.huggingface.export",
    "maxpipe.huggingface.peft",
    "maxpipe.planner",
    "maxpipe.profiles.run_comparison",
    "maxpipe.launch",
    "maxpipe.diagnosis.doctor",
    "maxpipe.api",
    "maxpipe.commands",
    "maxpipe.cli",
)

# Config keys that are read only in config/, and the reason for each.
UNREAD_KEYS: dict[str, str] = {
    "plugins.allow_code": "plug-ins are loaded with the config",
    "plugins.allow_change": "config.plugins compares the digests of plug-ins",
    "alerts.allow_code": "a command without permission is an error when the config is checked",
    "alerts.enable": "`enabled_rules` returns the rules",
    "alerts.actions": "`actions_of` returns the actions of a rule",
}

MAX_FUNCTION_LINES = 100
MAX_FILE_LINES = 700
MAX_ROOT_FILES = 7
PLUGIN_TABLES = {"maxpipe.nn.attention": "BACKENDS"}
"""`__init__.py` files that contain one table of the package's modules; all others are empty."""
NAMELESS = {"utils", "util", "common", "core", "helpers", "helper", "base", "misc"}


# --- reading the source --------------------------------------------------------


def _module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def sources() -> dict[str, Path]:
    """Return the file of each module of the package, keyed by module name."""
    return {_module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def tree(module: str) -> ast.Module:
    """Return the syntax tree of `module`."""
    return ast.parse(sources()[module].read_text(encoding="utf-8"))


def _resolve(module: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    is_folder = sources()[module].name == "__init__.py"
    parents = module.split(".")[: -(node.level - is_folder) or None]
    return ".".join([*parents, *([node.module] if node.module else [])])


def _run_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes below `node`, except in `TYPE_CHECKING` blocks."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            for other in child.orelse:
                yield other
                yield from _run_nodes(other)
        else:
            yield child
            yield from _run_nodes(child)


@cache
def nodes(module: str) -> tuple[ast.AST, ...]:
    """Return all nodes of the syntax tree of `module`."""
    return tuple(ast.walk(tree(module)))


@cache
def _imports(module: str, *, with_types: bool = True) -> tuple[tuple[str, int], ...]:
    """Return (imported module, line) for all imports, or only for those that are executed."""
    imports: list[tuple[str, int]] = []
    for node in nodes(module) if with_types else _run_nodes(tree(module)):
        if isinstance(node, ast.Import):
            imports += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            origin = _resolve(module, node)
            names = (f"{origin}.{alias.name}" for alias in node.names)
            imports += [(name if name in sources() else origin, node.lineno) for name in names]
    return tuple(imports)


def _within(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


def _layer(module: str) -> str:
    """Return the top-level folder or module of the package that contains `module`."""
    return module.split(".")[1]


def _where(module: str, line: int) -> str:
    return f"{sources()[module].relative_to(ROOT)}:{line}"


def _is_folder(module: str) -> bool:
    return module != "maxpipe" and sources()[module].name == "__init__.py"


MODULES = [module for module, path in sources().items() if path.read_text().strip()]


# --- imports ----------------------------------------------------------------------


def upward_imports() -> list[str]:
    """Return a line for each import of a higher layer."""
    order = [*LAYERS]
    return [
        f"{_where(module, line)}: {_layer(module)} imports {imported} of a higher layer"
        for module in MODULES
        for imported, line in sorted(set(_imports(module)))
        if imported in sources() and imported != "maxpipe" and module != "maxpipe"
        if order.index(_layer(imported)) > order.index(_layer(module))
    ]


def test_folders_import_only_lower_layers():
    wrong = upward_imports()
    assert not wrong, "\n".join(wrong)


def test_layers_match_package_folders():
    assert set(LAYERS) == {_layer(module) for module in MODULES if module != "maxpipe"}


def test_rules_name_existing_modules():
    named = {*(who for who, _, _ in FORBIDDEN), *JAX_FREE, *ROOT_CONFIG}
    assert named <= {*sources()}, "no such module: " + ", ".join(sorted(named - {*sources()}))
    for listed in (JAX_FREE, ROOT_CONFIG):
        twice = [module for module in set(listed) if listed.count(module) > 1]
        assert not twice, "listed twice: " + ", ".join(sorted(twice))


def test_schema_imports_every_section():
    """Importing a section, directly or by another section, registers its rules and bounds."""
    sections = {module for module in MODULES if _within(module, "maxpipe.config.sections")}
    loaded, new = set[str](), {"maxpipe.config.schema"}
    while new:
        loaded |= new
        new = {name for module in new for name, _ in _imports(module, with_types=False)}
        new = (new & sections) - loaded
    missing = sections - loaded
    assert not missing, "maxpipe.config.schema does not import " + ", ".join(sorted(missing))


def test_package_root_has_few_files():
    files = [path.name for path in PACKAGE.glob("*.py")]
    assert len(files) <= MAX_ROOT_FILES, (
        f"too many files, move some into a folder: {', '.join(sorted(files))}"
    )


def test_forbidden_imports():
    wrong = [
        f"{_where(module, line)}: {who} never imports {whom}: {why}"
        for module in MODULES
        for imported, line in sorted(set(_imports(module)))
        for who, whom, why in [*FORBIDDEN, ("maxpipe", "maxpipe.cli", "it is the highest layer")]
        if _within(module, who) and _within(imported, whom) and module != "maxpipe.__main__"
    ]
    assert not wrong, "\n".join(wrong)


def test_no_import_cycles():
    visited: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, "cycle: " + " -> ".join([*path, module])
        if module not in visited:
            for imported, _ in _imports(module, with_types=False):
                if imported in sources() and imported != module:
                    visit(imported, (*path, module))
            visited.add(module)

    for module in MODULES:
        visit(module, ())


def test_run_nodes_skips_type_checking_blocks():
    code = """
if TYPE_CHECKING:
    import types_only
else:
    import other
    if debug:
        import nested
if TYPE_CHECKING:
    import more_types
elif debug:
    import third
"""
    read = [node for node in _run_nodes(ast.parse(code)) if isinstance(node, ast.Import)]
    assert [node.names[0].name for node in read] == ["other", "nested", "third"]


def test_components_accept_only_their_config_section():
    wrong = [
        f"{_where(module, node.lineno)}: imports the complete config"
        for module in MODULES
        if not any(_within(module, name) for name in ROOT_CONFIG)
        for node in nodes(module)
        if isinstance(node, ast.ImportFrom) and _resolve(module, node) == "maxpipe.config.schema"
        if "Config" in [alias.name for alias in node.names]
    ]
    assert not wrong, "\n".join(wrong)


def _run_python(code: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_jax_free_modules_do_not_import_jax():
    free = [module for module in MODULES if any(_within(module, name) for name in JAX_FREE)]
    loaded = _run_python(
        "import importlib, sys\n"
        f"for module in {free!r}:\n"
        "    importlib.import_module(module)\n"
        "    if 'jax' in sys.modules:\n"
        "        print(module)\n"
        "        break\n"
    )
    assert not loaded, f"importing {loaded} imports jax"


def test_importing_package_loads_no_other_module():
    loaded = _run_python(
        "import sys; before = set(sys.modules); import maxpipe; "
        "print(*sorted(set(sys.modules) - before - {'__future__'}))"
    )
    assert loaded == "maxpipe"


# --- size, names, words ------------------------------------------------------------


def test_files_and_functions_are_short():
    long = []
    for module in MODULES:
        lines = len(sources()[module].read_text(encoding="utf-8").splitlines())
        if lines > MAX_FILE_LINES:
            long.append(f"{module} has {lines} lines: split it")
        for node in nodes(module):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    where = _where(module, node.lineno)
                    long.append(f"{where}: {node.name} has {lines} lines: split it")
    assert not long, "\n".join(long)


def test_module_docstrings_begin_with_sentence():
    summaries = {
        module: (ast.get_docstring(tree(module)) or "").partition("\n")[0] for module in MODULES
    }
    wrong = [f"{name}: {line!r}" for name, line in summaries.items() if not line.endswith(".")]
    assert not wrong, "\n".join(wrong)


def test_public_names_have_docstrings():
    missing = [
        f"{_where(module, node.lineno)}: {node.name} has no docstring"
        for module in MODULES
        for node in tree(module).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and "overload" not in [ast.unparse(each) for each in node.decorator_list]
        and not ast.get_docstring(node)
    ]
    assert not missing, "\n".join(missing)


def test_module_names_are_specific_and_package_files_empty():
    for module, path in sources().items():
        assert not NAMELESS & set(module.split(".")), f"{path}: the name is too general"
        if _is_folder(module):
            held = [n for n in tree(module).body[1:] if not isinstance(n, ast.ImportFrom)]
            names = [ast.unparse(n.target) for n in held if isinstance(n, ast.AnnAssign)]
            table = [PLUGIN_TABLES[module]] if module in PLUGIN_TABLES else []
            assert names == table and len(held) == len(table), f"{path}: must be empty"
            siblings = [other for other in path.parent.glob("*.py") if other != path]
            assert len(siblings) >= 2, f"{path.parent}: a folder must contain at least two modules"


def test_no_todo_comments_or_local_paths():
    folders = [PACKAGE, *(ROOT / name for name in ("configs", "scripts", "benchmarks", "docs"))]
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile"]
    files += [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    here = [f"{path}/" for path in (ROOT, Path.home()) if len(path.parts) > 1]
    wrong = []
    for path in files:
        if path.suffix not in {".py", ".md", ".yml", ".sh", ""} or not path.exists():
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if re.search(r"\b(TODO|FIXME)\b", line) or any(part in line for part in here):
                wrong.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not wrong, "\n".join(wrong)


# --- config keys ---------------------------------------------------------------------


@cache
def config_keys() -> dict[tuple[str, str], str]:
    """Return the docstring of each field, or "", keyed by (section class, field)."""
    keys = {}
    for section in _section_classes():
        if section.name != "Config":
            for node, below in zip(section.body, [*section.body[1:], None], strict=True):
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    doc = below.value if isinstance(below, ast.Expr) else None
                    text = doc.value if isinstance(doc, ast.Constant) else ""
                    keys[section.name, node.target.id] = str(text)
    return keys


@cache
def section_names() -> dict[str, str]:
    """Return the name of each section in config files, keyed by section class."""
    root = next(
        node
        for node in tree("maxpipe.config.schema").body
        if isinstance(node, ast.ClassDef) and node.name == "Config"
    )
    named = {
        ast.unparse(node.annotation): ast.unparse(node.target)
        for node in root.body
        if isinstance(node, ast.AnnAssign)
    }
    return {section.name: "own" for section in _section_classes()} | named


def _section_classes() -> list[ast.ClassDef]:
    """Return the section classes of the config and of the model families."""
    folders = ("maxpipe.config.schema", "maxpipe.config.sections", "maxpipe.models")
    declaring = [m for m in MODULES if any(_within(m, folder) for folder in folders)]
    return [
        node
        for module in declaring
        for node in tree(module).body
        if isinstance(node, ast.ClassDef) and node.name.endswith("Config")
    ]


def test_every_config_key_is_documented():
    wrong = [
        f"{section}.{key}: {doc!r}"
        for (section, key), doc in config_keys().items()
        if not doc.rstrip().endswith(".")
    ]
    assert not wrong, "no description that ends in a period:\n" + "\n".join(wrong)


def _reads(module: str) -> Iterator[tuple[str, str]]:
    """Yield (owner, name pattern) of each attribute read: `x.y.steps` is ("y", "steps")."""
    for node in nodes(module):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield _last_name(node.value), re.escape(node.attr)
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "getattr"
            and len(node.args) >= 2
        ):
            name = node.args[1]
            parts = name.values if isinstance(name, ast.JoinedStr) else [name]
            pattern = "".join(
                re.escape(str(part.value)) if isinstance(part, ast.Constant) else r"\w+"
                for part in parts
            )
            if pattern != r"\w+":  # matches any attribute
                yield _last_name(node.args[0]), pattern


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _item_classes() -> set[str]:
    """Return the names of the classes whose items are the values of list keys."""
    annotations = (
        ast.unparse(statement.annotation)
        for section in _section_classes()
        for statement in section.body
        if isinstance(statement, ast.AnnAssign)
    )
    return {
        match[1] for text in annotations if (match := re.fullmatch(r"list\[(\w+Config)\]", text))
    }


@cache
def _matching_keys(pattern: str) -> list[tuple[str, str]]:
    """Return the (section class, field) pairs whose field matches a pattern."""
    return [(section, key) for section, key in config_keys() if re.fullmatch(pattern, key)]


@cache
def _keys_read() -> set[tuple[str, str]]:
    """Return the keys that are read outside config/.

    A key is read from a variable with the name of its section, or in a module that names its
    section class. Fields of list items may also be read in config/.
    """
    read, items, own = set(), _item_classes(), section_names()
    for module in MODULES:
        in_config = _within(module, "maxpipe.config")
        names = {node.id for node in nodes(module) if isinstance(node, ast.Name)}
        for origin, pattern in {*_reads(module)}:
            for section, key in _matching_keys(pattern):
                if in_config and section not in items:
                    continue
                sources_of_key = {own[section], f"{own[section]}_config"}
                if section in names or origin in sources_of_key:
                    read.add((section, key))
    return read


def test_every_config_key_is_read():
    unread = {
        f"{section_names()[section]}.{key}"
        for section, key in config_keys()
        if (section, key) not in _keys_read()
    }
    promises = sorted(unread - UNREAD_KEYS.keys())
    assert not promises, "these keys are never read:\n" + "\n".join(promises)
    stale = sorted(UNREAD_KEYS.keys() - unread)
    assert not stale, "these keys are read, remove them from UNREAD_KEYS:\n" + "\n".join(stale)


# --- CONTRIBUTING -----------------------------------------------------------------------


def _replace_block(page: Path, name: str, text: str, update: bool) -> None:
    """Check or update the text between the markers `name` of a page."""
    start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    before, found, rest = page.read_text(encoding="utf-8").partition(start)
    listed, closed, after = rest.partition(end)
    assert found and closed, f"{page.name} needs the lines {start.strip()} and {end}"
    if update:
        listed = text
        page.write_text(before + start + listed + end + after, encoding="utf-8")
    assert listed == text, "run: pytest tests/test_architecture.py --update-golden"


def test_contributing_lists_layers(update_golden: bool):
    lines = [f"{layer:12}  {text}" for layer, text in reversed(LAYERS.items())]
    text = "\n".join(["```text", *lines, "```", ""])
    _replace_block(ROOT / "CONTRIBUTING.md", "arrows", text, update_golden)
