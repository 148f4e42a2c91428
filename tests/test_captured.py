"""`kvlab.captured`: the committed file, and that it is what a fresh capture gives."""

from __future__ import annotations

import math
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import kvlab
from kvlab import captured, models

COMMITTED = Path(kvlab.__file__).parent / "data" / captured.FILE_NAME
FLOAT16 = 2**-10  # one step of float16, relative: both files were rounded


def slow_channel_ratio(keys: torch.Tensor) -> float:
    magnitudes = sorted(
        max(abs(float(x)) for x in keys[0, head, :, channel])
        for head in range(keys.shape[1])
        for channel in range(keys.shape[3])
    )
    return magnitudes[-1] / magnitudes[(len(magnitudes) - 1) // 2]


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return captured.capture(tmp_path_factory.mktemp("fresh") / "captured.npz")
    except models.ModelError as error:
        pytest.skip(f"the embedded model cannot be had here: {error}")


def test_file_is_small() -> None:
    assert COMMITTED.stat().st_size < 400_000


def test_load_gives_float32_tensors_of_the_model_s_shape() -> None:
    for layer in captured.load().layers:
        found = captured.load(layer)
        tokens = len(found.tokens)
        assert found.layer == layer
        assert tokens == captured.TOKENS
        assert found.keys.shape == found.values.shape == (1, 3, tokens, 64)
        assert found.queries.shape == (1, 9, tokens, 64)
        for tensor in (found.keys, found.values, found.queries):
            assert tensor.dtype == torch.float32
            assert tensor.isfinite().all()
            assert tensor.std() > 0.1


def test_text_is_the_beginning_of_the_named_text() -> None:
    found = captured.load()
    assert "".join(found.tokens) == found.text
    assert models.natural_text(captured.TEXT).startswith(found.text)
    assert found.text.startswith("The lighthouse")
    assert captured.TEXT in found.source and str(found.layer) in found.source


def test_default_layer_has_the_marked_outlier_channels() -> None:
    marked, other = captured.load(), captured.load(captured.load().layers[1])
    for found in (marked, other):
        # the ratio was taken before rounding to float16
        assert slow_channel_ratio(found.keys) == pytest.approx(
            found.channel_ratio, rel=2 * FLOAT16
        )
    assert marked.channel_ratio > 6
    assert marked.channel_ratio > 1.4 * other.channel_ratio


def test_layer_that_was_not_captured_is_refused() -> None:
    with pytest.raises(ValueError, match=r"layer 99 .*\(\d+, \d+\)"):
        captured.load(99)


def test_loaded_tensors_are_the_caller_s_own() -> None:
    captured.load().keys.zero_()
    assert captured.load().keys.abs().max() > 1


def test_file_with_pickled_objects_is_refused(tmp_path: Path) -> None:
    about = np.array({"layers": [0]}, dtype=object)
    np.savez(tmp_path / "objects.npz", about=about)
    with pytest.raises(ValueError, match="allow_pickle"):
        captured.load(path=tmp_path / "objects.npz")


def test_load_needs_no_transformers() -> None:
    code = """
import sys
for name in ("transformers", "huggingface_hub", "filelock", "gguf", "tokenizers"):
    sys.modules[name] = None
from kvlab import captured
print(tuple(captured.load().keys.shape))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("(1, 3, 96, 64)", "")


def test_committed_file_is_what_a_capture_gives(fresh: Path) -> None:
    assert captured.load(path=fresh).layers == captured.load().layers
    for layer in captured.load().layers:
        new, old = captured.load(layer, fresh), captured.load(layer)
        assert (new.text, new.tokens, new.source) == (old.text, old.tokens, old.source)
        for name in ("keys", "values", "queries"):
            torch.testing.assert_close(
                getattr(new, name), getattr(old, name), rtol=2 * FLOAT16, atol=1e-3
            )


def test_capture_writes_the_same_bytes_each_time(fresh: Path, tmp_path: Path) -> None:
    again = captured.capture(tmp_path / "new folder" / "again.npz")
    assert again.read_bytes() == fresh.read_bytes()
    assert [path.name for path in again.parent.iterdir()] == ["again.npz"]
    with zipfile.ZipFile(fresh) as archive:
        dates = {member.date_time for member in archive.infolist()}
    assert dates == {(1980, 1, 1, 0, 0, 0)}


def test_kept_layers_follow_the_rule_and_queries_give_the_model_s_attention(
    fresh: Path,
) -> None:
    loaded = models.load("embedded")
    loaded.model.set_attn_implementation("eager")
    first = captured.load(path=fresh)
    ids = loaded.tokenizer(first.text, return_tensors="pt").input_ids
    with torch.no_grad():
        output = loaded.model(ids, use_cache=True, output_attentions=True)
    cache = output["cache" if "cache" in output else "past_key_values"]

    ratios = [slow_channel_ratio(layer.keys) for layer in cache.layers]
    by_ratio = sorted(range(30), key=ratios.__getitem__)
    assert first.layers == (by_ratio[29], by_ratio[14])

    for layer in first.layers:
        found = captured.load(layer, fresh)
        tokens = len(found.tokens)
        hidden = torch.ones(tokens, tokens).triu(1).bool()
        for head in (0, 4, 8):
            scores = found.queries[0, head] @ found.keys[0, head // 3].T / math.sqrt(64)
            weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
            # float16 moves a score of up to 50 by some hundredths at most
            torch.testing.assert_close(
                weights, output.attentions[layer][0, head], rtol=0, atol=0.01
            )
