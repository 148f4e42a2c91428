"""Measures a plan and writes one JSON file; goes on where a killed run stopped.

Called by `kvlab quality run`. Never measures a finished unit again and never overwrites a result.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlab import models, runtime
from kvlab.matrix import files, progress
from kvlab.quality import estimates, schema
from kvlab.quality.plan import FULL, EqualBytes, Plan, Workload
from kvlab.quality.setting import DYNAMIC, Setting

if TYPE_CHECKING:
    import torch

    from kvlab.quality.bytes_held import ByteCounts

Json = dict[str, Any]
KIND = "quality"
ERRORS_NOTE = (
    "standard_error takes tokens as independent, which those of one text are not; "
    "standard_error_blocks takes the means of blocks of tokens in a row, "
    "standard_error_texts the means of the texts"
)


@dataclass
class _Search:
    """What is to be measured, once the bytes are known.

    on_texts    setting -> on how many texts
    impossible  setting -> why its library cannot
    compared    each comparison and the rivals that hold the same bytes
    """

    on_texts: dict[Setting, int] = field(default_factory=dict)
    impossible: dict[Setting, str] = field(default_factory=dict)
    compared: list[tuple[EqualBytes, list[Setting]]] = field(default_factory=list)


def run(
    label: str = "local",
    folder: str | Path = "results",
    *,
    plan: Plan = FULL,
    force: bool = False,
    loaded: models.LoadedModel | None = None,
    report: progress.Report | None = None,
) -> Path:
    """Measures a plan and writes folder/quality-LABEL.json; returns its path.

    force   a label that is taken gets a numbered sibling instead of a refusal
    loaded  a model that is in memory already; by default the embedded one, in float32
    report  shows progress; by default a bar or lines, whichever fits
    raises RunRefused before anything is measured: the label is taken, another process runs it, or
           what an earlier process left belongs to other texts, versions or another machine
    """
    folder = Path(folder)
    files.result_path(folder, KIND, label, force)
    folder.mkdir(parents=True, exist_ok=True)
    with files.only_run(folder, KIND, label):
        # again under the lock: the process it waited for may have written the label
        path = files.result_path(folder, KIND, label, force)
        files.discard_finished(folder, KIND, label)
        loaded = loaded or models.load()
        ids = {
            name: token_ids(loaded, plan.workload, name) for name in plan.workload.texts
        }
        identity = _identity(plan, loaded, ids)
        kept = files.Partial(folder, KIND, label, identity)
        search = searched(plan, loaded.model.config)
        if report:
            _measure(plan, loaded.model, ids, search, kept, report)
        else:
            with progress.shown() as shown:
                _measure(plan, loaded.model, ids, search, kept, shown)
        record = _record(plan, loaded, search, kept, identity, path)
        files.write_new(path, record)
        kept.remove()
    return path


def token_ids(
    loaded: models.LoadedModel, workload: Workload, name: str
) -> torch.Tensor:
    """The tokens of a text, int64 [1, prompt + scored].

    A text that is too short goes on with the next one.
    raises ValueError when all of them together are too short
    """
    import torch

    at = models.TEXTS.index(name)
    wanted = workload.prompt_tokens + workload.scored_tokens
    ids: list[int] = []
    for follower in (*models.TEXTS[at:], *models.TEXTS[:at]):
        text = models.natural_text(follower)
        ids += loaded.tokenizer(text, add_special_tokens=False).input_ids
        if len(ids) >= wanted:
            return torch.tensor([ids[:wanted]], dtype=torch.int64)
    raise ValueError(f"the texts have {len(ids)} tokens, but {wanted} are wanted")


def _identity(plan: Plan, loaded: models.LoadedModel, ids: dict[str, Any]) -> Json:
    """What must be the same for units of two processes to go into one file.

    Not the plan: a unit is one cache on one text, whatever else is measured.
    """
    return {
        "workload": asdict(plan.workload),
        "framework": runtime.framework_versions(),
        "hardware": runtime.hardware("cpu"),
        "model": {
            "model_id": loaded.model_id,
            "commit": loaded.commit,
            "source": loaded.source,
            "dtype": str(loaded.model.dtype).removeprefix("torch."),
        },
        "texts": [
            {
                "name": name,
                "sha256": hashlib.sha256(
                    models.natural_text(name).encode()
                ).hexdigest(),
                "token_ids_sha256": hashlib.sha256(
                    json.dumps(tokens[0].tolist()).encode()
                ).hexdigest(),
            }
            for name, tokens in ids.items()
        ],
        "schema_version": schema.SCHEMA_VERSION,
    }


# ---- what to measure ------------------------------------------------------------------


def searched(plan: Plan, model_config: Any) -> _Search:
    """Every setting of a plan, the rivals at equal bytes among them, and what cannot be."""
    counts = byte_counts(plan.workload, model_config)
    search = _Search()
    every, some = len(plan.workload.texts), plan.some_texts
    for wanted in plan.equal_bytes:
        # a target that cannot be is among the impossible, for the tables want it too
        if not _refusal(counts[32], wanted.target):
            found = counts[wanted.kv_bits].like(wanted)
            search.compared.append((wanted, found))
    rivals = [s for _, found in search.compared for s in found]
    targets = [wanted.target for wanted in plan.equal_bytes]
    axes = [setting for row in plan.axes for setting in row]
    shifted = [replace(s, key_shift=size) for s in plan.shifted for size in plan.shifts]
    for settings, texts in (
        ((DYNAMIC, *plan.table, *targets, *rivals, *axes), every),
        ((*shifted, *plan.variants), some),
    ):
        for setting in settings:
            if why := _refusal(counts[32], setting):
                search.impossible[setting] = why
            else:
                search.on_texts.setdefault(setting, texts)
    return search


def byte_counts(workload: Workload, model_config: Any) -> dict[int, ByteCounts]:
    """Bytes of caches with unquantized numbers of 32 and of 16 bits."""
    import torch

    from kvlab.quality.bytes_held import ByteCounts

    kinds = {32: torch.float32, 16: torch.float16}
    return {n: ByteCounts(model_config, workload, kind) for n, kind in kinds.items()}


def _refusal(counts: ByteCounts, setting: Setting) -> str | None:
    from kvlab.quality.bytes_held import Impossible

    try:
        counts.held(setting)
    except Impossible as error:
        return str(error)
    return None


# ---- measuring ------------------------------------------------------------------------


def _unit(setting: Setting, text: str) -> str:
    """A unit's name. One of the course's cache belongs to its source as it is now."""
    name = f"{text}/{setting.id}"
    if setting.method == "course":
        name += f"@{runtime.source_sha256('cache')[:12]}"
    return name


def _measure(
    plan: Plan,
    model: Any,
    ids: dict[str, torch.Tensor],
    search: _Search,
    kept: files.Partial,
    report: progress.Report,
) -> None:
    """Every setting on its texts, text by text: the prompt and the reference are made once."""
    jobs = [
        (name, [s for s, texts in search.on_texts.items() if number < texts])
        for number, name in enumerate(plan.workload.texts)
    ]
    total = sum(len(settings) for _, settings in jobs)
    done = 0
    for name, settings in jobs:
        left = [s for s in settings if not kept.has(_unit(s, name))]
        done += len(settings) - len(left)
        for setting, figures, seconds in _of_text(
            plan.workload, model, ids[name], left
        ):
            kept.keep(_unit(setting, name), figures, seconds)
            done += 1
            report(done, total, f"{name}: {setting.id}")


def _of_text(
    workload: Workload, model: Any, ids: torch.Tensor, settings: list[Setting]
) -> Iterator[tuple[Setting, Json, float]]:
    """Each setting's figures on one text, and the seconds they took."""
    from kvlab.matrix.quality import prefill, scores
    from kvlab.quality.score import predictions

    if not settings:
        return
    prompt, forced = ids.split([workload.prompt_tokens, workload.scored_tokens], 1)
    filled = prefill(model, prompt)
    reference, _ = predictions(model, filled, forced[:, :-1], DYNAMIC)
    base = scores(reference, forced, None, workload.topk).nll
    for setting in settings:
        begun = time.perf_counter()
        predicted, built = predictions(model, filled, forced[:, :-1], setting)
        scored = scores(predicted, forced, reference, workload.topk)
        figures = _figures(workload, scored, base, built.cache)
        yield setting, figures, time.perf_counter() - begun


