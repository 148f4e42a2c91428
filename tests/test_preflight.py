"""`kvlab.preflight`: ok, warning and blocked, from this machine as it is.

Only a GPU is pretended, and only where there is none. Missing packages and files are really
missing: another interpreter, an empty cache.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvlab import models, preflight, runtime
from kvlab.matrix import caches
from kvlab.matrix.workload import Workload, profile, with_model
from kvlab.preflight import GIB, Row

ROOT = Path(__file__).parents[1]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
without_cuda = pytest.mark.skipif(
    torch.cuda.is_available(), reason="this machine has a CUDA device"
)


def by_subject(rows: list[Row]) -> dict[str, Row]:
    return {row.subject: row for row in rows}


def changed(workload: Workload, **changes: object) -> Workload:
    return replace(workload, workload_version="test", **changes)  # type: ignore[arg-type]


CPU, GPU = profile("embedded_cpu"), profile("Q-CUDA-MECHANISM")


# ---- this machine -------------------------------------------------------------------


def test_the_embedded_profile_is_ready_here() -> None:
    rows = preflight.check_profile("embedded_cpu")
    states = {row.subject: row.state for row in rows}
    assert states["Python"] == states["torch"] == states["transformers"] == "ok"
    assert states["hqq"] == states["shapes, hqq_axis1"] == states["disk"] == "ok"
    assert preflight.exit_code(rows) == 0
    assert preflight.verdict(rows).startswith("Ready.")


@without_cuda
def test_the_gpu_profile_is_blocked_without_a_gpu_and_says_what_to_do(
    tmp_path: Path,
) -> None:
    rows = preflight.check_profile(
        "Q-CUDA-MECHANISM", cache_dir=tmp_path, local_files_only=True
    )
    found = by_subject(rows)
    assert preflight.exit_code(rows) == 2
    assert found["GPU"].state == found["hqq"].state == "blocked"
    assert "embedded_cpu" in found["GPU"].next_step
    assert all(row.next_step for row in rows if row.state != "ok")
    assert "GPU" in preflight.verdict(rows)


def test_a_check_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "models"))
    hub = tmp_path / "hub"
    hub.mkdir()
    preflight.check(CPU, "cpu")
    preflight.check(GPU, "cpu", cache_dir=hub, local_files_only=True)
    assert [path.name for path in tmp_path.iterdir()] == ["hub"]
    assert not list(hub.iterdir())


def test_the_command_prints_every_row_and_returns_the_exit_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert preflight.command("embedded_cpu") == 0
    printed = capsys.readouterr().out
    for subject in ("Python", "torch", "CPU", "transformers", "hqq", "quanto", "disk"):
        assert subject in printed
    assert "Ready." in printed
    with pytest.raises(ValueError, match="no profile 'gpu'"):
        preflight.command("gpu")


def test_the_plain_text_holds_states_findings_and_next_steps() -> None:
    rows = [Row("a", "ok", "fine"), Row("b", "blocked", "broken", "mend it")]
    assert preflight.text(rows).splitlines() == [
        "ok       a: fine",
        "blocked  b: broken",
        "           to do: mend it",
        "Blocked by: b.",
    ]


def test_the_tested_transformers_is_the_pinned_one() -> None:
    pins = (ROOT / "constraints.txt").read_text("utf-8")
    assert f"\ntransformers=={preflight.TESTED_TRANSFORMERS}\n" in pins


# ---- packages that are really missing -----------------------------------------------


def test_missing_packages_block_and_missing_quanto_only_warns(tmp_path: Path) -> None:
    """An interpreter that finds this environment's packages, but for the ones in question."""
    hidden = ("transformers", "hqq", "optimum")
    for entry in Path(torch.__file__).parents[1].iterdir():
        if not entry.name.startswith(hidden):
            (tmp_path / entry.name).symlink_to(entry)
    program = (
        "import json, sys\n"
        "sys.path[:0] = sys.argv[1:]\n"
        "from kvlab import preflight\n"
        "rows = preflight.check_profile('embedded_cpu')\n"
        "print(json.dumps([preflight.exit_code(rows), [vars(row) for row in rows]]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", program, str(tmp_path), str(ROOT / "tools")],
        capture_output=True,
        text=True,
    )
    assert not done.returncode, done.stderr
    code, rows = json.loads(done.stdout)
    found = {row["subject"]: row for row in rows}
    assert code == 2
    assert found["transformers"]["state"] == found["hqq"]["state"] == "blocked"
    assert found["hqq"]["next_step"] == "pip install hqq"
    assert found["torch"]["state"] == "ok"
    assert found["quanto"]["state"] == "warning"
    assert "left out" in found["quanto"]["finding"]


