"""Forked kernels: like ordinary ones, apart from their origin and from each other, and gone when they end."""

from __future__ import annotations

import ast
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from kernels import Kernel

from kvlab.grading import prefork
from kvlab.grading.prefork import CannotFork, Zygote

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="kernels are forked on Linux only"
)


@pytest.fixture(scope="module", autouse=True)
def preloaded() -> Iterator[Zygote]:
    """The preloaded process of these tests; numpy and torch are in it."""
    origin = prefork.zygote(False)
    origin.preload(["numpy", "torch"])
    yield origin
    prefork.close_all()


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    folder = tmp_path_factory.mktemp("work")
    kernel = Kernel(cwd=str(folder), env=dict(os.environ) | {"KVLAB_TEST": "seen"})
    yield kernel
    kernel.close()


def wait_until(done: Callable[[], object]) -> None:
    """Until it is so; fails after a time that only a hang takes."""
    end = time.monotonic() + 30
    while not done():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.02)


PROBE = """
import os, sys
BY_JUPYTER = {"JPY_PARENT_PID", "PYDEVD_USE_FRAME_EVAL", "_"}
said = dict(
    arguments=[os.path.basename(sys.argv[0]), sys.argv[1], *sys.argv[3:]],
    cwd=os.getcwd(),
    environment=sorted(set(os.environ) - BY_JUPYTER),
    test=os.environ["KVLAB_TEST"],
    stdin=os.read(0, 10),
    path=sys.path,
    name=__name__,
    main=sys.modules["__main__"].__dict__ is globals(),
    executable=sys.executable,
    prefix=sys.prefix,
    interrupt=__import__("signal").getsignal(2) is not None,
    session=os.getsid(0) == os.getpid(),
    backend=__import__("matplotlib").get_backend(),
)
print(ascii(said))
"""


