"""`kvlab.quality`: a whole small run, equal bytes, chunks, the constant added to Keys, the report."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_matrix_measure import HEAD_DIM, KV_HEADS, LAYERS, prompt, tiny_model

from kvlab import models, quality
from kvlab.cache import MixedAxisCache
from kvlab.matrix import RunRefused, caches
from kvlab.matrix.quality import prefill
from kvlab.models import LoadedModel
from kvlab.quality import build, estimates, report, schema
from kvlab.quality.bytes_held import ByteCounts, Impossible
from kvlab.quality.outliers import add_to_keys, constant_key_shift
from kvlab.quality.plan import EqualBytes, Plan, Workload, four_axes
from kvlab.quality.run import token_ids
from kvlab.quality.score import predictions
from kvlab.quality.setting import DYNAMIC, FITS, FP8, Setting, course, hqq, quanto

ROOT = Path(__file__).parents[1]
WORKLOAD = Workload(texts=("bread", "river"), prompt_tokens=64, scored_tokens=96)
SMALL = course(4, group=16, window=16)
PLAN = Plan(
    name="tiny",
    workload=WORKLOAD,
    table=(DYNAMIC, FP8, hqq(3, 1, 16, 48), course(8), SMALL),
    equal_bytes=(
        EqualBytes(
            SMALL, 32, ((hqq(4, 1), 1), (quanto(4, -1), 1)), (("hqq", 1), ("quanto", 1))
        ),
    ),
    axes=(four_axes(4),),
    shifts=(0.0, 100.0),
    shifted=(DYNAMIC, course(4)),
    some_texts=1,
    variants=(course(4, 2),),
)
EVERY_KIND = [
    DYNAMIC,
    FP8,
    hqq(4, 1, window=24),
    hqq(2, 0, window=32),
    quanto(4, 0, window=20),
    quanto(2, -1, group=32, window=32),
    quanto(4, -1, group=32, window=32),
    course(4),
    course(4, axes=("token", "channel")),
    course(3, 2, group=16, window=8, sinks=0),
    course(8, window=0, sinks=7),
]


# numbers of groups that do not fill quanto's bytes
FILLED_UP = [quanto(4, 0, window=19), quanto(2, 0, window=47)]


def name_of(setting: Setting) -> str:
    return setting.id.replace(" ", "_")


def loaded_tiny_model() -> LoadedModel:
    """The tiny model, whose tokens are the letters of a text."""

    def letters(text: str, add_special_tokens: bool) -> Any:
        return SimpleNamespace(input_ids=list(text.encode()))

    return LoadedModel(tiny_model(), letters, "tiny", "0" * 40, "test")  # type: ignore[arg-type]


def silent(done: int, total: int, text: str) -> None:
    """Shows nothing."""


def measure(folder: Path, plan: Plan = PLAN, **options: Any) -> Path:
    return quality.run(
        "tiny",
        folder,
        plan=plan,
        loaded=loaded_tiny_model(),
        **{"report": silent} | options,
    )


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return measure(tmp_path_factory.mktemp("quality"))


@pytest.fixture(scope="module")
def record(result: Path) -> dict[str, Any]:
    return report.load(result)


@pytest.fixture(scope="module")
def counts() -> ByteCounts:
    return ByteCounts(tiny_model().config, WORKLOAD)


# ---- a whole run --------------------------------------------------------------------


def test_run_measures_every_cache_of_the_plan(record: dict[str, Any]) -> None:
    rows = report.rows_by_id(record)
    assert rows.keys() >= {s.id for s in (DYNAMIC, FP8, SMALL, *four_axes(4))}
    comparison = record["equal_bytes"][0]
    assert {one["method"] for one in comparison["best"]} == {"hqq", "quanto"}
    for name in comparison["rivals"]:
        near = rows[name]["bytes"]["held"] / rows[SMALL.id]["bytes"]["held"]
        assert 0.98 <= near <= 1.02
    assert [len(row["by_text"]) for row in rows.values()].count(1) == 3


def test_dynamic_cache_is_no_distance_from_itself(record: dict[str, Any]) -> None:
    own = report.rows_by_id(record)[DYNAMIC.id]
    assert own["kl"]["mean"] == pytest.approx(0, abs=1e-6)
    assert own["nll_increase"]["mean"] == 0
    assert own["topk_overlap"]["mean"] == 1
    tokens = WORKLOAD.prompt_tokens + WORKLOAD.fed_tokens
    assert own["bytes"]["held"] == tokens * LAYERS * 2 * KV_HEADS * HEAD_DIM * 4
    assert own["bytes"]["held_in_16_bits"] == own["bytes"]["held"] / 2


def test_fewer_bits_cost_more(record: dict[str, Any]) -> None:
    rows = report.rows_by_id(record)
    kl = [rows[s.id]["kl"]["mean"] for s in (course(8), course(4), course(4, 2))]
    assert 0 < kl[0] < kl[1] < kl[2]


def test_impossible_cache_gets_its_reason(record: dict[str, Any]) -> None:
    assert [one["id"] for one in record["impossible"]] == [hqq(3, 1, 16, 48).id]
    assert "3 bits" in record["impossible"][0]["reason"]
    shown = str(report.quality_table(record))
    assert "Cannot be: hqq axis 1, 3 bits" in shown


def test_target_that_cannot_be_ends_with_its_reason(tmp_path: Path) -> None:
    odd = course(4, group=24, window=24)  # 24 does not divide head_dim
    wanted = EqualBytes(odd, 32, ((hqq(4, 1), 1),), (("hqq", 1),))
    plan = replace(PLAN, equal_bytes=(wanted,), axes=((odd,),), shifted=(), variants=())
    found = report.load(measure(tmp_path, plan))
    assert odd.id in [one["id"] for one in found["impossible"]]
    assert found["equal_bytes"] == []
    assert report.tables(found)


def test_figures_of_the_texts_give_the_row(record: dict[str, Any]) -> None:
    row = report.rows_by_id(record)[SMALL.id]
    texts = [text["kl"]["mean"] for text in row["by_text"]]
    assert row["kl"]["mean"] == pytest.approx(fmean(texts), rel=1e-5)
    assert len(row["by_text"][0]["kl"]["blocks"]) == 3


def test_ratio_is_that_of_the_best_rival(record: dict[str, Any]) -> None:
    rows = report.rows_by_id(record)
    comparison = record["equal_bytes"][0]
    for best in comparison["best"]:
        rivals = [n for n in comparison["rivals"] if n.startswith(best["method"])]
        least = min(rows[name]["kl"]["mean"] for name in rivals)
        wanted = least / rows[SMALL.id]["kl"]["mean"]
        assert best["kl_ratio"]["ratio"] == pytest.approx(wanted, rel=1e-4)


def test_texts_are_named_by_digest_and_a_short_one_goes_on(
    record: dict[str, Any],
) -> None:
    texts = record["workload"]["texts"]
    assert [text["name"] for text in texts] == ["bread", "river"]
    assert len({text["sha256"] for text in texts}) == 2
    loaded = loaded_tiny_model()
    long = replace(WORKLOAD, scored_tokens=3200)
    ids = token_ids(loaded, long, "river")
    assert ids.shape == (1, 3264)
    text = models.natural_text("river").encode()
    assert (
        bytes(ids[0].tolist()) == (text + models.natural_text("bread").encode())[:3264]
    )


# ---- JSON ---------------------------------------------------------------------------


def test_result_without_one_of_its_fields_is_refused(record: dict[str, Any]) -> None:
    assert schema.faults(record) == []
    for path in (
        ("rows", 0, "kl"),
        ("rows", 0, "by_text", 0, "topk_overlap"),
        ("workload", "texts", 0, "sha256"),
        ("model", "commit"),
        ("hardware", "cpu"),
        ("equal_bytes", 0, "best", 0, "kl_ratio"),
    ):
        damaged: Any = json.loads(json.dumps(record))
        inner = damaged
        for step in path[:-1]:
            inner = inner[step]
        del inner[path[-1]]
        assert schema.faults(damaged), path


def test_schema_in_results_is_the_one_in_use() -> None:
    written = (ROOT / "results" / "quality.schema.json").read_text("utf-8")
    assert written == schema.schema_text()


def test_committed_results_fit_the_schema_and_compare_equal_bytes() -> None:
    for path in (ROOT / "results").glob("quality-*.json"):
        record = report.load(path)
        rows = report.rows_by_id(record)
        for comparison in record["equal_bytes"]:
            kind = "held" if comparison["kv_bits"] == 32 else "held_in_16_bits"
            target = rows[comparison["course"]]["bytes"][kind]
            for name in comparison["rivals"]:
                assert abs(rows[name]["bytes"][kind] / target - 1) <= 0.02


def test_file_that_is_no_result_is_named(tmp_path: Path) -> None:
    path = tmp_path / "quality-x.json"
    with pytest.raises(report.ReportError, match="cannot be read"):
        report.load(path)
    path.write_text("{", "utf-8")
    with pytest.raises(report.ReportError, match="no JSON"):
        report.load(path)
    path.write_text("{}", "utf-8")
    with pytest.raises(report.ReportError, match="no quality result"):
        report.load(path)


# ---- resuming -----------------------------------------------------------------------


def test_killed_run_goes_on_and_measures_nothing_twice(
    tmp_path: Path, result: Path
) -> None:
    plan = replace(PLAN, equal_bytes=(), axes=(), shifted=())
    seen: list[str] = []

    def killed(done: int, total: int, text: str) -> None:
        seen.append(text)
        if len(seen) == 4:
            raise KeyboardInterrupt

    def goes_on(done: int, total: int, text: str) -> None:
        seen.append(text)

    with pytest.raises(KeyboardInterrupt):
        measure(tmp_path, plan, report=killed)
    assert not (tmp_path / "quality-tiny.json").exists()
    path = measure(tmp_path, plan, report=goes_on)
    assert len(seen) == len(set(seen)) == 9
    record = report.load(path)
    assert (record["run"]["units"], record["run"]["resumed_units"]) == (9, 4)
    assert record["run"]["processes"] == 2
    whole = report.rows_by_id(report.load(result))[SMALL.id]
    assert report.rows_by_id(record)[SMALL.id] == whole
    assert [p.name for p in tmp_path.iterdir()] == ["quality-tiny.json"]


def test_result_is_never_overwritten(result: Path) -> None:
    before = result.read_bytes()
    with pytest.raises(RunRefused, match="never overwritten"):
        measure(result.parent)
    assert result.read_bytes() == before


def test_bytes_that_differ_from_the_arithmetic_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = replace(PLAN, table=(SMALL,), equal_bytes=(), axes=(), shifted=())
    counted = build.held_bytes
    monkeypatch.setattr(build, "held_bytes", lambda cache: counted(cache) + 1)
    with pytest.raises(RuntimeError, match="arithmetic"):
        measure(tmp_path, plan)


# ---- bytes --------------------------------------------------------------------------


@pytest.mark.parametrize("setting", [*EVERY_KIND, *FILLED_UP], ids=name_of)
def test_arithmetic_is_what_the_cache_holds(
    setting: Setting, counts: ByteCounts
) -> None:
    model, ids = tiny_model(), prompt(1, 64 + 95, seed=2)
    filled = prefill(model, ids[:, :64])
    _, built = predictions(model, filled, ids[:, 64:], setting)
    assert build.held_bytes(built.cache) == counts.held(setting).end


def test_mean_bytes_are_those_of_every_step(counts: ByteCounts) -> None:
    # one exact token after the other, the window emptied at each 24th
    cost = counts.token_cost(hqq(4, 1, window=24))
    sizes = []
    for step in range(1, 96):
        exact = step % 24
        sizes.append(cost.of(exact, 64 + step - exact))
    assert counts.held(hqq(4, 1, window=24)).mean == pytest.approx(fmean(sizes))


@pytest.mark.parametrize(("bits", "kv_bits"), [(4, 32), (2, 16)])
def test_settings_of_equal_bytes_are_within_two_percent(
    bits: int, kv_bits: int
) -> None:
    dtype = {32: torch.float32, 16: torch.float16}[kv_bits]
    ours = ByteCounts(tiny_model().config, Workload(), dtype)
    rivals = ((hqq(bits, 1), 4), (hqq(bits, 0), 1), (quanto(bits, -1), 1))
    wanted = EqualBytes(course(bits), kv_bits, rivals, ())
    found = ours.like(wanted)
    assert {s.family for s in found} >= {"hqq axis 1", "hqq axis 0"}
    assert len(found) == len(set(found))
    assert sum(s.family == "hqq axis 0" for s in found) == 1
    target = ours.held(course(bits))
    for setting in found:
        held = ours.held(setting)
        assert abs(held.end / target.end - 1) <= 0.02
        assert held.mean <= 1.02 * target.mean


def test_library_that_cannot_says_why(counts: ByteCounts) -> None:
    with pytest.raises(Impossible, match=r"has to be one of \[`2`, `4`\]"):
        counts.held(quanto(8, 0, window=48))
    with pytest.raises(Impossible, match="no multiple of the group"):
        counts.held(quanto(4, -1, group=64, window=40))
    with pytest.raises(Impossible, match="head_dim is 32"):
        counts.held(course(4, group=64))


# ---- feeding ------------------------------------------------------------------------


@pytest.mark.parametrize("setting", EVERY_KIND, ids=name_of)
def test_chunk_at_once_is_what_its_tokens_see_one_by_one(setting: Setting) -> None:
    # in double precision, so that the order of the sums does not move a code
    model, ids = tiny_model(torch.float64), prompt(1, 64 + 70, seed=3)
    filled = prefill(model, ids[:, :64])
    at_once, _ = predictions(model, filled, ids[:, 64:], setting)
    one_by_one, _ = predictions(model, filled, ids[:, 64:], setting, [1] * 70)
    assert (at_once - one_by_one).abs().max() < 1e-4
    exact, _ = predictions(model, filled, ids[:, 64:], DYNAMIC)
    far = (at_once - exact).abs().max()
    assert far < 1e-9 if setting == DYNAMIC else far > 1e-4


def test_chunks_end_where_tokens_leave_the_window() -> None:
    # 64 tokens: 4 sinks, 32 quantized, 28 in the window; with 36 more it is 64 long
    assert build.exact_chunks(course(4), 64, 95) == [4, 32, 32, 27]
    assert build.exact_chunks(course(4), 40, 95) == [28, 32, 32, 3]
    assert build.exact_chunks(hqq(4, window=40), 64, 95) == [40, 40, 15]
    assert build.exact_chunks(FP8, 64, 95) == [95]
    assert build.exact_chunks(DYNAMIC, 64, 0) == []


def test_larger_chunk_is_seen(record: dict[str, Any]) -> None:
    """So the test above would notice a wrong chunk."""
    model, ids = tiny_model(torch.float64), prompt(1, 64 + 95, seed=3)
    filled = prefill(model, ids[:, :64])
    right, _ = predictions(model, filled, ids[:, 64:], SMALL)
    wrong, _ = predictions(model, filled, ids[:, 64:], SMALL, [95])
    assert (right - wrong).abs().max() > 1e-2


# ---- the constant added to Keys -----------------------------------------------------


def shifted_distance(setting: Setting, size: float) -> float:
    """How far a constant in the Keys moves a cache's predictions (mean, nats)."""
    model, ids = tiny_model(), prompt(1, 64 + 63, seed=4)
    filled = prefill(model, ids[:, :64])
    plain, _ = predictions(model, filled, ids[:, 64:], setting)
    moved, _ = predictions(model, filled, ids[:, 64:], replace(setting, key_shift=size))
    return float((plain - moved).abs().mean())


