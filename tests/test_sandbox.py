"""The sandbox: what student code sees, reaches and may use; and what is said where there is none."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT
from kernels import Kernel

from kvlab.grading import prefork, sandbox
from kvlab.grading.sandbox import Limits, SandboxMissing

needs_bubblewrap = pytest.mark.skipif(
    bool(sandbox.why_not()), reason=f"no sandbox here: {sandbox.why_not()}"
)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    files = tmp_path_factory.mktemp("files")
    (files / "data.txt").write_text("1 2 3")
    (files / "hidden.ipynb").write_text("{}")
    os.environ["KVLAB_SECRET_TOKEN"] = "hush"
    kernel = Kernel(confined=True, files=str(files))
    del os.environ["KVLAB_SECRET_TOKEN"]
    yield kernel
    kernel.close()
    prefork.close_all()


REACH = {
    "a file of the course": f"open({str(ROOT / 'pyproject.toml')!r})",
    "a solution": f"__import__('os').listdir({str(ROOT / 'solutions')!r})",
    "the gradebook": f"open({str(ROOT / 'gradebook.db')!r})",
    "the tests": f"__import__('os').listdir({str(ROOT / 'tests')!r})",
    "the home of who grades": f"__import__('os').listdir({str(Path.home() / '.cache')!r})",
    "accounts": "open('/etc/passwd')",
    "passwords": "open('/etc/shadow')",
    "devices": "__import__('os').listdir('/sys')",
    "a written system file": "open('/usr/x', 'w')",
    "a written package": "open(__import__('kvlab').__file__, 'a')",
    "a file at the top": "open('/x', 'w')",
    "a device that is no device": "open('/dev/x', 'w')",
    "the machine's settings": "open('/proc/sys/kernel/core_pattern', 'w')",
    "the folder of the sockets": "open(__import__('os').path.dirname(__import__('sys').argv[2]) + '/x', 'w')",
    "a name server": "__import__('socket').create_connection(('1.1.1.1', 53), 1)",
    "this machine": "__import__('socket').create_connection(('127.0.0.1', 22), 1)",
    "a secret": "__import__('os').environ['KVLAB_SECRET_TOKEN']",
    "another user": "__import__('os').setuid(0 if __import__('os').getuid() else 1)",
    "another root": "__import__('os').chroot('/tmp')",
    "another host name": "__import__('socket').sethostname('x')",
}


@needs_bubblewrap
@pytest.mark.parametrize("name", REACH)
def test_student_code_cannot_reach(name: str, kernel: Kernel) -> None:
    said = kernel.run(f"print('reached', {REACH[name]})")
    assert "reached" not in said
    assert said.split(":")[0] in (
        *("FileNotFoundError", "PermissionError", "OSError", "KeyError"),
        *("ConnectionRefusedError", "ExceptionGroup"),
    ), said


@needs_bubblewrap
def test_student_code_cannot_mount_or_trace(kernel: Kernel) -> None:
    code = """
import ctypes
libc = ctypes.CDLL(None)
print(libc.mount(b"x", b"/tmp", b"tmpfs", 0, None), libc.umount2(b"/proc", 2))
print(libc.ptrace(16, 1, 0, 0), libc.unshare(0x20000))
status = open("/proc/self/status").read()
print([line.split()[1] for line in status.split("\\n") if line.startswith(("CapEff", "CapPrm", "NoNew"))])
"""
    none = "0" * 16
    assert kernel.run(code) == f"-1 -1\n-1 -1\n['{none}', '{none}', '1']\n"


@needs_bubblewrap
def test_it_finds_its_own_files_and_places_to_write(kernel: Kernel) -> None:
    assert kernel.value("__import__('os').listdir('.')") == ["data.txt"]
    code = """
import os, tempfile
home = os.path.expanduser("~")
print(os.listdir(home), open("data.txt").read())
for place in (home, ".", tempfile.gettempdir(), "/dev/shm"):
    with open(os.path.join(place, "mine"), "w") as file:
        file.write("x")
