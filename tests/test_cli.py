from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

import maxpipe
from maxpipe.cli import main
from maxpipe.config.load import load, to_yaml
from maxpipe.errors import (
    Code,
    MaxpipeError,
    Preemption,
    StorageError,
    UserInterrupt,
    out_of_memory_error,
)
from tests.errors import without_codes

ROOT = Path(__file__).parents[1]
TINY = str(ROOT / "configs/model/tiny.yml")
QUICKSTART = str(ROOT / "configs/quickstart.yml")
HANDWRITTEN = str(ROOT / "tests/golden/handwritten.csv")

Capture = pytest.CaptureFixture[str]


def run(*args: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "maxpipe", *args],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
        **options,
    )


def fails(capsys: Capture, *args: str, code: int = 2) -> str:
    """Run a command that prints only an error, and return stderr."""
    assert main(args) == code
    out, err = capsys.readouterr()
    assert not out
    assert "Traceback" not in err
    return err


# --- start-up ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args",
    [
        ["--help"],
        ["config", "print", TINY, "train.steps=1"],
        ["config", "explain", "pipeline.schedule"],
        ["schedule"],
        ["schedule", "zb_v", "--svg", "/dev/null", "--perfetto", "/dev/null"],
        ["schedule", "--compare", "1f1b,zb_v"],
        ["doctor", "--help"],
        ["launch", "slurm", QUICKSTART, "launch.topology=cpu:8"],
    ],
    ids=lambda args: "-".join(args[:2]),
)
def test_commands_without_devices_do_not_import_jax(args: list[str]):
    code = (
        "import sys; from maxpipe.cli import main\n"
        f"try: main({args!r})\n"
        "except SystemExit: pass\n"
        "print([m for m in ('jax', 'omegaconf', 'numpy') if m in sys.modules], file=sys.stderr)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 0 and "jax" not in ran.stderr
    if args == ["--help"]:
        assert ran.stderr.strip() == "[]"


@pytest.mark.parametrize(("args", "seconds"), [("--help", 0.5), ("schedule --compare 1f1b", 1.0)])
def test_commands_without_devices_start_fast(args: str, seconds: float):
    best = float("inf")
    for _ in range(12):  # other tests may be using all cores
        start = time.perf_counter()
        assert run(*args.split()).returncode == 0
        best = min(best, time.perf_counter() - start)
        if best < seconds:
            break
    assert best < seconds


@pytest.mark.parametrize(
    "command",
    [
        *("", "train", "launch gke", "config", "config print", "schedule"),
        *("goodput", "checkpoints prune", "doctor", "env", "import", "export", "data prepare"),
    ],
)
def test_every_command_has_help(command: str, capsys: Capture):
    with pytest.raises(SystemExit) as stop:
        main([*command.split(), "--help"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: maxpipe {command}".rstrip())


def test_version_option_prints_version(capsys: Capture):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"maxpipe {maxpipe.__version__}\n"


# --- user errors ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("", "a command is required: train, launch, plan, compile, config, schedule, checkpoints"),
        ("trian", "Did you mean `maxpipe train`?"),
        ("qqq", "See `maxpipe --help`."),
        ("config", "a command is required: print, explain, schema"),
        ("config prnt", "Did you mean `maxpipe config print`?"),
        ("config explain a b", "unrecognized arguments: b"),
        ("config explain model.num_layer", "explain model.num_layers`?"),
        ("checkpoints list", "the following arguments are required: RUN"),
        ("checkpoints prune a --keep x", "x is not an integer"),
        ("checkpoints prune a --keep-every-hours x", "x is not a number"),
        ("checkpoints prun a", "Did you mean `maxpipe checkpoints prune`?"),
        ("schedule gpip", "Did you mean `maxpipe schedule gpipe`?"),
        (
            "plan quickstart --topology h100:7",
            "so that their product is 7, or use a topology of 8",
        ),
        ("plan quickstart --topology v5p:2x2x1 mesh.ici_data=-1", "product is 4, or use"),
        ("plan quickstart --topology cpu:2", "so that their product is 2, or use cpu:8."),
        ("plan quickstart --foo", "Run the command with --help."),
        ("plan quickstart --serch", "Write --search."),
        ("plan quickstart --topology cpu:2 --draw a.gif", "Write --draw a.gif.svg."),
        (
            "plan quickstart --topology cpu:2 --draw-timeline a.gif",
            "Write --draw-timeline a.gif.svg.",
        ),
        (
            "compile quickstart --topology cpu:1 --save=",
            "--save = ''\n  must be a file or a folder",
        ),
        ("plan llama3-8b train.steps=1 --topology h100:8", "Set mesh.ici_data=-1 to use"),
        ("schedule quickstrat", "Did you mean `maxpipe schedule quickstart`?"),
        ("schedule --compare foo,1f1b", "See `maxpipe schedule --help`"),
        ("schedule 1F1B", "Did you mean `maxpipe schedule 1f1b`?"),
        ("schedule zerobubble", "  Write zb_h1 (same memory as 1f1b)"),
        ("schedule 1f1b --write f.png", "Write --png f.png."),
        ("schedule 1f1b --output=f.svg", "Write --svg f.svg."),
        ("schedule 1f1b --stage 4", "Write --stages 4."),
        ("fit TINY", "Did you mean `maxpipe train`?"),
        ("serve TINY", "`maxpipe generate RUN --interactive`"),
        ("sample TINY", "Did you mean `maxpipe generate`?"),
        ("convert TINY", "`maxpipe import`"),
        ("import nowhere", "the following arguments are required: --out"),
        ("import nowhere --out x", "must be a folder on this machine"),
        (f"import {'a' * 300} --out x", "must be a folder on this machine"),
        (f"generate {'a' * 300} --prompt x", "is not a run"),
        (f"generate hf:{'a' * 300} --prompt x", "must be a folder on this machine"),
        ("export nowhere x", "is not a run"),
        ("export nowhere x --format gguf", "invalid choice: 'gguf'"),
        ("train TINY --steps 5", "Write train.steps=5."),
        ("train --steps 5 TINY", "Write train.steps=5."),
        ("train TINY --learning-rate=1e-4", "Write optim.learning_rate=1e-4."),
        ("train TINY --lr 1e-4", "Write optim.learning_rate=1e-4."),
        ("train TINY --wandb", "Write 'log.trackers=[tensorboard, wandb]'."),
        ("plan TINY train.steps=1 --topology h100x8", "Did you mean h100:8?"),
        ("schedule mine.csv", "Did you mean `maxpipe schedule file:mine.csv`?"),
        ("schedule file:mine.csv", "cannot be read: No such file"),
        ("schedule --compare 1f1b,zb_w", "command line: --compare zb_w\n"),
        ("schedule --compare 1f1b,,zb_v", "is not a schedule: the schedules are gpipe"),
        ("schedule --compare=", "Did you mean `maxpipe schedule interleaved`?"),
        ("schedule zb_v --compare 1f1b", "Leave out --compare or zb_v."),
        ("schedule --compare 1f1b --csv a.csv", "--csv writes one schedule."),
        ("schedule --compare 1f1b --out a.json", "--perfetto writes one schedule."),
        ("schedule --out a.pdf", "must end in .svg, .png, .csv, .json."),
        ("schedule --out a.svg --svg b.svg", "Remove --out or --svg."),
        ("schedule --compare gpipe,zb_v --group 4", "the schedule is gpipe, zb_v"),
        ("schedule --compare gpipe,zb_v --delayed", "pipeline.schedule is zb_v"),
        ("schedule zb_v --delayed", "pipeline.delayed_forwarding = True\n"),
        ("schedule zb_v --repeats 3", "must be 2 with pipeline.schedule=zb_v"),
        ("schedule --costs 1,2", "1,2 must be three positive numbers, such as 1,1,1.5"),
        ("schedule --costs 1,0,1", "must be three positive numbers"),
        ("schedule --costs 1,x,1", "must be three positive numbers"),
        ("schedule --costs 1,inf,1", "must be three positive numbers"),
        ("schedule file:HAND --stages 3", "must be 2, as in HAND."),
        ("schedule --compare 1f1b,file:HAND --microbatches 3", "must be 2, as in HAND."),
        ("schedule --repeats x", "x is not an integer"),
        ("schedule --stages", "expected one argument"),
        ("schedule --stages 0", "--stages: 0 is below the minimum of 1"),
        ("schedule gpipe --repeats 2", "one chunk per stage"),
        ("schedule gpipe --group 4", "the schedule is gpipe"),
        ("schedule --group 3", "between the number of stages (4)"),
        ("config print", "are required"),
        ("config print nothing.yml", "cannot be read"),
        ("config print TINY --train.steps=5 train.steps=1", "Write train.steps=5."),
        ("config print TINY --originn train.steps=1", "Write --origin."),
        ("config print TINY train.steps", "has no value"),
        ("config print TINY train.steps = 5", "has no value"),
        ("train", "are required"),
        ("train TINY", "one of the two keys must set the run length"),
        ("train TINY train.steps=x", "must be an integer"),
        ("schedule TINY train.steps=1 mesh.ici_stage=-1", "Set --stages"),
    ],
)
def test_error_states_location_value_rule_and_action(args: str, message: str, capsys: Capture):
    err = fails(capsys, *args.replace("TINY", TINY).replace("HAND", HANDWRITTEN).split())
    assert message.replace("HAND", HANDWRITTEN) in without_codes(err)
    lines = err.rstrip("\n").split("\n")
    assert len(lines) % 3 == 0
    for where, rule, action in zip(lines[::3], lines[1::3], lines[2::3], strict=True):
        assert where and not where.startswith(" ")
        assert rule.startswith("  ") and rule.endswith(".")
        assert action.startswith("  ") and action[-1] in ".?"


def test_all_config_errors_are_reported_together(capsys: Capture, tmp_path: Path):
    file = tmp_path / "run.yml"
    file.write_text("model:\n  num_heads: 6\n  dmlp: 3\noptim:\n  beta1: 2\n")
    err = fails(capsys, "train", TINY, str(file), "train.steps=0", "--fast", "log.evry=1")
    for part in (
        f"{file}: model.num_heads = 6  [MP-MODEL-001]\n",
        f"{file}:3: model.dmlp = 3  [MP-CFG-001]\n",
        f"{file}: optim.beta1 = 2.0  [MP-CFG-003]\n",
        "command line: train.steps = 0  [MP-CFG-004]\n",
        "command line: --fast  [MP-CFG-001]\n",
        "command line: log.evry = 1  [MP-CFG-001]\n",
    ):
        assert part in err
    assert err.count("\n") == 18


def test_process_exits_with_code_of_error():
    ran = run("train", TINY, "train.steps=x")
    assert ran.returncode == 2 and not ran.stdout
    assert ran.stderr.startswith("command line: train.steps = x  [MP-CFG-002]\n")


# --- config --------------------------------------------------------------------------------


def test_config_print_accepts_options_in_any_position(capsys: Capture):
    assert main(["config", "print", "run.name=a", TINY, "--origin", "train.steps=2"]) == 0
    out = capsys.readouterr().out
    assert "  name: a  # run.name=a\n" in out
    assert f"  num_layers: 8  # {TINY}\n" in out
    assert "  steps: 2  # train.steps=2\n" in out


def test_config_print_outputs_config_as_yaml(capsys: Capture):
    assert main(["config", "print", TINY, "train.steps=2"]) == 0
    assert capsys.readouterr().out == to_yaml(load([TINY, "train.steps=2"]).config)


def test_config_schema_prints_json(capsys: Capture):
    assert main(["config", "schema"]) == 0
    assert "model" in json.loads(capsys.readouterr().out)["properties"]


# --- schedule ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "start"),
    [
        ("", "interleaved: 4 stages x 2 repeats, 8 microbatches"),
        ("1f1b", "1f1b: 4 stages x 1 repeat, 8 microbatches"),
        ("gpipe --stages 2 --microbatches 3", "gpipe: 2 stages x 1 repeat, 3 microbatches"),
        (
            "--repeats 3 --group 8",
            "interleaved: 4 stages x 3 repeats, 8 microbatches in groups of 8",
        ),
        ("TINY train.steps=1 mesh.ici_stage=2", "interleaved: 2 stages x 1 repeat, 1 micro"),
        ("TINY --stages 4 train.steps=1 --repeats 2", "interleaved: 4 stages x 2 repeats, 1 micro"),
        ("TINY train.steps=1 mesh.ici_stage=-1 --stages 4", "interleaved: 4 stages x 1"),
        (
            "gpipe TINY train.steps=1 pipeline.group=4 pipeline.microbatches=4 mesh.ici_stage=4",
            "gpipe: 4 stages x 1 repeat, 4 microbatches",
        ),
        ("zb_v", "zb_v: 4 stages x 2 repeats in a V, 8 microbatches"),
        ("zb_h1 --microbatches 5", "zb_h1: 4 stages x 1 repeat, 5 microbatches"),
        ("circular --delayed", "circular: 4 stages x 2 repeats, 8 microbatches in groups of 8, me"),
        ("file:HAND", "file:HAND: 2 stages x 2 repeats in a V, 2 microbatches"),
        ("file:HAND --delayed --stages 2", "file:HAND: 2 stages x 2 repeats in a V, 2 micro"),
    ],
)
def test_schedule_command_prints_text_diagram(args: str, start: str, capsys: Capture):
    args = args.replace("TINY", TINY).replace("HAND", HANDWRITTEN)
    assert main(["schedule", *args.split()]) == 0
    out = capsys.readouterr().out
    assert out.startswith(start.replace("HAND", HANDWRITTEN))
    assert "\ntick " in out


