"""Runs the paired experiment: unit by unit, each kept on disk, to one JSON file.

Called by `kvlab matrix run` and lab 06. Units are small (one generation, one quality pass), so a
killed run loses one of them. Never overwrites a result, never measures a finished unit twice.
"""

from __future__ import annotations

import gc
import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlab import models, runtime
from kvlab.matrix import files, judge, machine, progress, schema, shapes
from kvlab.matrix.workload import (
    DEVICES,
    MODE_PROFILE,
    RUN_MODES,
    CandidateFamily,
    Cell,
    RunMode,
    Workload,
    profile,
)

if TYPE_CHECKING:
    import torch

    from kvlab.matrix.measure import Device
    from kvlab.matrix.quality import MakeCache

Json = dict[str, Any]
NATURAL_NOTE = (
    "tokens of one text depend on each other, so the standard errors, which take them as "
    "independent, are on the small side"
)


class RunFailed(RuntimeError):
    """The run ended with an exception, which is written to `path`."""

    def __init__(self, path: Path, failure: Json) -> None:
        super().__init__(
            f"{failure['stage']}: {failure['type']}: {failure['message']} "
            f"(recorded in {path}; finished units are kept: repeat with --force, in Python "
            "force=True, to go on from them)"
        )
        self.path = path


@dataclass
class _Result:
    """What is known so far; a failure is written with as much as there is."""

    workload: Workload
    run_mode: RunMode
    commit: models.ModelCommit | None = None
    memory_source: str | None = None
    inputs: dict[int, torch.Tensor] = field(default_factory=dict)
    left_out: list[tuple[Cell, str]] = field(default_factory=list)
    family_failures: dict[str, Json] = field(default_factory=dict)
    units: int = 0
    notes_begin: Json = field(default_factory=lambda: machine.device_notes(""))
    stage: str = "environment"


def run(
    run_mode: RunMode = "dry_run",
    label: str = "local",
    folder: str | Path = "results",
    *,
    workload: Workload | None = None,
    force: bool = False,
    local_files_only: bool = False,
    cache_dir: str | Path | None = None,
    loaded: models.LoadedModel | None = None,
    report: progress.Report | None = None,
) -> Path:
    """Measures a workload and writes folder/RUN_MODE-LABEL.json; returns its path.

    run_mode  "dry_run" records the plan and loads nothing
    workload  by default the profile of the run mode
    force     an existing label gets a numbered sibling instead of a refusal
    loaded    a model that is in memory already
    report    shows progress; by default a bar or lines, whichever fits
    raises RunRefused before anything is measured: the label is taken, another process runs it,
           or what an earlier process left belongs to another workload, version or machine
    raises RunFailed after an exception has been written to the file
    """
    if run_mode not in RUN_MODES:
        raise ValueError(f"no run mode {run_mode!r}; there are {', '.join(RUN_MODES)}")
    workload = workload or profile(MODE_PROFILE[run_mode])
    folder = Path(folder)
    path = files.result_path(folder, run_mode, label, force)
    folder.mkdir(parents=True, exist_ok=True)
    if run_mode == "dry_run":
        files.write_new(path, planned_record(workload, path))
        return path
    with files.only_run(folder, run_mode, label):
        # again under the lock: the process it waited for may have written the label
        path = files.result_path(folder, run_mode, label, force)
        files.discard_finished(folder, run_mode, label)
        result = _Result(workload, run_mode)
        kept: files.Partial | None = None
        try:
            load = _resolved(result, loaded, local_files_only, cache_dir)
            identity = _identity(result)
            kept = files.Partial(folder, run_mode, label, identity)
            if report:
                _measure_all(result, kept, load(), report)
            else:
                with progress.shown() as shown:
                    _measure_all(result, kept, load(), shown)
            record = _record(result, kept, path, None)
        except files.RunRefused:
            raise
        except Exception as error:
            failure = {
                "stage": result.stage,
                "type": type(error).__name__,
                "message": machine.without_names(str(error))[:2000] or "no message",
            }
            files.write_new(path, _record(result, kept, path, failure))
            raise RunFailed(path, failure) from error
        files.write_new(path, record)
        kept.remove()
    return path