def test_constant_in_the_keys_leaves_dynamic_cache_as_it_is() -> None:
    assert shifted_distance(DYNAMIC, 100.0) < 1e-3


def test_constant_hurts_keys_per_token_and_not_keys_per_channel() -> None:
    per_channel = shifted_distance(course(4), 100.0)
    per_token = shifted_distance(course(4, axes=("token", "token")), 100.0)
    # what is left per channel comes from minima in float16, whose step is 1/16 at 100
    assert per_token > 5 * per_channel
    assert shifted_distance(hqq(4, 1, 32, 32), 100.0) > 5 * per_channel


def test_whole_model_run_with_shifted_keys_says_the_same() -> None:
    """Through the model's own prefill, as lab 05 uses it."""
    model, ids = tiny_model(), prompt(2, 40, seed=5)
    shift = constant_key_shift(model.config, 50.0)

    def logits(make: Callable[[], Any]) -> torch.Tensor:
        cache = make()
        with torch.no_grad():
            first = model(input_ids=ids[:, :30], cache=cache).logits
            rest = model(input_ids=ids[:, 30:], cache=cache).logits
        return torch.cat([first, rest], 1)

    def new() -> Any:
        return caches.build(model.config, None, None).cache

    plain, moved = logits(new), logits(lambda: add_to_keys(new(), shift))
    assert (plain - moved).abs().max() < 1e-3
    held = add_to_keys(new(), shift)
    logits(lambda: held)
    assert held.layers[1].keys.abs().max() > 40