@pytest.mark.parametrize(
    "command", ["config print", "schedule", "plan --topology cpu:1 --json", "launch slurm"]
)
def test_commands_warn_once_about_renamed_key(command: str, capsys: Capture, tmp_path: Path):
    file = tmp_path / "old.yml"
    keys = "launch: {topology: 'cpu:1', workdir: /shared}\nmodel: {rope_scaling: 2}\n"
    file.write_text(keys + "train: {steps: 1}\n")
    name, *options = command.split()
    if name in ("config", "launch"):
        name, options = command, []
    assert main([*name.split(), "tiny", str(file), *options]) == 0
    out, err = capsys.readouterr()
    warning = f"warning: {file}:2: model.rope_scaling = 2 was renamed to model.llama.rope_factor."
    assert err.count(warning) == err.count("warning: ") == 1 and "warning" not in out
    if "--json" in options:
        assert json.loads(out)["num_devices"] == 1
    elif command == "config print":
        assert yaml.safe_load(out)["model"]["llama"]["rope_factor"] == 2


def test_schedule_command_rejects_excessive_size(capsys: Capture):
    assert main(["schedule", "1f1b", "--stages", "100000", "--microbatches", "4096"]) == 2
    assert "300,000" in capsys.readouterr().err


def test_schedule_command_reports_idle_time_with_costs(capsys: Capture):
    assert main(["schedule", "zb_v", "--costs", "1,2,0.5"]) == 0
    assert re.search(r"idle 5\.9% \(\d+\.\d% at 1:2:0\.5\), ", capsys.readouterr().out)