def _figures(workload: Workload, scored: Any, base: list[float], cache: Any) -> Json:
    from kvlab.quality.build import allocated_bytes, held_bytes

    tokens = {
        "kl": scored.kl,
        "nll_increase": [a - b for a, b in zip(scored.nll, base, strict=True)],
        "topk_overlap": scored.topk_overlap,
    }
    return {
        "held": held_bytes(cache),
        "allocated": allocated_bytes(cache),
        "nll": estimates.rounded(sum(scored.nll) / len(scored.nll)),
        **{
            name: estimates.of_tokens(values, workload.block)
            for name, values in tokens.items()
        },
    }


# ---- the record -----------------------------------------------------------------------


def _record(
    plan: Plan,
    loaded: models.LoadedModel,
    search: _Search,
    kept: files.Partial,
    identity: Json,
    path: Path,
) -> Json:
    counts = byte_counts(plan.workload, loaded.model.config)
    rows = {
        setting: _row(plan.workload, setting, search, kept, counts)
        for setting in search.on_texts
    }
    comparisons = [
        _comparison(wanted, rivals, rows) for wanted, rivals in search.compared
    ]
    axes = [[s.id for s in row if s in rows] for row in plan.axes]
    return {
        "schema_version": schema.SCHEMA_VERSION,
        "kind": KIND,
        "label": path.stem.removeprefix(f"{KIND}-"),
        "plan": plan.name,
        "framework": identity["framework"],
        "hardware": identity["hardware"],
        "model": identity["model"],
        "course_cache_sha256": runtime.source_sha256("cache"),
        "workload": asdict(plan.workload)
        | {"texts": identity["texts"], "errors": ERRORS_NOTE},
        "rows": list(rows.values()),
        "impossible": [
            {"id": setting.id, "family": setting.family, "reason": why}
            for setting, why in search.impossible.items()
        ],
        "table": _ids(plan.table, rows),
        "equal_bytes": comparisons,
        "axes": axes,
        "shifts": {
            "sizes": list(plan.shifts),
            "texts": list(plan.workload.texts[: plan.some_texts]),
            "caches": [
                {
                    "id": setting.id,
                    "rows": [
                        rows[shifted]["id"]
                        for size in plan.shifts
                        if (shifted := replace(setting, key_shift=size)) in rows
                    ],
                }
                for setting in plan.shifted
            ],
        },
        "variants": {
            "texts": list(plan.workload.texts[: plan.some_texts]),
            "rows": _ids(plan.variants, rows),
        },
        "claims": [*_ratio_claims(comparisons), *_axes_claims(plan, rows)],
        "run": {
            "finished_utc": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "seconds": round(kept.seconds, 1),
            "units": sum(search.on_texts.values()),
            "resumed_units": kept.resumed_units,
            "processes": kept.process,
        },
    }


