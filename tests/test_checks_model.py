"""The checks of lab 05 name the known mistakes, and the lab's cache works in a transformer.

Run by pytest, in this process: it executes the test cells of the solution notebook
on each file of the answer suite. Starts no kernel and never needs the embedded model.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab import models
from kvlab.cache import MixedAxisCache
from kvlab.checks import Wrong, model

ROOT = Path(__file__).parent.parent
LAB = "05_real_model"
ANSWERS = ROOT / "tests" / "answers" / LAB
TODOS = (1, 2, 3, 4)
BEFORE = ("setup", "given_imports", "given_restore")


def _cells(kind: str) -> dict[str, str]:
    notebook = nbformat.read(ROOT / kind / LAB / f"{LAB}.ipynb", as_version=4)
    return {c.id: c.source for c in notebook.cells if c.cell_type == "code"}


CELLS = _cells("solutions")


def namespace(answers: dict[int, str] | None = None) -> dict[str, Any]:
    """The names of the notebook after its locked cells and the four answers."""
    names: dict[str, Any] = {"__name__": "__main__"}
    todos = {n: CELLS[f"todo_{n}"] for n in TODOS} | (answers or {})
    with contextlib.redirect_stdout(io.StringIO()):
        for cell in BEFORE:
            exec(CELLS[cell], names)
        for source in (*todos.values(), CELLS["given_class"]):
            exec(source, names)
    return names


def lost(names: dict[str, Any], of: Iterable[int] = TODOS) -> dict[str, str]:
    """The test cells of these TODOs that fail, and what each of them says."""
    said = {}
    for cell, source in CELLS.items():
        if cell.startswith(tuple(f"test_todo_{n}" for n in of)):
            try:
                exec(source, names)
            except Exception as error:
                said[cell] = str(error)
    return said


def shown(names: dict[str, Any], containing: str) -> str:
    """What the demonstrations with this text print."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        for source in CELLS.values():
            if containing in source:
                exec(source, names)
    return out.getvalue()


def parts(text: str) -> dict[int, str]:
    """TODO number -> source, from a file of the answer suite."""
    pieces = re.split(r"^# todo: (\d)\n", text, flags=re.MULTILINE)[1:]
    return {int(n): s for n, s in zip(pieces[::2], pieces[1::2], strict=True)}


def header(text: str, field: str) -> str:
    found = re.search(rf"^# {field}: (.+)$", text, flags=re.MULTILINE)
    assert found, f"no line '# {field}: ...'"
    return found.group(1)


def names_of(files: list[Path]) -> list[str]:
    return [file.stem for file in files]


WRONG = sorted((ANSWERS / "wrong").glob("*.py"))
RIGHT = sorted((ANSWERS / "right").glob("*.py"))


# --- the answer suite -----------------------------------------------------------------


def test_the_solution_loses_nothing() -> None:
    assert lost(namespace()) == {}