def test_schedule_command_writes_files_instead_of_diagram(capsys: Capture, tmp_path: Path):
    files = {kind: tmp_path / f"zb_v.{kind}" for kind in ("svg", "png", "csv", "perfetto")}
    options = [part for kind, path in files.items() for part in (f"--{kind}", str(path))]
    assert main(["schedule", "zb_v", "--stages", "3", "--costs", "1,1,1.5", *options]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "zb_v: 3 stages x 2 repeats in a V, 8 microbatches in groups of 8"
    assert out[2:] == [f"wrote {path}" for path in files.values()]
    assert files["svg"].read_text().startswith("<svg ")
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    assert files["csv"].read_text().startswith("0F0,0F1,")
    assert len(json.loads(files["perfetto"].read_text())["traceEvents"]) > 3 * 3 * 2 * 8
    # The CSV file can be read as a schedule, and defines the default sizes.
    assert main(["schedule", f"file:{files['csv']}"]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith(out[0].removeprefix("zb_v"))


@pytest.mark.parametrize("kind", ["svg", "png", "csv", "perfetto"])
def test_unwritable_schedule_file_is_storage_error(kind: str, capsys: Capture, tmp_path: Path):
    for path, reason in (
        (tmp_path / "nowhere" / "a", "No such file or directory"),
        (tmp_path, "Is a directory"),
        ("", "Is a directory"),
    ):
        err = fails(capsys, "schedule", f"--{kind}", str(path), code=74)
        assert err.startswith(f"command line: --{kind} = ")
        assert f"\n  cannot be written: {reason}.\n" in err


@pytest.mark.parametrize("more", [[], ["--repeats", "3"]])
def test_compare_lists_1f1b_and_interleaved_separately(more: list[str], capsys: Capture):
    assert main(["schedule", "--compare", "1f1b,interleaved", *more]) == 0
    out = capsys.readouterr().out
    (first, second) = re.findall(r"^(?:1f1b|interleaved) +(.*)$", out, re.MULTILINE)
    assert first != second and "are identical" not in out


def test_compare_reports_identical_schedules(capsys: Capture):
    assert main(["schedule", "--compare", "1f1b,interleaved,gpipe", "--stages", "1"]) == 0
    assert "v_half" not in capsys.readouterr().out
    assert main(["schedule", "--compare", "zb_v,zb_v"]) == 0
    assert "zb_v and zb_v are identical at these sizes." in capsys.readouterr().out


def test_schedule_summary_uses_singular_for_one(capsys: Capture):
    assert main(["schedule", "1f1b", "--stages", "1", "--microbatches", "1"]) == 0
    summary = " ".join(capsys.readouterr().out.splitlines()[:2])
    assert not re.search(r"\b1 \w+s\b", summary.replace("groups of 1", ""))
    assert "1 stage x 1 repeat, 1 microbatch" in summary


def test_compare_prints_one_aligned_row_per_schedule(capsys: Capture):
    names = f"gpipe,interleaved,zb_v,dualpipe_v,file:{HANDWRITTEN}"
    assert main(["schedule", "--compare", names, "--repeats", "3", "--costs", "1,1,2"]) == 0
    out = capsys.readouterr().out.splitlines()
    # Compared schedules use the sizes of the file, except for a fixed number of repeats.
    assert out[0] == "2 stages, 2 microbatches"
    rows = [line.split() for line in out[3:8]]
    assert [row[0] for row in rows] == names.split(",")
    assert [row[1] for row in rows] == ["1", "3", "2", "2", "2"]
    assert len({len(line) for line in out[3:8]}) == 1
    assert main(["schedule", TINY, "train.steps=1", "mesh.ici_stage=4", "--compare", "1f1b"]) == 0
    assert capsys.readouterr().out.startswith("4 stages, 1 microbatch\n")


# --- exit codes ----------------------------------------------------------------------------


def _replace_train(monkeypatch: pytest.MonkeyPatch, train) -> None:
    monkeypatch.setattr("maxpipe.api.trainer.train", train)


def test_train_passes_config_to_loop_and_returns_zero(monkeypatch: pytest.MonkeyPatch):
    seen = []
    _replace_train(monkeypatch, seen.append)
    assert main(["train", TINY, "train.steps=3"]) == 0
    assert seen == [load([TINY, "train.steps=3"])]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Preemption("saved"), 75),
        (StorageError(Code.IO_UNWRITABLE, "disk is full"), 74),
        (MaxpipeError(Code.SCHED_INVALID, "odd"), 70),
        (UserInterrupt("saved"), 130),
        (KeyboardInterrupt(), 130),
    ],
)
def test_expected_error_exits_without_traceback(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: Capture
):
    def train(_):
        raise error

    _replace_train(monkeypatch, train)
    assert fails(capsys, "train", TINY, "train.steps=3", code=code).strip() == str(error)