def test_constant_stands_in_two_channels_of_each_head() -> None:
    config = tiny_model().config
    shift = constant_key_shift(config, 20.0)
    assert shift.shape == (LAYERS, KV_HEADS, 1, HEAD_DIM)
    assert ((shift == 20).sum(-1) == 2).all()
    assert ((shift == 0) | (shift == 20)).all()
    assert torch.equal(shift, constant_key_shift(config, 20.0))
    assert not torch.equal(shift, constant_key_shift(config, 20.0, seed=1))
    with pytest.raises(ValueError, match="from 1 to head_dim, 32; got 33"):
        constant_key_shift(config, 20.0, channels=33)


def test_cache_with_tokens_is_refused() -> None:
    model = tiny_model()
    cache = caches.build(model.config, None, None).cache
    with torch.no_grad():
        model(input_ids=prompt(1, 3), cache=cache)
    with pytest.raises(ValueError, match="already holds 3 tokens"):
        add_to_keys(cache, constant_key_shift(model.config, 1.0))


# ---- arithmetic and report ----------------------------------------------------------


def test_errors_by_hand() -> None:
    first = estimates.of_tokens([1.0, 3.0, 5.0, 7.0], block=2)
    second = estimates.of_tokens([2.0, 2.0, 4.0, 4.0], block=2)
    assert first["blocks"] == [2.0, 6.0]
    mean = estimates.over_texts([first, second], tokens=4)
    values = torch.tensor([1.0, 3, 5, 7, 2, 2, 4, 4])
    assert mean["mean"] == 3.5
    assert mean["standard_error"] == pytest.approx(float(values.std()) / 8**0.5, 1e-4)
    blocks = torch.tensor([2.0, 6, 2, 4])
    assert mean["standard_error_blocks"] == pytest.approx(float(blocks.std()) / 2, 1e-4)
    assert mean["standard_error_texts"] == pytest.approx(0.5)
    with pytest.raises(ValueError, match="do not fill blocks"):
        estimates.of_tokens([1.0], block=2)