# ---- a GPU, pretended ---------------------------------------------------------------


@pytest.fixture
def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes torch report a GPU; its tensors stay on the CPU."""

    def pretend(free: float, total: float = 12, capability: str = "8.9") -> None:
        major, minor = map(int, capability.split("."))
        properties = SimpleNamespace(
            name="Some GPU", total_memory=int(total * GIB), major=major, minor=minor
        )
        memory = (int(free * GIB), int(total * GIB))
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: memory)
        monkeypatch.setattr(preflight, "_tensor_device", lambda device: "cpu")

    return pretend


def test_the_gpu_profile_is_ready_on_a_machine_with_a_gpu_and_the_model(
    pretend_gpu: Callable[..., None], tmp_path: Path
) -> None:
    pretend_gpu(free=11.5)
    hub_cache_with_model(tmp_path, GPU.model_id)
    rows = preflight.check_profile("Q-CUDA-MECHANISM", cache_dir=tmp_path)
    found = by_subject(rows)
    assert preflight.exit_code(rows) == 0
    for subject in ("torch", "GPU", "hqq", "shapes, hqq_axis1", "disk", "model"):
        assert found[subject].state == "ok", found[subject]
    assert "Some GPU" in found["GPU"].finding
    assert "CUDA 13.0" in found["torch"].finding
    assert "bfloat16" in found["hqq"].finding


@pytest.mark.parametrize(
    ("facts", "state", "words"),
    [
        ({"free": 11.5}, "ok", "11.5 of 12.0 GiB free"),
        ({"free": 0.5}, "blocked", "needs 2.0"),
        ({"free": 3}, "warning", "may need 4.0"),
        ({"free": 8}, "warning", "something else uses it"),
        ({"free": 14.5, "total": 15, "capability": "7.5"}, "warning", "emulation"),
        ({"free": 139, "total": 140, "capability": "10.0"}, "ok", "10.0"),
    ],
)
def test_a_gpu_is_judged_by_its_free_memory_and_its_arithmetic(
    pretend_gpu: Callable[..., None], facts: dict[str, float], state: str, words: str
) -> None:
    pretend_gpu(**facts)
    row = preflight.device_row(GPU, "cuda")
    assert row.state == state
    assert words in row.finding


# ---- memory and disk ----------------------------------------------------------------


def test_too_little_memory_or_disk_blocks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path))
    known = preflight.KNOWN_MODELS["embedded"]
    huge = replace(known, fetch_bytes=2**60, run_bytes=(2**60, 2**61))
    monkeypatch.setitem(preflight.KNOWN_MODELS, "embedded", huge)
    assert preflight.device_row(CPU, "cpu").state == "blocked"
    row = preflight.disk_row(CPU)
    assert row.state == "blocked"
    assert "KVLAB_CACHE" in row.next_step


# ---- shapes -------------------------------------------------------------------------


def quantizes(workload: Workload, tokens: int) -> bool:
    """Whether the real cache takes this many tokens and gives them back."""
    from transformers import LlamaConfig

    shape = preflight.KNOWN_MODELS[workload.model_id].shape
    config = LlamaConfig(
        num_hidden_layers=1,
        num_attention_heads=shape.kv_heads,
        num_key_value_heads=shape.kv_heads,
        hidden_size=shape.kv_heads * shape.head_dim,
    )
    prompt = torch.randn(1, shape.kv_heads, tokens, shape.head_dim)
    cache = caches.build(config, workload.candidate, 128).cache
    try:
        cache.update(prompt, prompt, 0)
        return (
            cache.update(prompt[:, :, :1], prompt[:, :, :1], 0)[0].shape[2]
            == tokens + 1
        )
    except (RuntimeError, AssertionError):
        return False


@pytest.mark.parametrize("context", [127, 511])
@pytest.mark.parametrize("nbits", [4, 2])
def test_a_length_that_hqq_cannot_take_is_named_with_the_nearest_that_works(
    context: int, nbits: int
) -> None:
    candidate = replace(CPU.candidate, nbits=nbits)
    workload = changed(
        CPU,
        candidate=candidate,
        further_candidates=(),
        context_lengths=(context,),
        window_context_length=512,
    )
    (row,) = preflight.shape_rows(workload)
    assert row.state == "blocked"
    assert f"{context} tokens, window 128" in row.finding
    match = re.search(r"nearest context that works: (\d+)", row.next_step)
    assert match
    assert not quantizes(workload, context)
    assert quantizes(workload, int(match.group(1)))


def test_a_further_candidate_that_does_not_fit_only_warns() -> None:
    workload = changed(CPU, context_lengths=(127, 512))
    rows = by_subject(preflight.shape_rows(workload))
    assert rows["shapes, hqq_axis1"].state == "blocked"
    workload = changed(CPU, context_lengths=(130, 512), further_context_lengths=(130,))
    rows = by_subject(preflight.shape_rows(workload))
    assert rows["shapes, hqq_axis1"].state == "ok"
    assert rows["shapes, quanto_kivi"].state == "warning"
    assert "130 tokens" in rows["shapes, quanto_kivi"].finding


def test_the_known_shapes_are_those_of_the_models() -> None:
    folder = models.cache_folder() / models.CONVERTED
    if not (folder / "config.json").is_file():
        pytest.skip("the embedded model is not here")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    shape = preflight.KNOWN_MODELS["embedded"].shape
    assert (shape.kv_heads, shape.head_dim) == (
        config["num_key_value_heads"],
        config["head_dim"],
    )


# ---- the model's files --------------------------------------------------------------


def hub_cache_with_model(cache: Path, model_id: str, heads: int = 2) -> None:
    """The files that the hub's client would leave, as far as they are looked at."""
    repository = cache / ("models--" + model_id.replace("/", "--"))
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    config = {
        "num_attention_heads": 7 * heads,
        "num_key_value_heads": heads,
        "hidden_size": 7 * heads * 64,
    }
    (snapshot / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "model.safetensors"):
        (snapshot / name).write_bytes(b"x")