def test_compile_save_rejects_batch_ramp(capsys: Capture):
    ramp = ["train.steps=9", "train.batch_size=4", "train.batch_ramp=[{batch_size: 2, steps: 2}]"]
    ramp += ["pipeline.microbatches=2"]
    assert main(["compile", TINY, *ramp, "--topology", "cpu:1", "--save", "there"]) == 2
    assert "--save, or set train.batch_ramp=[]" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--write", "--draw", "--draw-timeline"])
def test_unwritable_output_is_reported_before_search(option: str, capsys: Capture):
    given = ["plan", "quickstart", "--topology", "cpu:8", "--search", option, "/nowhere/x.svg"]
    assert main(given) == 74
    output = capsys.readouterr()
    assert (
        not output.out
        and "No such file or directory.\n  Specify a file in an existing" in output.err
    )


@pytest.mark.fault("H5")
@pytest.mark.parametrize("arguments", [["schedule", "1f1b"], ["plan", TINY], ["doctor"]])
def test_ctrl_c_ends_any_command_without_traceback(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Capture
):
    def pressed(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("maxpipe.cli._run", pressed)
    assert main(arguments) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.fault("H5")
def test_ctrl_c_during_startup_prints_no_traceback():
    code = "import sys, _thread\nsys.argv[1:] = ['env']\n"
    code += "import maxpipe.__main__ as start\n"
    code += "class Late:\n  def find_spec(self, name, *_):\n"
    code += "    if name == 'maxpipe.cli': raise KeyboardInterrupt\n"
    code += "sys.meta_path.insert(0, Late())\nsys.exit(start.main())"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "")