def planned_record(workload: Workload, path: Path | None = None) -> Json:
    """What a dry run writes: the plan. Loads nothing, asks no hub, writes no file."""
    return _record(
        _Result(workload, "dry_run"), None, path or Path("dry_run-plan.json"), None
    )


# ---- before the measurement ---------------------------------------------------------------------


def _resolved(
    result: _Result,
    loaded: models.LoadedModel | None,
    local_files_only: bool,
    cache_dir: str | Path | None,
) -> Callable[[], models.LoadedModel]:
    """Finds out the commit; returns what loads exactly that snapshot."""
    workload = result.workload
    if DEVICES[result.run_mode] == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise RuntimeError(
                "this torch sees no CUDA device; `kvlab preflight` says what is missing"
            )
    result.stage = "resolve the model's commit"
    if loaded:
        result.commit = models.ModelCommit(loaded.commit, loaded.source)
        return lambda: loaded
    result.commit = models.resolve_model_commit(
        workload.model_id, workload.model_revision, cache_dir, local_files_only
    )
    embedded = workload.model_id == models.EMBEDDED
    return partial(
        models.load,
        workload.model_id,
        revision=workload.model_revision if embedded else result.commit.commit,
        dtype=workload.dtype,
        cache_dir=cache_dir,
        local_files_only=local_files_only or result.commit.source == "local cache",
    )


def _identity(result: _Result) -> Json:
    """What must be the same for units of two processes to go into one file."""
    assert result.commit is not None
    return {
        "workload": result.workload.to_json(),
        "framework": runtime.framework_versions(),
        "commit": result.commit.commit,
        "hardware": runtime.hardware(DEVICES[result.run_mode]),
        "schema_version": schema.SCHEMA_VERSION,
    }


def _runnable_groups(result: _Result, config: Any) -> list[list[Cell]]:
    """The groups without the cells that a library refuses, which are noted.

    raises ValueError when it is a cell of the required pair
    """
    workload = result.workload
    shape = shapes.KVShape(
        workload.batch_size, config.num_key_value_heads, _head_dim(config)
    )
    groups = []
    for group in workload.groups():
        runnable = []
        for cell in group:
            why = _refusal(cell, shape)
            if why is None:
                runnable.append(cell)
            elif cell.family == workload.candidate:
                raise ValueError(f"{cell.key} cannot be measured: {why}")
            else:
                result.left_out.append((cell, why))
        groups.append(runnable)
    return groups


def _refusal(cell: Cell, shape: shapes.KVShape) -> str | None:
    if cell.family is None or cell.residual_length is None:
        return None
    run = (cell.max_new_tokens - 1, cell.residual_length)
    why = shapes.first_refusal(cell.family, shape, cell.context_length, *run)
    if why:
        near = shapes.nearest_length(cell.family, shape, cell.context_length, *run)
        why += f"; nearest context that works: {near or 'none'}"
    return why