@pytest.mark.parametrize("file", WRONG, ids=names_of(WRONG))
def test_a_wrong_answer_loses_its_cells_and_reads_its_hint(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    answers = parts(text)
    said = lost(namespace(answers), of=answers)
    assert set(said) == {cell.strip() for cell in header(text, "loses").split(",")}
    first = next(iter(said.values()))
    assert header(text, "hint") in first
    assert first.startswith(f"TODO {header(text, 'todo')} wrong: ")


@pytest.mark.parametrize("file", RIGHT, ids=names_of(RIGHT))
def test_a_right_answer_written_another_way_passes(file: Path) -> None:
    answers = parts(file.read_text(encoding="utf-8"))
    assert lost(namespace(answers), of=answers) == {}


def test_the_empty_notebook_is_not_attempted() -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    empty = _cells("notebooks")
    out = io.StringIO()
    raised = {}
    with contextlib.redirect_stdout(out):
        for cell, source in empty.items():
            if "plots.model.step" in source:
                continue
            try:
                exec(source, names)
            except NotImplementedError as error:
                raised[cell] = str(error)
    assert set(raised) == {c for c in empty if c.startswith("test_todo")}
    assert out.getvalue().count("This appears when") == 5
    assert "model" not in names  # nothing was loaded, so nothing fetched


def test_swapped_axes_cost_todo_1_and_the_cache_still_runs() -> None:
    text = (ANSWERS / "wrong" / "axes_swapped.py").read_text(encoding="utf-8")
    names = namespace(parts(text))
    said = lost(names)
    assert set(said) == {"test_todo_1_groups"}
    assert "along head_dim" in said["test_todo_1_groups"]
    assert "beam search writes the same tokens: True" in shown(names, "beams = {}")


# --- the lab's cache in a transformer -------------------------------------------------


def cache(names: dict[str, Any], **settings: Any) -> Any:
    return names["YourCache"](model.tiny_model().config, names["Settings"](**settings))


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    return namespace()


def test_it_says_and_weighs_what_the_course_cache_does(names: dict[str, Any]) -> None:
    text, arrivals = model.tiny_text(2, 50), [30, *[1] * 12, 8]
    for bits in (8, 4, 2):
        for key_axis, value_axis in (("channel", "token"), ("token", "channel")):
            own = cache(
                names,
                bits=bits,
                group_size=8,
                window=8,
                key_axis=key_axis,
                value_axis=value_axis,
            )
            reference = MixedAxisCache(
                model.tiny_model().config,
                key_bits=bits,
                value_bits=bits,
                group_size=8,
                window=8,
                sink_tokens=0,
                key_axis=key_axis,
                value_axis=value_axis,
            )
            got = model.tiny_logits(own, text, arrivals)
            wanted = model.tiny_logits(reference, text, arrivals)
            if bits == 8:  # the two round scales differently: codes may differ by one
                assert torch.allclose(got, wanted, atol=0.1)
            assert own.get_seq_length() == 50
            assert own.nbytes == reference.nbytes


def test_a_reset_cache_starts_again(names: dict[str, Any]) -> None:
    text = model.tiny_text(1, 30)
    own = cache(names, group_size=4, window=4)
    first = model.tiny_logits(own, text, [20, 10])
    own.reset()
    assert (own.get_seq_length(), own.nbytes) == (0, 0)
    assert torch.equal(model.tiny_logits(own, text, [20, 10]), first)


def test_a_guess_that_is_taken_back_leaves_no_trace(names: dict[str, Any]) -> None:
    text = model.tiny_text(1, 30)
    straight, guessed = (cache(names, group_size=4, window=8) for _ in range(2))
    model.tiny_logits(straight, text[:, :20], [20])
    model.tiny_logits(guessed, text[:, :22], [20, 2])
    guessed.crop(-2)
    rest = [text[:, 20:], [10]]
    assert torch.equal(
        model.tiny_logits(straight, *rest), model.tiny_logits(guessed, *rest)
    )


def test_doubled_rows_say_the_same_twice(names: dict[str, Any]) -> None:
    text = model.tiny_text(2, 24)
    own = cache(names, group_size=4, window=4)
    model.tiny_logits(own, text[:, :20], [20])
    own.batch_repeat_interleave(2)
    rest = text[:, 20:].repeat_interleave(2, dim=0)
    got = model.tiny_logits(own, rest, [4])
    assert torch.allclose(got[0], got[1]) and not torch.allclose(got[1], got[2])


def test_without_the_model_each_cell_prints_one_line(
    names: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(*args: Any, **named: Any) -> None:
        raise models.ModelError("It is nowhere.\n  tried: all")

    monkeypatch.setattr(models, "load", absent)
    monkeypatch.delenv("NBGRADER_EXECUTION", raising=False)
    own = dict(names)
    said = shown(own, "class NoModel") + shown(own, "needs_model():")
    lines = [line for line in said.splitlines() if line.startswith("No embedded model")]
    assert len(lines) == 4 and "It is nowhere" in lines[0]


def test_a_graded_notebook_never_loads_the_model(
    names: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "load", lambda: pytest.fail("the model was loaded"))
    monkeypatch.setenv("NBGRADER_EXECUTION", "autograde")
    own = dict(names)
    said = shown(own, "class NoModel") + shown(own, "needs_model():")
    assert said.count("Left out while the notebook is graded") == 4


# --- the checks by themselves ---------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    arrivals=st.lists(st.integers(1, 9), min_size=1, max_size=6), keep=st.integers(1, 9)
)
def test_the_solution_reads_and_stores_any_arrivals(
    names: dict[str, Any], arrivals: list[int], keep: int
) -> None:
    update: Callable[..., Any] = names["update_layer"]
    model.reads(update, arrivals, keep)
    model.stores(update, arrivals, keep)


def test_other_errors_pass_through_from_lab_04() -> None:
    with pytest.raises(ZeroDivisionError), model.from_lab_04(1):
        1 / 0  # noqa: B018
    with pytest.raises(NotImplementedError), model.from_lab_04(1):
        raise NotImplementedError("TODO 1")


def test_the_tiny_model_leaves_the_global_seed_alone() -> None:
    model.tiny_model.cache_clear()
    torch.manual_seed(3)
    wanted = torch.rand(3)
    torch.manual_seed(3)
    model.tiny_model()
    assert torch.equal(torch.rand(3), wanted)


def test_near_dynamic_notices_that_nothing_was_quantized(
    names: dict[str, Any],
) -> None:
    store = model.Store(keep=99)
    with pytest.raises(Wrong, match="exactly those of DynamicCache"):
        model.near_dynamic(
            names["update_layer"],
            store.restore_prefix,
            store.append,
            [9, 1],
            at_most=1,
            at_least=1e-6,
        )