@pytest.mark.fault("H5")
@pytest.mark.parametrize("where", ["import", "callback"])
def test_ctrl_c_during_import_or_callback_is_not_lost(where: str, tmp_path: Path):
    """Native modules convert KeyboardInterrupt to another error; callbacks of gc discard it."""
    press = "import gc, os, signal\ndef press(*_): os.kill(os.getpid(), signal.SIGINT)\n"
    module = "try:\n  press()\nexcept BaseException:\n  raise ImportError('lost') from None\n"
    (tmp_path / "native.py").write_text(press + module)
    code = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n"
    code += "import maxpipe.__main__ as start\nimport maxpipe.cli as cli\n" + press
    code += "def _xla_gc_callback(*_): press()\n"
    if where == "import":
        code += "def main():\n  import native\n"
    else:
        code += "def main():\n  gc.callbacks.append(_xla_gc_callback)\n  gc.collect()\n"
    code += "cli.main = main\nsys.exit(start.main())"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "")


@pytest.mark.fault("H5")
def test_ctrl_c_during_compilation_exits_without_crash():
    """The compiler cannot be interrupted, and its threads must not crash Python at exit."""
    code = "import os, signal, sys, threading\n"
    code += "sys.argv[1:] = ['compile', 'tiny', '--topology', 'cpu:2', 'mesh.ici_stage=2', "
    code += "'train.steps=1', 'pipeline.microbatches=2', 'train.batch_size=2']\n"
    code += "import maxpipe.__main__ as start\nfrom maxpipe.step.step import Steps\n"
    code += "lower = Steps.lower_train\n"
    code += "def press(self):\n"
    code += "  found = lower(self)\n"
    code += "  threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
    code += "  return found\n"
    code += "Steps.lower_train = press\nsys.exit(start.main())"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "")