def test_a_forked_kernel_is_set_up_like_an_ordinary_one(
    kernel: Kernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(cmd: list[str]) -> list[str]:
        raise CannotFork("for this test")

    monkeypatch.setattr(prefork, "_launcher_arguments", refuse)
    before = dict(prefork.ways)
    environment = dict(os.environ) | {"KVLAB_TEST": "seen"}
    ordinary = Kernel(cwd=kernel.value("__import__('os').getcwd()"), env=environment)
    assert prefork.ways["started"] == before.get("started", 0) + 1
    said = [ast.literal_eval(each.run(PROBE)) for each in (ordinary, kernel)]
    assert said[0] == said[1]
    ordinary.close()


def test_the_preloaded_packages_are_there_and_no_thread_is_lost(
    kernel: Kernel, preloaded: Zygote
) -> None:
    assert preloaded.ask({"do": "preload", "modules": []})["threads"] == 1
    assert kernel.value("[m in __import__('sys').modules for m in ('torch', 'numpy')]")
    threads = "__import__('torch').get_num_threads()"
    said = os.environ.get("OMP_NUM_THREADS", "")
    assert kernel.value(threads) == int(said or len(os.sched_getaffinity(0)))
    work = "import torch; torch.set_num_threads(2); print(torch.ones(200, 200).mm(torch.ones(200, 200)).sum().item())"
    assert kernel.run(work) == "8000000.0\n"


def test_nothing_leads_from_a_kernel_to_its_origin(kernel: Kernel) -> None:
    others = kernel.value(
        "[p for p in __import__('os').listdir('/proc') if p.isdigit()]"
    )
    assert sorted(others) == ["1", str(kernel.value("__import__('os').getpid()"))]
    reach = """
import ctypes, os
for name in ("mem", "environ", "maps"):
    try:
        open(f"/proc/1/{name}", "rb").read(1)
        print(name)
    except OSError:
        pass
if os.geteuid() and ctypes.CDLL(None).ptrace(16, 1, 0, 0) == 0:
    print("traced")
"""
    if os.getuid():  # root may look at everything, in any kernel
        assert kernel.run(reach) == ""
    targets = "[__import__('os').readlink(f'/proc/self/fd/{n}') for n in (0, 1, 2)]"
    assert kernel.value(targets)[0] == "/dev/null"


DRAW = """
import random, uuid, numpy, torch
drawn = [random.random(), uuid.uuid4().hex, float(numpy.random.rand())]
print(ascii([*drawn, torch.initial_seed(), torch.rand(1).item()]))
"""


def test_what_is_printed_comes_in_order_and_whole(kernel: Kernel) -> None:
    code = """import sys, subprocess
for n in range(2000):
    print(n, flush=n % 7 == 0)
    print(n, file=sys.stderr, flush=n % 11 == 0)
subprocess.run(["echo", "from a child"])
sys.stdout.write("the end")"""
    for _ in range(5):
        assert kernel.outputs("") == []
        texts = {"stdout": "", "stderr": ""}
        for output in kernel.outputs(code):
            texts[output.get("name", "stdout")] += output.get("text", "")
        numbers = "".join(f"{n}\n" for n in range(2000))
        assert texts["stderr"] == numbers
        said = texts["stdout"].replace("from a child\n", "")
        assert said.startswith(numbers + "the end")


def test_every_kernel_has_random_numbers_of_its_own(kernel: Kernel) -> None:
    other = Kernel()
    drawn = [ast.literal_eval(each.run(DRAW)) for each in (kernel, other)]
    other.close()
    assert all(a != b for a, b in zip(*drawn, strict=True))


def test_an_interrupt_reaches_the_cell(kernel: Kernel) -> None:
    import threading

    threading.Timer(0.5, kernel.interrupt).start()
    assert "KeyboardInterrupt" in kernel.run("import time\ntime.sleep(50)")
    assert kernel.value("1 + 1") == 2


def named(marker: str) -> list[psutil.Process]:
    return [
        p for p in psutil.process_iter(["cmdline"]) if marker in str(p.info["cmdline"])
    ]


LEAVE = """
import subprocess, os, time
subprocess.Popen(["sleep", "{marker}"], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execvp("sleep", ["sleep", "{marker}"])
    os._exit(0)
"""


@pytest.mark.parametrize("end", ["closed", "exits", "is killed"])
def test_a_kernel_takes_its_processes_with_it(end: str) -> None:
    kernel, marker = Kernel(), f"31{os.getpid()}"
    folder = Path(kernel.manager.connection_file).parent
    kernel.run(LEAVE.format(marker=marker))
    wait_until(lambda: len(named(marker)) == 2)
    if end == "closed":
        kernel.close()
    else:
        how = "os._exit(3)" if end == "exits" else "os.kill(os.getpid(), 9)"
        kernel._client.kc.execute(f"import os; {how}")
        wait_until(lambda: not kernel.is_alive())
        kernel.close()
    wait_until(lambda: not named(marker))
    assert not folder.exists()


def test_kernels_end_with_their_origin() -> None:
    origin = Zygote(False)
    marker = f"32{os.getpid()}"
    keeper = origin.ask(request_for(origin, marker))["keeper"]
    wait_until(lambda: named(marker))
    assert origin.ask({"do": "poll", "keeper": keeper})["status"] is None
    os.kill(origin._process.pid, signal.SIGKILL)
    wait_until(lambda: not named(marker))
    assert not origin.alive()
    with pytest.raises(CannotFork, match="has ended"):
        origin.preload(["json"])
    origin.close()
    assert not origin.run.exists()


def request_for(origin: Zygote, marker: str) -> dict[str, Any]:
    """A request for a kernel whose start takes forever: it waits for a sleeping child."""
    code = f"import subprocess; subprocess.run(['sleep', '{marker}'])"
    startup = origin.new_folder() / "ipython" / "profile_default" / "startup"
    startup.mkdir(parents=True)
    (startup / "wait.py").write_text(code)
    return {
        "do": "fork",
        "argv": ["x", "-f", str(origin.run / "k.json")],
        "cwd": "/",
        "env": dict(os.environ) | {"IPYTHONDIR": str(startup.parents[1])},
        "log": str(origin.run / "log"),
        "open_to_view": True,
        "confine": None,
    }


def test_a_package_that_starts_threads_is_not_forked_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kvlab_threaded.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(99,), daemon=True).start()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    origin = Zygote(False)
    with pytest.raises(CannotFork, match="kvlab_threaded started threads"):
        origin.preload(["kvlab_threaded"])
    with pytest.raises(CannotFork, match="2 threads are running"):
        origin.ask(request_for(origin, "0"))
    origin.close()


