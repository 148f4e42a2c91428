"""The preloaded process: imports the slow packages once and forks a Jupyter kernel from itself on request.

Called by `prefork`, as `python -m kvlab.grading.zygote FD`, inside the sandbox where there is one.
Never reads a notebook, never runs a student's code in its own process, and starts no thread.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import random
import resource
import shutil
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from typing import Any

Request = dict[str, Any]

LIBC = ctypes.CDLL(None, use_errno=True)
# <linux/sched.h>, <linux/mount.h>, <linux/prctl.h>, <linux/capability.h>
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 16384, 1 << 18
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP = 1, 4, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
CAPABILITY_VERSION = 0x20080522

LAST_CAPABILITY = 63
# Parts of /proc through which the machine itself could be changed.
PROC_OF_THE_MACHINE = ("sys", "sysrq-trigger", "irq", "bus")
OPEN_FILES = 65536


# --- what travels between prefork and here --------------------------------------------


def send(sock: socket.socket, message: Request, files: list[int] | None = None) -> None:
    """One message: its length, then JSON. Open files travel with the length."""
    text = json.dumps(message).encode()
    head = struct.pack(">I", len(text))
    if files:
        socket.send_fds(sock, [head], files)
        sock.sendall(text)
    else:
        sock.sendall(head + text)


def receive(sock: socket.socket) -> tuple[Request, list[int]]:
    """The next message, and the open files that came with it.

    raises EOFError when the other side is gone
    """
    head, files, _, _ = socket.recv_fds(sock, 4, 8)
    while 0 < len(head) < 4:
        head += sock.recv(4 - len(head))
    if not head:
        raise EOFError("the other side is gone")
    (size,) = struct.unpack(">I", head)
    text = b""
    while len(text) < size:
        part = sock.recv(size - len(text))
        if not part:
            raise EOFError("the other side is gone")
        text += part
    return json.loads(text), files


# --- the system calls that Python 3.11 has no function for -----------------------------


def _prctl(option: int, value: int) -> bool:
    return sys.platform == "linux" and LIBC.prctl(option, value, 0, 0, 0) == 0


def _unshare(flags: int) -> bool:
    return sys.platform == "linux" and LIBC.unshare(flags) == 0


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    arguments = [text.encode() or None for text in (source, target, kind)]
    if LIBC.mount(*arguments, ctypes.c_ulong(flags), options.encode() or None):
        code = ctypes.get_errno()
        raise OSError(
            code, f"mounting {kind or source} on {target}: {os.strerror(code)}"
        )


def _drop_capabilities(user: int | None = None) -> None:
    """No privilege is left, and none can be won back by starting another program.

    user  who this process is from then on; None leaves it who it is
    """
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    for capability in range(LAST_CAPABILITY + 1):
        _prctl(PR_CAPBSET_DROP, capability)
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    nothing = (ctypes.c_uint32 * 6)()
    LIBC.capset(header, nothing)


def threads() -> int:
    """How many threads this process has."""
    with contextlib.suppress(OSError):
        return len(os.listdir("/proc/self/task"))
    return 1


# --- the process that forks -----------------------------------------------------------


def serve(control: socket.socket) -> None:
    """Answers requests until the other side is gone."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _prctl(PR_SET_DUMPABLE, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one who asked
    os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    ended: dict[int, int] = {}
    actions: dict[str, Callable[[Request, list[int]], Request]] = {
        "preload": lambda request, files: _preload(request["modules"]),
        "fork": lambda request, files: _fork(request, files, control),
        "poll": lambda request, files: _poll(request["keeper"], ended),
        "signal": lambda request, files: _signal(request, ended),
    }
    while True:
        try:
            request, files = receive(control)
        except (EOFError, OSError):
            os._exit(0)
        try:
            answer = actions[request["do"]](request, files)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        for file in files:
            os.close(file)
        send(control, answer)


def _preload(modules: list[str]) -> Request:
    """Imports modules, or names of them ("package:name"); says which could not be."""
    failed = {}
    for wanted in modules:
        module, _, name = wanted.partition(":")
        try:
            loaded = importlib.import_module(module)
            if name and not hasattr(loaded, name):
                importlib.import_module(f"{module}.{name}")
        except Exception as error:
            failed[wanted] = f"{type(error).__name__}: {error}"
    gc.collect()
    gc.freeze()  # a kernel's first collection must not copy every page
    return {"threads": threads(), "failed": failed}


def _fork(request: Request, files: list[int], control: socket.socket) -> Request:
    if threads() > 1:
        raise RuntimeError(f"{threads()} threads are running; a fork would lose them")
    sys.stdout.flush()
    sys.stderr.flush()
    keeper = os.fork()
    if keeper == 0:
        code = 70
        try:
            control.close()
            code = _keep(request, files)
        except BaseException:
            _note_failure(request)
        os._exit(code)
    return {"keeper": keeper}