STREAMS = [
    (">&-", 0, ""),
    ("2>&-", 0, ""),
    ("<&- >&- 2>&-", 0, "1"),
    (">/dev/full", 74, ""),
    (">/dev/full", 74, "1"),
    (">/dev/full 2>/dev/full", 74, ""),
    ("| head -n 1 >/dev/null; exit ${PIPESTATUS[0]}", 0, ""),
    ("| head -n 1 >/dev/null; exit ${PIPESTATUS[0]}", 0, "1"),
]


@pytest.mark.fault("H6")
@pytest.mark.parametrize(("streams", "code", "unbuffered"), STREAMS)
def test_exit_code_with_closed_or_full_streams(streams: str, code: int, unbuffered: str):
    command = f'"{sys.executable}" -m maxpipe config print "{TINY}" train.steps=3 {streams}'
    ran = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
    )
    assert ran.returncode == code, ran.stderr
    assert "Traceback" not in ran.stderr and "Exception ignored" not in ran.stderr
    if code and "2>" not in streams:
        assert without_codes(ran.stderr).startswith(
            "standard output: cannot be written\n  No space left"
        )


@pytest.mark.fault("H6")
def test_config_error_keeps_exit_code_if_stderr_is_full():
    command = f'"{sys.executable}" -m maxpipe config print none.yml >/dev/full 2>/dev/full'
    assert subprocess.run(["bash", "-c", command], cwd=ROOT).returncode == 2