def test_a_package_that_is_missing_is_left_out(preloaded: Zygote) -> None:
    preloaded.preload(["kvlab_nothing_of_this_name", "json:dumps"])
    answer = preloaded.ask({"do": "preload", "modules": ["kvlab_nothing_of_this_name"]})
    assert "ModuleNotFoundError" in answer["failed"]["kvlab_nothing_of_this_name"]


def test_kernels_of_other_programs_are_not_forked() -> None:
    for command in (
        ["/usr/bin/R", "-m", "ipykernel_launcher", "-f", "x"],
        [sys.executable, "-m", "bash_kernel", "-f", "x"],
        [sys.executable],
    ):
        with pytest.raises(CannotFork):
            prefork._launcher_arguments(command)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "x"]
    assert prefork._launcher_arguments(command)[1:] == ["-f", "x"]


def test_a_preloaded_process_that_cannot_start_is_tried_once_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries = []

    def fail(confined: bool) -> Zygote:
        tries.append(confined)
        raise CannotFork("no room")

    monkeypatch.setattr(prefork, "Zygote", fail)
    monkeypatch.setattr(prefork, "_zygotes", {})
    monkeypatch.setattr(prefork, "_reasons", {})
    for _ in range(2):
        with pytest.raises(CannotFork, match="no room"):
            prefork.zygote(False)
    assert tries == [False]
    assert "one by one, which is slower: no room" in caplog.text


def test_folders_of_processes_that_died_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in ("kvlab-4194999-x", f"kvlab-{os.getpid()}-x", "kvlab-other"):
        (tmp_path / name).mkdir()
    prefork.new_folder()
    left = {path.name.rpartition("-")[0] for path in tmp_path.iterdir()}
    assert left == {f"kvlab-{os.getpid()}", "kvlab"}


def test_what_a_lab_imports_is_what_is_preloaded() -> None:
    cells = [
        "import math, torch\nfrom torch import Tensor",
        "def f():\n    from transformers import Qwen2Config\n    import os.path",
        "import (",
    ]
    notebook = nbformat.v4.new_notebook(
        cells=list(map(nbformat.v4.new_code_cell, cells))
    )
    found = prefork.packages_of(notebook)
    assert found[-3:] == ["torch", "torch:Tensor", "transformers:Qwen2Config"] or set(
        found
    ) >= {"torch:Tensor", "transformers:Qwen2Config"}
    assert not any(module.startswith(("math", "os")) for module in found)
    assert prefork.packages_of(nbformat.v4.new_notebook()) == []


def test_only_ordinary_files_are_copied(tmp_path: Path) -> None:
    source, target = tmp_path / "from", tmp_path / "to"
    (source / "data").mkdir(parents=True)
    (source / "data" / "a.txt").write_text("a")
    (source / "lab.ipynb").write_text("{}")
    (source / "big.bin").write_bytes(b"x" * 5000)
    (source / "link").symlink_to("/etc/passwd")
    os.mkfifo(source / "pipe")
    prefork.copy_files(source, target, most=4000)
    found = {str(p.relative_to(target)) for p in target.rglob("*")}
    assert found == {"data", "data/a.txt"}