def _poll(keeper: int, ended: dict[int, int]) -> Request:
    if keeper not in ended:
        try:
            pid, status = os.waitpid(keeper, os.WNOHANG)
        except ChildProcessError:
            pid, status = keeper, 0
        if pid:
            ended[keeper] = os.waitstatus_to_exitcode(status)
    return {"status": ended.get(keeper)}


def _signal(request: Request, ended: dict[int, int]) -> Request:
    if _poll(request["keeper"], ended)["status"] is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(request["keeper"], request["signal"])
    return {}


def _note_failure(request: Request) -> None:
    with contextlib.suppress(OSError), open(request["log"], "a") as log:
        traceback.print_exc(file=log)


# --- between the preloaded process and the kernel -------------------------------------
#
# keeper   in the preloaded process's namespaces; passes signals on, ends what is left
#   first  process 1 of the kernel's own namespaces: when it ends, all in there ends
#     kernel


def _keep(request: Request, files: list[int]) -> int:
    """Starts the kernel in namespaces of its own where that is allowed, and waits."""
    os.setsid()
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    _quiet(files)
    confined = request["confine"] is not None
    apart = _enter_namespaces(confined)
    if confined and not apart:
        raise OSError("the sandbox does not allow namespaces within")
    child = os.fork()
    if child == 0:
        code = 70
        try:
            _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            code = _first(request, files) if apart else _kernel(request, files, None)
        except BaseException:
            _note_failure(request)
        os._exit(code)
    for file in files:
        os.close(file)
    code = _wait_for(child)
    _end_descendants()
    return code


def _wait_for(child: int) -> int:
    """The exit code of a child; interrupts go on to it, SIGTERM ends it at once."""
    signal.signal(signal.SIGINT, lambda *_: _kill(child, signal.SIGINT))
    signal.signal(signal.SIGTERM, lambda *_: _kill(child, signal.SIGKILL))
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _end_descendants() -> None:
    """Ends what a kernel left behind, where no namespace ends it: this adopts orphans."""
    if sys.platform != "linux":
        return
    while True:
        try:
            with open(f"/proc/self/task/{os.getpid()}/children") as children:
                left = [int(pid) for pid in children.read().split()]
        except (OSError, ValueError):
            return
        if not left:
            return
        for pid in left:
            _kill(pid, signal.SIGKILL)
        for _ in left:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-1, 0)


def _enter_namespaces(confined: bool) -> bool:
    """Whether children now get process numbers, mounts and memory segments apart."""
    wanted = CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC
    if confined:
        return _unshare(wanted | CLONE_NEWNET)
    if _unshare(wanted):
        return True
    user, group = os.getuid(), os.getgid()
    _prctl(PR_SET_DUMPABLE, 1)  # else this process may not write its own maps
    done = _unshare(CLONE_NEWUSER | wanted)
    if done:
        for name, text in {
            "setgroups": "deny",
            "uid_map": f"{user} {user} 1",
            "gid_map": f"{group} {group} 1",
        }.items():
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    _prctl(PR_SET_DUMPABLE, 0)
    return done


def _first(request: Request, files: list[int]) -> int:
    """Process 1 of the namespaces: mounts, starts the kernel, takes in orphans."""
    _prctl(PR_SET_DUMPABLE, 0)
    confine = request["confine"]
    if confine is None:
        with contextlib.suppress(OSError):  # a container may forbid it
            _mount("", "/", "", MS_REC | MS_PRIVATE)
            _mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    else:
        _mount_scratch(confine)
    bound, ready = os.pipe()  # the kernel says that its sockets are there
    sealed, go = os.pipe()  # and waits until nothing can be written beside them
    kernel = os.fork()
    if kernel == 0:
        code = 70
        try:
            os.close(bound)
            os.close(go)
            code = _kernel(request, files, (ready, sealed))
        except BaseException:
            _note_failure(request)
        os._exit(code)
    for file in (*files, ready, sealed):
        os.close(file)
    os.read(bound, 1)
    if confine is not None:
        flags = MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV
        _mount("", confine["own"], "", flags)
    _drop_capabilities()
    os.close(bound)
    os.close(go)
    return _wait_for(kernel)