def test_rust_panic_is_reported_as_bug(monkeypatch: pytest.MonkeyPatch, capsys: Capture):
    class PanicException(BaseException):
        """Same name and base class as in pyo3."""

    def train(_):
        raise PanicException("index out of bounds")

    _replace_train(monkeypatch, train)
    assert main(["train", TINY, "train.steps=3"]) == 70
    assert "this is a bug in maxpipe" in capsys.readouterr().err


def test_config_that_is_named_pipe_is_rejected(tmp_path: Path, capsys: Capture):
    os.mkfifo(tmp_path / "a.yml")
    err = fails(capsys, "train", str(tmp_path / "a.yml"))
    assert "it is not a regular file" in err


def test_control_characters_in_value_are_escaped(capsys: Capture):
    err = fails(capsys, "train", TINY, "train.steps=3", "run.name=b\nc\td")
    assert err.splitlines()[0].endswith("= b\\nc\\td  [MP-CFG-003]")


def test_run_name_length_is_limited(capsys: Capture):
    err = fails(capsys, "train", TINY, "train.steps=3", f"run.name={'a' * 300}")
    assert "at most 200 letters" in err


def test_unexpected_exception_prints_traceback(monkeypatch: pytest.MonkeyPatch, capsys: Capture):
    def train(_):
        raise ZeroDivisionError("oh")

    _replace_train(monkeypatch, train)
    assert main(["train", TINY, "train.steps=3"]) == 70
    err = capsys.readouterr().err
    assert "Traceback" in err and "ZeroDivisionError: oh" in err
    assert "this is a bug in maxpipe" in err.splitlines()[-1]


def test_closed_output_pipe_is_not_an_error():
    read, write = os.pipe()
    os.close(read)
    ran = subprocess.run(
        [sys.executable, "-m", "maxpipe", "config", "schema"],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    os.close(write)
    assert ran.stderr == "" and ran.returncode == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["goodput", "~nobody-here/run"],
        ["checkpoints", "list", "~nobody-here/run"],
        ["train", "quickstart", "run.dir=~nobody-here/runs"],
        ["train", "quickstart", "checkpoint.dir=~nobody-here/runs"],
        [
            "train",
            "quickstart",
            "checkpoint.local_dir=~nobody-here",
            "checkpoint.local_every=9",
        ],
        ["train", "quickstart", "checkpoint.restore_from=~nobody-here/run"],
    ],
)
def test_nonexistent_home_folder_is_rejected(
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)  # without earlier runs
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert "no such home folder" in err
    given = [each.partition("=")[0] for each in arguments if "~" in each]
    assert given[0] in err  # the key, or the path itself


def test_memory_error_without_message_is_described() -> None:
    assert "out of memory" in str(out_of_memory_error(MemoryError()))
    assert "out of memory: 3 GiB." in str(out_of_memory_error(MemoryError("3 GiB")))