"""
    assert kernel.run(code) == "['.ipython'] 1 2 3\n"  # IPython's own


@needs_bubblewrap
def test_nothing_is_left_for_the_next_kernel_nor_seen_beside_it(kernel: Kernel) -> None:
    kernel.run("for p in ('/tmp/left', '/dev/shm/left'): open(p, 'w').write('x')")
    other = Kernel(confined=True)
    assert kernel.value("__import__('os').path.exists('/tmp/left')") is True
    places = "[__import__('os').listdir(p) for p in ('/dev/shm', '.', '/tmp/home')]"
    assert other.value(places) == [[], [], [".ipython"]]
    assert other.value("__import__('os').path.exists('/tmp/left')") is False
    folder = str(Path(other.manager.connection_file).parents[1])
    for each in (kernel, other):
        own = Path(each.manager.connection_file).parent.name
        assert each.value(f"__import__('os').listdir({folder!r})") == [own]
    pids = "len([p for p in __import__('os').listdir('/proc') if p.isdigit()])"
    assert other.value(pids) == 2
    other.close()


@needs_bubblewrap
@pytest.mark.parametrize(
    ("use", "error"),
    [
        (f"bytearray({Limits().memory} + 2**30)", "MemoryError"),
        (
            "[__import__('threading').Thread(target=__import__('time').sleep, "
            f"args=(9,), daemon=True).start() for _ in range({Limits().processes})]",
            "RuntimeError",
        ),
        (f"open('big', 'wb').truncate({Limits().file} + 1)", "OSError"),
        (f"open('full', 'wb', 0).write(b'x' * {Limits().file}) + open('more', 'wb', 0).write(b'x' * {Limits().file}) + [open('last', 'wb', 0).write(b'x' * 2**20) for _ in range(99)][-1]", "OSError"),
        ("[open('/dev/null') for _ in range(5000)]", "OSError"),
    ],
    ids=["memory", "processes", "a file", "the scratch folder", "open files"],
)  # fmt: skip
def test_what_is_used_ends_at_its_limit(use: str, error: str) -> None:
    kernel = Kernel(confined=True)
    assert kernel.run(f"print('used', {use})").split(":")[0] == error
    kernel.close()


@needs_bubblewrap
def test_a_kernel_that_cannot_be_forked_starts_in_a_sandbox_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(prefork._reasons, True, "for this test")
    (tmp_path / "data.txt").write_text("1 2 3")
    kernel = Kernel(confined=True, files=str(tmp_path))
    assert kernel.run("print(open('data.txt').read())") == "1 2 3\n"
    for name in ("a solution", "a name server", "a written package", "passwords"):
        assert "reached" not in kernel.run(f"print('reached', {REACH[name]})")
    kernel.close()


# --- whether it is used ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "default", "works", "used"),
    [
        ("", "auto", True, True),
        ("", "auto", False, False),
        ("", "on", True, True),
        ("", "off", True, False),
        ("off", "on", True, False),
        ("off", "on", False, False),
        ("ON", "off", True, True),
        ("auto", "on", False, False),
    ],
)
def test_the_environment_decides_then_the_setting(
    said: str, default: str, works: bool, used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SANDBOX", said)
    monkeypatch.setattr(sandbox, "why_not", lambda: "" if works else "It is not here.")
    assert sandbox.wanted(default) is used


@pytest.mark.parametrize(("said", "default"), [("on", "off"), ("", "on")])
def test_a_sandbox_that_must_be_and_cannot_stops_with_advice(
    said: str, default: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SANDBOX", said)
    monkeypatch.setattr("shutil.which", lambda program: None)
    sandbox.why_not.cache_clear()
    with pytest.raises(
        SandboxMissing, match=r"apt-get install bubblewrap(.|\n)*SANDBOX=off"
    ):
        sandbox.wanted(default)
    sandbox.why_not.cache_clear()


def test_an_unknown_word_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDBOX", "yes")
    with pytest.raises(SandboxMissing, match="SANDBOX=yes is not known"):
        sandbox.wanted()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux only")
def test_a_bubblewrap_that_fails_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "bwrap"
    program.write_text(
        "#!/bin/sh\necho 'No permissions to create a new namespace' >&2\nexit 1\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    sandbox.why_not.cache_clear()
    assert (
        "No permissions" in sandbox.why_not() and "user namespaces" in sandbox.why_not()
    )
    sandbox.why_not.cache_clear()


def test_a_course_under_tmp_is_told_to_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_python", lambda: [Path("/tmp/course/tools/kvlab")])
    sandbox.why_not.cache_clear()
    try:
        if shutil.which("bwrap"):
            assert "/tmp/course/tools/kvlab lies under /tmp" in sandbox.why_not()
    finally:
        sandbox.why_not.cache_clear()