def test_a_hub_model_in_the_cache_needs_no_network(tmp_path: Path) -> None:
    hub_cache_with_model(tmp_path, GPU.model_id)
    row = preflight.model_row(GPU, tmp_path, local_files_only=True)
    assert row.state == "ok"
    assert COMMIT[:12] in row.finding


def test_a_hub_model_that_is_half_there_blocks_offline(tmp_path: Path) -> None:
    hub_cache_with_model(tmp_path, GPU.model_id)
    next(tmp_path.rglob("model.safetensors")).unlink()
    row = preflight.model_row(GPU, tmp_path, local_files_only=True)
    assert row.state == "blocked"
    assert "not all" in row.finding


def test_a_hub_model_that_cannot_be_reached_blocks(tmp_path: Path) -> None:
    row = preflight.model_row(GPU, tmp_path, local_files_only=True)
    assert row.state == "blocked"
    assert "embedded" in row.next_step


def test_the_shape_of_another_model_is_read_from_its_config(tmp_path: Path) -> None:
    workload = with_model(GPU, "some/model")
    (row,) = preflight.shape_rows(workload, tmp_path)
    assert row.state == "warning"
    hub_cache_with_model(tmp_path, "some/model", heads=5)
    rows = by_subject(preflight.shape_rows(workload, tmp_path))
    assert "5 KV heads of 64" in rows["shapes, hqq_axis1"].finding


def test_the_embedded_model_that_is_not_here_yet_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path))
    row = preflight.model_row(CPU)
    assert row.state == "warning"
    assert "93 MB" in row.next_step


def test_the_cpu_row_names_the_machine() -> None:
    row = preflight.device_row(CPU, "cpu")
    assert runtime.cpu_model() in row.finding
