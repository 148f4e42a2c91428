"""What the paired experiment measures: model, inputs, matrices, candidates, gates.

Used by every other module of `kvlab.matrix`, by lab 06 and by the preflight. Plain data: it never
imports torch and never loads a model.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

RunMode = Literal["dry_run", "real_gpu", "embedded_cpu"]
RUN_MODES: tuple[RunMode, ...] = ("dry_run", "real_gpu", "embedded_cpu")
DEVICES: Mapping[RunMode, str] = MappingProxyType(
    {"real_gpu": "cuda", "embedded_cpu": "cpu"}
)

MatrixRole = Literal["context_capacity", "residual_window"]
CONTEXT: MatrixRole = "context_capacity"
WINDOW: MatrixRole = "residual_window"

PROMPT = "Explain why KV Cache grows with context length."


@dataclass(frozen=True)
class CandidateFamily:
    """One kind of cache to put beside the baseline, at every window of the workload.

    id       how rows and files name it
    name     what kind of cache it is
    backend  who builds it: a key of `kvlab.matrix.caches.BACKENDS`
    axes     as the backend counts them: hqq 0 or 1, quanto 0 or -1; kvlab the dimension along
             which a group runs, -2 tokens or -1 head_dim
    sink_tokens  first tokens that stay exact; only kvlab knows them
    """

    id: str
    name: str
    backend: str
    nbits: int
    q_group_size: int
    axis_key: int
    axis_value: int
    sink_tokens: int = 0

    def cache_config(self, residual_length: int) -> dict[str, Any]:
        """A new dict at every call: what the cache is built from."""
        return {
            "backend": self.backend,
            "nbits": self.nbits,
            "axis_key": self.axis_key,
            "axis_value": self.axis_value,
            "q_group_size": self.q_group_size,
            "residual_length": residual_length,
            **({"sink_tokens": self.sink_tokens} if self.sink_tokens else {}),
        }


# The required pair of the experiment, and what is measured beside it. A further kind of cache is
# one more entry in FURTHER (and, if neither library builds it, one in `caches.BACKENDS`).
HQQ = CandidateFamily("hqq_axis1", "quantized_cache", "hqq", 4, 64, 1, 1)
# KIVI's axes, once as quanto builds them and once as `kvlab.cache` does.
FURTHER = (
    CandidateFamily("quanto_kivi", "quantized_cache", "quanto", 4, 64, -1, 0),
    CandidateFamily("mixed_axes", "mixed_axis_cache", "kvlab", 4, 64, -2, -1, 4),
)


@dataclass(frozen=True)
class Acceptance:
    """The gates: a row is eligible when it passes all four.

    peak_saved_bytes_above  the candidate must save more bytes of peak than this
    nll_increase_at_most    nats a token, on the fixed trajectory
    topk_overlap_at_least   share of the top sets that both have
    latency_ratio_at_most   candidate's median time over the baseline's
    """

    peak_saved_bytes_above: int = 0
    nll_increase_at_most: float = 0.50
    topk_overlap_at_least: float = 0.60
    latency_ratio_at_most: float = 2.00


@dataclass(frozen=True)
class Cell:
    """One cache at one place of a matrix. `family` None is the baseline, which has no window."""

    matrix_role: MatrixRole
    context_length: int
    max_new_tokens: int
    family: CandidateFamily | None = None
    residual_length: int | None = None

    @property
    def candidate_id(self) -> str:
        return self.family.id if self.family else "dynamic_cache"

    @property
    def key(self) -> str:
        """The cell's name in files and on screen."""
        window = (
            "" if self.residual_length is None else f"/window {self.residual_length}"
        )
        return f"{self.matrix_role}/{self.context_length}/{self.candidate_id}{window}"