def _head_dim(config: Any) -> int:
    own = getattr(config, "head_dim", None)
    return int(own or config.hidden_size // config.num_attention_heads)


# ---- the measurement ----------------------------------------------------------------------------


def _measure_all(
    result: _Result,
    kept: files.Partial,
    loaded: models.LoadedModel,
    report: progress.Report,
) -> None:
    import torch

    from kvlab.matrix.measure import cpu_device, cuda_device

    workload = result.workload
    device = cuda_device() if DEVICES[result.run_mode] == "cuda" else cpu_device()
    result.memory_source = device.source
    result.notes_begin = machine.device_notes(device.name)
    result.stage = "prepare model and inputs"
    torch.manual_seed(workload.seed)
    model = loaded.model.to(device.name)
    config = model.config.get_text_config(decoder=True)
    groups = _runnable_groups(result, config)
    for cell in (group[0] for group in groups):
        ids = models.exact_length_input(
            loaded.tokenizer, workload.prompt, cell.context_length
        )
        result.inputs[cell.context_length] = ids
    names = list(workload.natural_texts)
    texts = [_text_ids(workload, loaded.tokenizer, name) for name in names]

    bench = _Bench(result, kept, model, device, report)
    rounds = workload.warm_up_runs + workload.measured_repeats
    bench.total = sum(len(group) * rounds + 1 for group in groups) + len(texts)
    result.units = bench.total
    caches = _natural_caches(workload, config)
    # what is loaded stays: collecting garbage before every generation need not look at it
    gc.collect()
    gc.freeze()
    try:
        for group in groups:
            bench.measure_group(group)
            bench.trajectory_of_group(group)
        for name, ids in zip(names, texts, strict=True):
            bench.natural_text(name, ids.to(device.name), caches)
    finally:
        gc.unfreeze()
    report(bench.total, bench.total, "done")


def _text_ids(workload: Workload, tokenizer: Any, name: str) -> torch.Tensor:
    wanted = workload.natural_prompt_tokens + workload.natural_scored_tokens + 1
    text = models.natural_text(name)
    ids: torch.Tensor = tokenizer(
        text, add_special_tokens=False, return_tensors="pt"
    ).input_ids[:, :wanted]
    if ids.shape[1] < wanted:
        raise ValueError(
            f"the text {name!r} has {ids.shape[1]} tokens of this model, {wanted} are needed"
        )
    return ids


def _natural_caches(
    workload: Workload, config: Any
) -> list[tuple[CandidateFamily, int]]:
    """Every family and window of the workload that the natural texts' lengths allow."""
    shape = shapes.KVShape(1, config.num_key_value_heads, _head_dim(config))
    windows = sorted(
        {workload.context_residual_length, *workload.window_residual_lengths}
    )
    return [
        (family, window)
        for family in workload.families
        for window in windows
        if not shapes.first_refusal(
            family,
            shape,
            workload.natural_prompt_tokens,
            workload.natural_scored_tokens,
            window,
        )
    ]


@dataclass
class _Bench:
    """A model on a device, and the units done so far."""

    result: _Result
    kept: files.Partial
    model: Any
    device: Device
    report: progress.Report
    total: int = 0
    done: int = 0

    def unit(
        self, name: str, make: Callable[[], Any], of: CandidateFamily | None
    ) -> None:
        """Does one unit, unless it is kept already, and keeps it.

        of  a further candidate's failure is noted and costs only its own units
        """
        self.report(self.done, self.total, name)
        self.done += 1
        self.result.stage = name
        failures = self.result.family_failures
        if self.kept.has(name) or (of and of.id in failures):
            return
        begun = time.perf_counter()
        try:
            value = make()
        except Exception as error:
            if of is None or of == self.result.workload.candidate:
                raise
            failures[of.id] = {
                "stage": name,
                "type": type(error).__name__,
                "message": machine.without_names(str(error))[:2000] or "no message",
            }
            return
        self.kept.keep(name, value, time.perf_counter() - begun)

    def measure_group(self, group: list[Cell]) -> None:
        """All cells of a group in rounds, so that baseline and candidates share their times."""
        workload = self.result.workload
        rounds = range(workload.warm_up_runs + workload.measured_repeats)
        half_done = [
            cell
            for cell in group
            if self.kept.has(_run_name(cell, 0))
            and not self.kept.has(_run_name(cell, rounds[-1]))
        ]
        for cell in half_done:
            self._generate(
                cell, watch_memory=False
            )  # its warm-up died with its process
        for number in rounds:
            warm = number < workload.warm_up_runs
            for cell in group:
                self.unit(
                    _run_name(cell, number),
                    lambda cell=cell, warm=warm: self._run(cell, warm),  # type: ignore[misc]
                    cell.family,
                )

    def _run(self, cell: Cell, warm_up: bool) -> Json:
        watched = self.device.every_run or warm_up
        made: Json = self._generate(cell, watched).to_json()
        return made | {"process": self.kept.process}

    def _generate(self, cell: Cell, watch_memory: bool) -> Any:
        from kvlab.matrix import caches, measure

        return measure.generate(
            self.model,
            self._prompt(cell),
            cell.max_new_tokens,
            partial(caches.build, self.model.config, cell.family, cell.residual_length),
            self.device,
            watch_memory,
        )

    def _prompt(self, cell: Cell) -> torch.Tensor:
        ids = self.result.inputs[cell.context_length].to(self.device.name)
        return ids.expand(self.result.workload.batch_size, -1)

    def trajectory_of_group(self, group: list[Cell]) -> None:
        """Fixed-trajectory scores of a group's caches, on its baseline's own tokens."""
        self.unit(_trajectory_name(group[0]), lambda: self._trajectory(group), None)

    def _trajectory(self, group: list[Cell]) -> Json:
        import torch

        from kvlab.matrix import quality

        workload = self.result.workload
        baseline = group[0]
        tokens = self.kept.get(_run_name(baseline, workload.warm_up_runs))["token_ids"]
        trajectory = torch.tensor(tokens)[:, : workload.quality_tokens]
        cells = [cell for cell in group if not self._has_failed(cell.family)]
        scored = quality.fixed_trajectory(
            self.model,
            self._prompt(baseline),
            trajectory.to(self.device.name),
            [self._making(cell.family, cell.residual_length) for cell in cells],
            workload.quality_topk,
        )
        return {
            cell.key: scores.to_json()
            for cell, scores in zip(cells, scored, strict=True)
        }

    def natural_text(
        self,
        name: str,
        ids: torch.Tensor,
        families: list[tuple[CandidateFamily, int]],
    ) -> None:
        """Scores of every cache on one natural text."""
        self.unit(f"natural text/{name}", lambda: self._natural(ids, families), None)

    def _natural(
        self, ids: torch.Tensor, families: list[tuple[CandidateFamily, int]]
    ) -> Json:
        from kvlab.matrix import quality

        workload = self.result.workload
        chosen = [(f, w) for f, w in families if not self._has_failed(f)]
        scored = quality.natural_text(
            self.model,
            ids,
            workload.natural_prompt_tokens,
            [self._making(None, None), *(self._making(f, w) for f, w in chosen)],
            workload.quality_topk,
        )
        names = [_BASELINE, *(_natural_name(f, w) for f, w in chosen)]
        return {
            name: scores.to_json() for name, scores in zip(names, scored, strict=True)
        }

    def _making(self, family: CandidateFamily | None, window: int | None) -> MakeCache:
        from kvlab.matrix import caches

        return partial(caches.build, self.model.config, family, window)

    def _has_failed(self, family: CandidateFamily | None) -> bool:
        return family is not None and family.id in self.result.family_failures


_BASELINE = "dynamic_cache"


def _natural_name(family: CandidateFamily, window: int) -> str:
    return f"{family.id}/window {window}"


def _run_name(cell: Cell, number: int) -> str:
    return f"{cell.key}/run {number}"


def _trajectory_name(baseline: Cell) -> str:
    return f"{baseline.matrix_role}/{baseline.context_length}/fixed trajectory"


# ---- the record ---------------------------------------------------------------------------------


def _record(
    result: _Result, kept: files.Partial | None, path: Path, failure: Json | None
) -> Json:
    """The JSON of a run, from whatever was measured."""
    workload, mode = result.workload, result.run_mode
    rows = _rows(result, kept, workload.candidate)
    metrics = judge.mechanism_metrics(rows, workload.candidate)
    commit = result.commit
    windows = [workload.context_residual_length, *workload.window_residual_lengths]
    return {
        "schema_version": schema.SCHEMA_VERSION,
        "chapter": "06_gpu_matrix",
        "run_mode": mode,
        "run_label": path.stem.removeprefix(f"{mode}-"),
        "environment_profile": workload.profile,
        "framework": runtime.framework_versions(),
        "hardware": runtime.hardware(DEVICES.get(mode, "")),
        "workload": workload.to_json()
        | {
            "resolved_model_commit": commit and commit.commit,
            "revision_resolution_source": commit.source if commit else "not resolved",
        },
        "plan": [_planned(cell) for group in workload.groups() for cell in group],
        "memory_source": result.memory_source,
        "input_sha256_by_context": {
            str(length): hashlib.sha256(json.dumps(ids.tolist()).encode()).hexdigest()
            for length, ids in result.inputs.items()
        },
        "baseline": _baseline(result, kept),
        "candidate_family": asdict(workload.candidate) | {"residual_lengths": windows},
        "measurement_matrix": rows,
        "mechanism_metrics": metrics,
        "further_candidates": [
            _further(result, kept, family, windows)
            for family in workload.further_candidates
        ],
        "natural_text_quality": _natural_quality(result, kept),
        "device_notes": {
            "begin": result.notes_begin,
            "end": machine.device_notes(DEVICES.get(mode, "")),
        },
        "run": {
            "finished_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "seconds": kept.seconds if kept else 0.0,
            "units": result.units,
            "resumed_units": kept.resumed_units if kept else 0,
            "processes": kept.process if kept else 1,
        },
        "failure": failure,
        **judge.verdict(mode, failure is not None, metrics["eligible_candidate_count"]),
    }


def _planned(cell: Cell) -> Json:
    return {
        "matrix_role": cell.matrix_role,
        "candidate_id": cell.candidate_id,
        "context_length": cell.context_length,
        "max_new_tokens": cell.max_new_tokens,
        "residual_length": cell.residual_length,
    }


def _runs(result: _Result, kept: files.Partial | None, cell: Cell) -> list[Json] | None:
    """The runs of a cell, the last warm-up first; None when they are not all there."""
    workload = result.workload
    first = workload.warm_up_runs - 1
    numbers = range(first, first + 1 + workload.measured_repeats)
    names = [_run_name(cell, number) for number in numbers]
    if kept is None or not all(map(kept.has, names)):
        return None
    return [kept.get(name) for name in names]


def _rows(
    result: _Result, kept: files.Partial | None, family: CandidateFamily
) -> list[Json]:
    """The rows of one family for which everything was measured."""
    rows = []
    for baseline, *candidates in result.workload.groups():
        scores = _trajectory_name(baseline)
        base_runs = _runs(result, kept, baseline)
        if kept is None or base_runs is None or not kept.has(scores):
            continue
        scored = kept.get(scores)
        for cell in candidates:
            runs = _runs(result, kept, cell)
            if cell.family != family or runs is None or cell.key not in scored:
                continue
            pair = (scored[baseline.key], scored[cell.key])
            rows.append(
                judge.row(cell, (base_runs, runs), pair, result.workload.acceptance)
            )
    return rows


def _baseline(result: _Result, kept: files.Partial | None) -> Json:
    *contexts, window = (group[0] for group in result.workload.groups())
    measured = {cell.context_length: _runs(result, kept, cell) for cell in contexts}
    window_runs = _runs(result, kept, window)
    return {
        "name": _BASELINE,
        "capacity_by_context": {
            str(length): judge.measurement(runs)
            for length, runs in measured.items()
            if runs
        },
        "residual_window": window_runs and judge.measurement(window_runs),
    }


def _further(
    result: _Result,
    kept: files.Partial | None,
    family: CandidateFamily,
    windows: list[int],
) -> Json:
    rows = _rows(result, kept, family)
    return asdict(family) | {
        "residual_lengths": windows,
        "measurement_matrix": rows,
        "mechanism_metrics": judge.mechanism_metrics(rows, family),
        "left_out": [
            {
                "matrix_role": cell.matrix_role,
                "candidate_id": cell.candidate_id,
                "context_length": cell.context_length,
                "residual_length": cell.residual_length,
                "reason": why,
            }
            for cell, why in result.left_out
            if cell.family == family
        ],
        "failure": result.family_failures.get(family.id),
    }


def _natural_quality(result: _Result, kept: files.Partial | None) -> Json | None:
    workload = result.workload
    units = [f"natural text/{name}" for name in workload.natural_texts]
    if kept is None or not units or not all(map(kept.has, units)):
        return None
    texts = [kept.get(unit) for unit in units]
    windows = sorted(
        {workload.context_residual_length, *workload.window_residual_lengths}
    )
    candidates = [
        (family.id, window)
        for family in workload.families
        for window in windows
        if all(_natural_name(family, window) in text for text in texts)
    ]
    names = [_BASELINE, *(f"{name}/window {window}" for name, window in candidates)]
    baseline, *ours = judge.natural_quality(
        [[text[name] for text in texts] for name in names]
    )
    return {
        "texts": list(workload.natural_texts),
        "prompt_tokens": workload.natural_prompt_tokens,
        "scored_tokens": workload.natural_scored_tokens * len(texts),
        "note": NATURAL_NOTE,
        "baseline": baseline,
        "candidates": [
            {"candidate_id": name, "residual_length": window, **figures}
            for (name, window), figures in zip(candidates, ours, strict=True)
        ],
    }