def _mount_scratch(confine: Request) -> None:
    """A /proc of these processes alone, empty writable places, and the sockets' folder."""
    _mount("", "/", "", MS_REC | MS_PRIVATE)
    own = os.open(confine["own"], os.O_PATH | os.O_DIRECTORY)
    _mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    for name in PROC_OF_THE_MACHINE:
        path = f"/proc/{name}"
        if os.path.exists(path):
            _mount(path, path, "", MS_BIND | MS_REC)
            flags = MS_REMOUNT | MS_BIND | MS_RDONLY
            _mount("", path, "", flags | MS_NOSUID | MS_NODEV | MS_NOEXEC)
    size = confine["scratch_bytes"]
    for place in ("/tmp", "/dev/shm", confine["hidden"]):
        if os.path.isdir(place):
            options = f"size={size},mode=1777,nr_inodes=16384"
            _mount("tmpfs", place, "tmpfs", MS_NOSUID | MS_NODEV, options)
        else:
            os.makedirs(place, exist_ok=True)
    os.makedirs(confine["own"], exist_ok=True)
    _mount(f"/proc/self/fd/{own}", confine["own"], "", MS_BIND)
    if confine["user"] is not None:
        os.chown(confine["own"], confine["user"], confine["user"])
    os.close(own)


# --- the kernel -----------------------------------------------------------------------


def _kernel(request: Request, files: list[int], sealing: tuple[int, int] | None) -> int:
    """Runs a Jupyter kernel, as `python -m ipykernel_launcher` would; its exit code."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["env"])
    if request["confine"] is not None:
        _give_up_privileges(request["confine"])
        _copy_files(request["confine"])
    else:
        _drop_capabilities_of_a_namespace()
    os.chdir(request["cwd"])
    kept = _keep_only([*files, *(sealing or ())])
    if files:
        os.environ["KVLAB_BORDER"] = str(kept[0])
    if len(sys.path) and sys.path[0] in ("", os.getcwd()):
        del sys.path[0]
    sys.argv = request["argv"]
    _renew_random_state()
    _set_threads()

    from ipykernel.kernelapp import IPKernelApp

    app = IPKernelApp.instance(outstream_class="kvlab.grading.stream.Stream")
    app.initialize(sys.argv[1:])
    if sealing is not None:
        ready, sealed = kept[len(files) :]
        os.write(ready, b"1")
        os.read(sealed, 1)
        os.close(ready)
        os.close(sealed)
    _prctl(PR_SET_DUMPABLE, int(request["open_to_view"]))
    code = 0
    try:
        app.start()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        with contextlib.suppress(Exception):
            atexit._run_exitfuncs()
    return code


def _give_up_privileges(confine: Request) -> None:
    """Another user, where this is root; no capabilities; limits on what can be used."""
    _drop_capabilities(confine["user"])
    now = _memory_in_use()
    for name, most in confine["limits"].items():
        if name == "AS":
            most += now  # the packages that are loaded are free
        number = getattr(resource, f"RLIMIT_{name}")
        _, hard = resource.getrlimit(number)
        if hard != resource.RLIM_INFINITY:
            most = min(most, hard)
        resource.setrlimit(number, (most, most))


def _memory_in_use() -> int:
    """Bytes of address space of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _drop_capabilities_of_a_namespace() -> None:
    """What a user namespace gave; an ordinary kernel of root keeps what root has."""
    if os.getuid() != 0:
        _drop_capabilities()


def _copy_files(confine: Request) -> None:
    """The submission's own files, into the scratch folder."""
    for folder in (confine["home"], confine["work"]):
        os.makedirs(folder, exist_ok=True)
    given = os.path.join(confine["own"], "files")
    if os.path.isdir(given):
        shutil.copytree(given, confine["work"], dirs_exist_ok=True)


def _quiet(files: list[int]) -> None:
    """Standard streams that lead nowhere, as a kernel's are read by nobody."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    if nowhere > 2:
        os.close(nowhere)


def _keep_only(files: list[int]) -> list[int]:
    """Closes every other open file; returns the kept ones' new numbers, 3 and up."""
    high = [os.dup2(file, 1000 + n, inheritable=False) for n, file in enumerate(files)]
    os.closerange(3, 1000)
    kept = [os.dup2(file, 3 + n, inheritable=False) for n, file in enumerate(high)]
    os.closerange(3 + len(files), OPEN_FILES)
    return kept


def _renew_random_state() -> None:
    """As in a process of its own: nothing drawn yet, seeds from the system."""
    random.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    if torch := sys.modules.get("torch"):
        torch.random.default_generator.seed()


def _set_threads() -> None:
    """As many threads as a new process would take, started only now."""
    said = os.environ.get("OMP_NUM_THREADS", "")
    if torch := sys.modules.get("torch"):
        usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        torch.set_num_threads(int(said) if said.isdigit() and int(said) else usable)


def main() -> None:
    """Serves on the socket whose number is the only argument."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    sys.path[:] = [entry for entry in sys.path if entry]
    serve(control)


if __name__ == "__main__":
    main()