@dataclass(frozen=True)
class Workload:
    """The whole experiment. Profiles differ in these fields only.

    further_context_lengths  where further candidates are measured: at these contexts of the
                             context matrix only; None for everywhere
    """

    profile: str
    workload_version: str
    model_id: str
    dtype: str
    context_lengths: tuple[int, ...]
    context_new_tokens: int
    window_new_tokens: int
    window_residual_lengths: tuple[int, ...]
    natural_texts: tuple[str, ...]
    natural_scored_tokens: int
    workload_id: str = "quant-kv-runtime"
    model_revision: str = "main"
    model_overridden: bool = False
    prompt: str = PROMPT
    batch_size: int = 1
    context_residual_length: int = 128
    window_context_length: int = 512
    candidate: CandidateFamily = HQQ
    further_candidates: tuple[CandidateFamily, ...] = FURTHER
    further_context_lengths: tuple[int, ...] | None = None
    warm_up_runs: int = 1
    measured_repeats: int = 3
    quality_tokens: int = 16
    quality_topk: int = 5
    natural_prompt_tokens: int = 256
    acceptance: Acceptance = Acceptance()
    seed: int = 42

    def __post_init__(self) -> None:
        registered = _REGISTERED.get(self.workload_version)
        if registered and registered != self.fingerprint:
            raise ValueError(
                f"workload_version {self.workload_version!r} stands for another model, matrix "
                "or bit width. Give the changed workload a version of its own."
            )
        fewest = min(self.context_new_tokens, self.window_new_tokens)
        if not 2 <= self.quality_tokens <= fewest:
            raise ValueError(
                f"quality_tokens must be 2 to {fewest} (the new tokens of a cell), "
                f"got {self.quality_tokens}"
            )
        if self.measured_repeats < 1 or self.warm_up_runs < 1:
            raise ValueError("a cell needs a warm-up and a measured repeat at least")

    @property
    def families(self) -> tuple[CandidateFamily, ...]:
        """The required candidate first."""
        return (self.candidate, *self.further_candidates)

    @property
    def prompt_sha256(self) -> str:
        return hashlib.sha256(self.prompt.encode()).hexdigest()

    @property
    def fingerprint(self) -> str:
        """A digest of the model, the matrices and the bit width: what a version stands for."""
        fixed = [
            self.workload_id,
            self.model_id,
            self.dtype,
            self.prompt,
            self.batch_size,
            self.context_lengths,
            self.context_new_tokens,
            self.context_residual_length,
            self.window_context_length,
            self.window_new_tokens,
            self.window_residual_lengths,
            asdict(self.candidate),
        ]
        return hashlib.sha256(json.dumps(fixed).encode()).hexdigest()[:16]

    def groups(self) -> list[list[Cell]]:
        """What is measured together: a baseline, then the candidates that are put beside it.

        One group for each context of the context matrix, one for the whole window matrix.
        """
        places: list[tuple[MatrixRole, int, int, tuple[int, ...]]] = [
            (CONTEXT, context, self.context_new_tokens, (self.context_residual_length,))
            for context in self.context_lengths
        ]
        windows = self.window_residual_lengths
        places.append(
            (WINDOW, self.window_context_length, self.window_new_tokens, windows)
        )
        return [
            [
                Cell(role, context, new),
                *(
                    Cell(role, context, new, family, window)
                    for family in self.families
                    if family == self.candidate or self._is_for_further(role, context)
                    for window in windows
                ),
            ]
            for role, context, new, windows in places
        ]

    def _is_for_further(self, role: MatrixRole, context: int) -> bool:
        only = self.further_context_lengths
        return only is None or (role == CONTEXT and context in only)

    def to_json(self) -> dict[str, Any]:
        """The workload as the JSON holds it, the commit apart."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        plain["prompt_sha256"] = self.prompt_sha256
        plain["expected_decode_window_flushes"] = {
            str(window): self.window_new_tokens // window
            for window in self.window_residual_lengths
        }
        return plain


def with_model(workload: Workload, model_id: str, revision: str = "main") -> Workload:
    """The same experiment on another model, for a machine that cannot reach the profile's own.

    The result says so: `model_overridden` is true and the version names the model.
    """
    if (model_id, revision) == (workload.model_id, workload.model_revision):
        return workload
    short = re.sub(r"[^A-Za-z0-9._-]+", "-", model_id)
    version = f"{workload.workload_version.split('+')[0]}+{short}"
    if model_id == workload.model_id:
        version = workload.workload_version
    return replace(
        workload,
        model_id=model_id,
        model_revision=revision,
        model_overridden=True,
        workload_version=version,
    )


# Changing the model, a matrix or the bit width changes the fingerprint: then raise the version
# and register the new pair here. Results of different versions are not to be compared.
_REGISTERED = {"1": "327511b93641e2be", "1-embedded-cpu": "76262f3fca3da419"}

Q_CUDA_MECHANISM = Workload(
    profile="Q-CUDA-MECHANISM",
    workload_version="1",
    model_id="Qwen/Qwen2.5-0.5B-Instruct",
    dtype="bfloat16",
    context_lengths=(512, 2048, 4096),
    context_new_tokens=64,
    window_new_tokens=128,
    window_residual_lengths=(16, 32, 64),
    natural_texts=("bread", "catalogue", "lighthouse", "river"),
    natural_scored_tokens=256,
)

# Less than on a GPU, so that two slow CPU cores are done in five minutes: fewer tokens and repeats,
# one text, further candidates at one context. Of 34 new tokens 33 are fed back: windows of 16, 32
# and 64 overflow 2, 1 and 0 times, as 34 // window says.
EMBEDDED_CPU = Workload(
    profile="embedded_cpu",
    workload_version="1-embedded-cpu",
    model_id="embedded",
    dtype="float32",
    context_lengths=(128, 512, 1024),
    context_new_tokens=17,
    window_new_tokens=34,
    window_residual_lengths=(16, 32, 64),
    further_context_lengths=(512,),
    measured_repeats=2,
    natural_texts=("river",),
    natural_prompt_tokens=128,
    natural_scored_tokens=192,
)

PROFILES: Mapping[str, Workload] = MappingProxyType(
    {workload.profile: workload for workload in (Q_CUDA_MECHANISM, EMBEDDED_CPU)}
)
MODE_PROFILE: Mapping[RunMode, str] = MappingProxyType(
    {
        "dry_run": Q_CUDA_MECHANISM.profile,
        "real_gpu": Q_CUDA_MECHANISM.profile,
        "embedded_cpu": EMBEDDED_CPU.profile,
    }
)


def profile(name: str) -> Workload:
    """The workload of a profile; raises ValueError for a name that is none."""
    if name not in PROFILES:
        raise ValueError(f"no profile {name!r}; there are {', '.join(PROFILES)}")
    return PROFILES[name]