def test_paired_ratio_has_no_error_where_one_is_a_multiple_of_the_other() -> None:
    below = [estimates.of_tokens(v, 1) for v in ([1.0, 2.0], [4.0, 8.0])]
    above = [estimates.of_tokens(v, 1) for v in ([3.0, 6.0], [12.0, 24.0])]
    ratio = estimates.ratio(above, below)
    assert ratio["ratio"] == 3.0
    assert ratio["standard_error_blocks"] == pytest.approx(0, abs=1e-9)
    assert ratio["standard_error_texts"] == pytest.approx(0, abs=1e-9)
    assert ratio["by_text"] == [3.0, 3.0]
    other = estimates.ratio(above[::-1], below)
    assert other["standard_error_blocks"] > 0.5


def test_report_needs_no_torch(result: Path, tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from pathlib import Path\n"
        "from kvlab.quality import report\n"
        "record = report.load(sys.argv[1])\n"
        "print(*report.tables(record), sep='\\n')\n"
        "report.write_figures(record, Path(sys.argv[2]), 'q')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(result), str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "At equal bytes: 4 bits" in done.stdout
    pictures = {path.name for path in tmp_path.iterdir()}
    assert pictures == {"q-against-bytes.png", "q-outliers.png"}


def test_figures_have_units_and_every_family(record: dict[str, Any]) -> None:
    for figure in report.figures(record).values():
        ax = figure.axes[0]
        assert ax.get_title() and ax.get_yscale() == "log"
        assert "nats" in ax.get_ylabel()
        assert "(" in ax.get_xlabel()
    drawn = report.figures(record)["against_bytes"].axes[0]
    names = {text.get_text() for text in drawn.get_legend().get_texts()}
    assert names == {
        "course's cache (mixed axes)",
        "hqq axis 1",
        "quanto -1/0 (KIVI's axes)",
        "fp8",
    }


# ---- what the course says of it -----------------------------------------------------


def test_a_setting_says_nothing_where_the_cache_is_as_it_comes() -> None:
    model = tiny_model()
    given = build.new_cache(model.config, course(4)).cache.settings
    assert given == MixedAxisCache(model.config).settings
    assert given.key_fits == FITS
    assert "fits" not in course(4).id
    assert build.new_cache(model.config, course(4, fits=0)).cache.settings.key_fits == 0


def test_results_readme_states_what_the_file_says() -> None:
    record = report.load(ROOT / "results" / "quality-smollm2.json")
    text = (ROOT / "results" / "README.md").read_text("utf-8")
    for comparison in record["equal_bytes"]:
        bits = report.rows_by_id(record)[comparison["course"]]["bits"]
        figures = {}
        for best in comparison["best"]:
            ratio = best["kl_ratio"]
            error = ratio["standard_error_blocks"]
            figures[best["method"]] = f"{ratio['ratio']:.2f} ± {error:.2f}"
        kind = {32: "float32", 16: "16 bits"}[comparison["kv_bits"]]
        row = f"| {bits} | {kind} | {figures['hqq']} | {figures['quanto']} |"
        assert row in text
    assert all(claim["holds"] for claim in record["claims"])