def _ids(settings: Iterable[Setting], rows: dict[Setting, Json]) -> list[str]:
    return [setting.id for setting in settings if setting in rows]


def _row(
    workload: Workload,
    setting: Setting,
    search: _Search,
    kept: files.Partial,
    counts: dict[int, ByteCounts],
) -> Json:
    names = workload.texts[: search.on_texts[setting]]
    texts = [kept.get(_unit(setting, name)) for name in names]
    held, in_16_bits = (counts[bits].held(setting) for bits in (32, 16))
    measured = {text["held"] for text in texts}
    if measured != {held.end}:
        raise RuntimeError(
            f"{setting.id} holds {sorted(measured)} bytes, but the arithmetic that chose the "
            f"settings of equal bytes says {held.end}: `kvlab.quality.bytes_held` is wrong"
        )
    return {
        "id": setting.id,
        "family": setting.family,
        "bits": setting.bits,
        "setting": setting.to_json(),
        "bytes": {
            "held": held.end,
            "held_mean": round(held.mean),
            "held_in_16_bits": in_16_bits.end,
            "allocated": texts[0]["allocated"],
        },
        **{
            name: estimates.over_texts(
                [text[name] for text in texts], workload.scored_tokens
            )
            for name in estimates.METRICS
        },
        "by_text": [
            {"text": name} | {key: text[key] for key in ("nll", *estimates.METRICS)}
            for name, text in zip(names, texts, strict=True)
        ],
    }


def _comparison(
    wanted: EqualBytes, rivals: list[Setting], rows: dict[Setting, Json]
) -> Json:
    """The course's setting and each method's best rival, with how many times its KL it has."""
    course = rows[wanted.target]
    best = []
    for method, required in wanted.required:
        ours = [rows[s] for s in rivals if s.method == method and s in rows]
        if not ours:
            continue
        row = min(ours, key=lambda row: row["kl"]["mean"])
        best.append(
            {
                "method": method,
                "id": row["id"],
                "required_ratio": required,
                "kl_ratio": estimates.ratio(
                    *([text["kl"] for text in r["by_text"]] for r in (row, course))
                ),
            }
        )
    return {
        "id": wanted.id,
        "kv_bits": wanted.kv_bits,
        "course": course["id"],
        "rivals": _ids(rivals, rows),
        "best": best,
    }


def _ratio_claims(comparisons: list[Json]) -> Iterator[Json]:
    for comparison in comparisons:
        for best in comparison["best"]:
            found, wanted = best["kl_ratio"]["ratio"], best["required_ratio"]
            yield {
                "claim": f"at {comparison['id']}, the best {best['method']} has at least "
                f"{wanted:g} times the KL of the course's cache",
                "found": f"{found:.2f} times ({best['id']})",
                "holds": found >= wanted,
            }


def _axes_claims(plan: Plan, rows: dict[Setting, Json]) -> Iterator[Json]:
    for four in plan.axes:
        if not all(setting in rows for setting in four):
            continue
        kl = {s.family.removeprefix("course "): rows[s]["kl"]["mean"] for s in four}
        best, worst = min(kl, key=kl.__getitem__), max(kl, key=kl.__getitem__)
        for what, found, wanted in (
            ("mixed axes are the best of the four", best, "mixed"),
            ("the wrong way round is the worst of the four", worst, "wrong way round"),
        ):
            yield {
                "claim": f"at {four[0].bits} bits and the same bytes, {what}",
                "found": f"{found} ({kl[found]:.4f})",
                "holds": found == wanted,
            }
