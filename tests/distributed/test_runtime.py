"""Start and stop of a process, and errors if the machine does not match the config."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from jax._src.distributed import global_state

from maxpipe.config.sections.runtime import RuntimeConfig
from maxpipe.distributed import runtime
from maxpipe.distributed.control_channel import SIGNALS
from maxpipe.distributed.phases import Phases
from maxpipe.errors import ConfigError, MaxpipeError, UnreachableError
from tests.errors import assert_error

ROOT = Path(__file__).parents[2]
SETTINGS: Any = jax.config


def environment() -> dict[str, str]:
    """Return the environment without variables of jax."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))
    }
    return kept | {"PYTHONPATH": str(ROOT)}


def python(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process with the environment of a user."""
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=120,
        check=False,
    )


@contextlib.contextmanager
def background(code: str) -> Iterator[subprocess.Popen[str]]:
    """Run code in a background process."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=pipe, stderr=pipe, text=True, env=environment()
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def started(config: str, cpu_devices: int = 1, then: str = "pass") -> str:
    """Return code that starts the runtime and exits like the command."""
    return f"""
import json, os, sys, tempfile, time
from pathlib import Path
from maxpipe.distributed import runtime
from maxpipe.distributed.phases import Phases
from maxpipe.config.schema import RuntimeConfig
from maxpipe.errors import MaxpipeError
try:
    folder = Path(tempfile.gettempdir(), 'maxpipe-runtime')
    config = RuntimeConfig({config})
    with runtime.join_processes(config, {cpu_devices}, Phases(), {{}}, folder) as link:
        {then}
except MaxpipeError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


def assert_complete_error(message: str) -> None:
    assert "Traceback" not in message
    where, rule, action = message.splitlines()
    assert not where.startswith(" ") and rule.startswith("  ") and action.startswith("  ")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# --- devices and cache -----------------------------------------------------------------------


def test_start_creates_virtual_devices_without_output(tmp_path: Path):
    config = f"platform='cpu', compilation_cache={str(tmp_path / 'new')!r}"
    ran = python(started(config, 3, "import jax; print(json.dumps(len(jax.devices())))"))
    assert (ran.returncode, ran.stderr, json.loads(ran.stdout)) == (0, "", 3)
    assert not (tmp_path / "new").exists()  # several devices: no cache


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, 0.92),
        ({"XLA_CLIENT_MEM_FRACTION": "0.5"}, 0.5),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.4"}, 0.4),
    ],
)
def test_gpu_allocator_uses_fraction_of_plans(variables: dict[str, str], wanted: float):
    options = "xla_client.generate_pjrt_gpu_plugin_options()['memory_fraction']"
    then = f"from jaxlib import xla_client; print({options})"
    ran = python(
        f"import os; os.environ |= {variables}\n"
        + started("platform='cpu', compilation_cache=''", then=then)
    )
    assert (ran.returncode, float(ran.stdout)) == (0, wanted), ran.stderr


def test_single_device_uses_compilation_cache(tmp_path: Path):
    config = f"platform='cpu', compilation_cache={str(tmp_path / 'new')!r}"
    ran = python(started(config, 1))
    assert (ran.returncode, ran.stderr) == (0, "")
    assert (tmp_path / "new").is_dir()


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize("num_processes", [1, pytest.param(0, marks=pytest.mark.long)])
def test_missing_platform_is_rejected(platform: str, num_processes: int):
    if jax.local_devices(backend="cpu") != jax.devices() or Path("/dev/accel0").exists():
        pytest.skip("this machine has an accelerator")
    if platform == "cuda" and Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a GPU")
    # With a detected cluster, jax connects to it before it searches for devices.
    joins = "import jax; jax.distributed.initialize = lambda **options: None\n"
    config = f"platform={platform!r}, compilation_cache='', num_processes={num_processes}"
    ran = python((joins if num_processes == 0 else "") + started(config))
    assert ran.returncode == 2, ran.stderr
    assert_complete_error(ran.stderr)
    assert ran.stderr.startswith(f"runtime.platform = {platform}  [MP-ENV-002]\n")
    assert "runtime.platform=cpu" in ran.stderr


def test_unwritable_cache_is_warning(tmp_path: Path):
    (tmp_path / "file").write_text("")
    folder = str(tmp_path / "file" / "cache")
    ran = python(started(f"platform='cpu', compilation_cache={folder!r}"))
    assert ran.returncode == 0
    (line,) = ran.stderr.splitlines()
    assert f"runtime.compilation_cache = {folder}" in line and "not cached" in line


def test_default_cache_without_home_folder_is_warning():
    code = "import os, pwd\n"
    code += "os.environ.pop('HOME', None)\n"
    code += "def none(uid): raise KeyError(uid)\n"
    code += "pwd.getpwuid = none\n"
    ran = python(code + started("platform='cpu'"))
    assert ran.returncode == 0
    (line,) = ran.stderr.splitlines()
    assert line.startswith("runtime.compilation_cache = ~/") and "(HOME is not set)" in line
    ran = python(code + started("platform='cpu', compilation_cache='~/mine'"))
    assert ran.returncode == 2
    assert ran.stderr.startswith("runtime.compilation_cache = ~/mine  [MP-IO-003]\n")


def test_libraries_do_not_print_log_records_twice():
    code = started("platform='cpu', compilation_cache=''")
    warn = "import logging; logging.getLogger('orbax').warning('once')"
    ran = python(f"import orbax.checkpoint\n{code}{warn}")
    assert ran.stderr == "once\n"


def test_use_cpu_only_removes_only_stream_handlers():
    root, ours = logging.getLogger(), logging.NullHandler()
    root.addHandler(ours)
    printer = logging.StreamHandler()
    root.addHandler(printer)
    try:
        runtime.use_cpu_only()
        assert ours in root.handlers and printer not in root.handlers
        assert SETTINGS.jax_platforms == "cpu"
    finally:
        root.removeHandler(ours)


# --- other processes -------------------------------------------------------------------------


@pytest.mark.multihost
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.long)])
def test_missing_processes_are_reported_after_timeout(rank: int):
    address = f"127.0.0.1:{free_port()}"
    config = f"platform='cpu', compilation_cache='', num_processes=2, process_id={rank}"
    config += f", coordinator={address!r}, init_timeout_seconds=2"
    start = time.monotonic()
    ran = python(started(config))
    assert time.monotonic() - start < 30
    assert ran.returncode == 71, ran.stderr
    assert_complete_error(ran.stderr)
    assert ran.stderr.startswith(f"runtime.coordinator = {address}  [MP-NET-001]\n")
    assert f"process {rank} of 2" in ran.stderr and "within 2 s" in ran.stderr
    if rank:
        assert "process 0 has not written a secret to the run folder" in ran.stderr
        assert "MAXPIPE_RUN_SECRET" in ran.stderr


@pytest.mark.multihost
@pytest.mark.fault("P7")
@pytest.mark.parametrize(
    "host", ["localhost", pytest.param(socket.gethostname(), marks=pytest.mark.long)]
)
def test_processes_without_secret_read_it_from_run_folder(host: str, tmp_path: Path):
    """The secret is removed when all have connected, or when process 0 stops before that."""
    config = "platform='cpu', compilation_cache='', num_processes=2, "
    config += f"coordinator='{host}:{free_port()}', process_id="
    codes = [
        started(f"{config}{rank}", then="print(sorted(os.listdir(folder)))").replace(
            "tempfile.gettempdir(), 'maxpipe-runtime'", repr(str(tmp_path))
        )
        for rank in (0, 1)
    ]
    with background(codes[0]) as first:
        deadline = time.monotonic() + 60
        while not list(tmp_path.iterdir()):
            assert time.monotonic() < deadline and first.poll() is None
            time.sleep(0.05)
        first.send_signal(signal.SIGTERM)
        assert first.wait(30) == 75
        assert not list(tmp_path.iterdir())
    with background(codes[0]) as first, background(codes[1]) as second:
        outputs = [process.communicate(timeout=60) for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], outputs
    assert [out for out, _ in outputs] == ["[]\n", "[]\n"]


def test_undetected_cluster_is_rejected():
    ran = python(started("platform='cpu', compilation_cache='', num_processes=0"))
    assert ran.returncode == 2, ran.stderr
    assert_complete_error(ran.stderr)
    assert "detected by jax" in ran.stderr


@pytest.mark.parametrize(
    ("coordinator", "names", "found"),
    [
        ("head-0.cluster:1234", ["10.1.2.3"], "head-0.cluster"),
        ("[fd00::7]:1234", ["10.1.2.3"], "fd00::7"),
        (None, ["127.0.1.1", "10.1.2.3"], "this-host"),
        (None, ["127.0.1.1"], "127.0.0.1"),
        (None, [], "127.0.0.1"),
    ],
)
def test_own_address_on_host_without_route(
    monkeypatch: pytest.MonkeyPatch, coordinator: str | None, names: list[str], found: str
):
    class NoRoute(socket.socket):
        def connect(self, address: Any) -> None:
            raise OSError(errno.ENETUNREACH, "Network is unreachable")

    def resolve(host: str, port: None) -> list[Any]:
        assert host == "this-host"
        if not names:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (name, 0)) for name in names]

    monkeypatch.setattr(socket, "socket", NoRoute)
    monkeypatch.setattr(socket, "gethostname", lambda: "this-host")
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(global_state, "coordinator_address", coordinator)
    assert runtime._own_address() == found


def test_single_process_exits_with_error_code():
    then = "from maxpipe.errors import *; raise StorageError(Code.IO_UNWRITABLE, 'full')"
    ran = python(started("platform='cpu', compilation_cache=''", then=then))
    assert (ran.returncode, ran.stderr) == (74, "full  [MP-IO-001]\n")


# --- stop requests ---------------------------------------------------------------------


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_requests_stop_and_handler_is_restored(number: signal.Signals, tmp_path: Path):
    before = signal.getsignal(number)
    with runtime.join_processes(RuntimeConfig(), 8, Phases(), {}, tmp_path) as link:
        assert not link.should_stop()
        os.kill(os.getpid(), number)
        assert link.should_stop() and link.should_stop()
    assert signal.getsignal(number) is before


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("address in use", ConfigError),
        ("INVALID_ARGUMENT: other counts", ConfigError),
        ("DEADLINE_EXCEEDED: Barrier timed out.", UnreachableError),
        ("UNAVAILABLE: failed to connect", UnreachableError),
    ],
)
def test_join_reports_reason_given_by_jax(
    monkeypatch: pytest.MonkeyPatch, reason: str, kind: type[MaxpipeError]
):
    def refuse(**options: object) -> None:
        raise RuntimeError(f"{reason}\nmore")

    before = SETTINGS.jax_cpu_collectives_implementation
    monkeypatch.setattr(jax.distributed, "initialize", refuse)
    config = RuntimeConfig(num_processes=4, process_id=3, coordinator="host:1")
    try:
        with pytest.raises(kind, match=f"process 3 of 4: {reason}\n"):
            runtime._initialize(config)
    finally:
        jax.config.update("jax_cpu_collectives_implementation", before)


def test_port_in_use_is_config_error():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        address = f"127.0.0.1:{port}"
        config = f"platform='cpu', compilation_cache='', num_processes=2, coordinator={address!r}"
        ran = python(started(config))
    assert ran.returncode == 2, ran.stderr
    assert_complete_error(ran.stderr)
    cause = os.strerror(errno.EADDRINUSE)
    action = "set the same new port in runtime.coordinator"
    assert_error(ran.stderr, names=[f"port {port} cannot be used here", cause], suggests=action)


def test_compiler_options_depend_on_device_and_model() -> None:
    assert runtime.compiler_options("cpu", "cpu", has_chunks=True) == {}
    assert runtime.compiler_options("gpu", "NVIDIA H100") == {}
    chunked = runtime.compiler_options("gpu", "NVIDIA H100", has_chunks=True)
    assert chunked == {"xla_gpu_enable_latency_hiding_scheduler": True}
    old, new, small = (
        runtime.compiler_options("tpu", kind) for kind in ("TPU v4", "TPU v5", "TPU v5 lite")
    )
    assert old.items() < new.items()
    limit = "xla_tpu_scoped_vmem_limit_kib"
    assert limit not in old
    # Only v5e can fuse all-gathers with other operations, and it has no sparse cores.
    fused = "xla_tpu_enable_async_collective_fusion_fuse_all_gather"
    assert fused in small and fused not in old.keys() | new.keys()
    assert any("sparse_core" in name for name in new)
    assert not any("sparse_core" in name for name in small)
    spare = runtime.compiler_options("tpu", "TPU v5", spares_memory=True)
    # The all-to-all of expert tokens is asynchronous in both cases.
    assert spare.keys() & old.keys() == {"xla_tpu_enable_async_ragged_all_to_all"}
    rounds = runtime.compiler_options("tpu", "TPU v5", in_8_bits=True)
    assert rounds.keys() - new.keys() == {"xla_tpu_allow_conv_input_fusion_with_downcast_convert"}
    assert new.items() < rounds.items()
    trillium = runtime.compiler_options("tpu", "TPU v6 lite")
    assert int(trillium[limit]) > int(new[limit])
