"""The checks of lab 03 name the known mistakes and let every right variant pass.

Run by pytest, in this process: it executes the test cells of the solution notebook
on each file of the answer suite. Starts no kernel.
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

from kvlab import captured
from kvlab.checks import Wrong, axes

ROOT = Path(__file__).parent.parent
LAB = "03_kv_axes_and_window"
ANSWERS = ROOT / "tests" / "answers" / LAB
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def _cells() -> dict[str, str]:
    notebook = nbformat.read(ROOT / "solutions" / LAB / f"{LAB}.ipynb", as_version=4)
    return {c.id: c.source for c in notebook.cells if c.cell_type == "code"}


CELLS = _cells()


def namespace(answers: dict[int, str] | None = None) -> dict[str, Any]:
    """The names of the notebook after its locked cells and the three answers."""
    names: dict[str, Any] = {"__name__": "__main__"}
    todos = {n: CELLS[f"todo_{n}"] for n in (1, 2, 3)} | (answers or {})
    with contextlib.redirect_stdout(io.StringIO()):
        for cell in ("setup", "given_imports"):
            exec(CELLS[cell], names)
    for source in (*todos.values(), CELLS["given_attention"], CELLS["given_stand_ins"]):
        exec(source, names)
    return names


def lost(names: dict[str, Any], of: Iterable[int] = (1, 2, 3)) -> dict[str, str]:
    """The test cells of these TODOs that fail, and what each of them says."""
    said = {}
    for cell, source in CELLS.items():
        if cell.startswith(tuple(f"test_todo_{n}" for n in of)):
            try:
                exec(source, names)
            except Exception as error:
                said[cell] = str(error)
    return said


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
    # the scoreboard shows a sentence of a check before a bare error
    sentences = [one for one in said.values() if one.startswith("TODO ")]
    assert header(text, "hint") in sentences[0]
    assert sentences[0].startswith(f"TODO {header(text, 'todo')} wrong: ")


@pytest.mark.parametrize("file", RIGHT, ids=names_of(RIGHT))
def test_a_right_answer_written_another_way_passes(file: Path) -> None:
    answers = parts(file.read_text(encoding="utf-8"))
    assert lost(namespace(answers), of=answers) == {}


def test_swapping_the_two_axes_costs_todo_1_and_2_and_not_3() -> None:
    names = namespace()
    key = names["quantize_key_per_channel"]
    names["quantize_key_per_channel"] = names["quantize_value_per_token"]
    names["quantize_value_per_token"] = key
    said = lost(names)
    assert "so you reduced head_dim" in said["test_todo_1"]
    assert "so you reduced tokens" in said["test_todo_2"]
    assert not any(cell.startswith("test_todo_3") for cell in said)


def test_the_empty_notebook_is_not_attempted() -> None:
    stub = "def {}(*args, **named):\n    raise NotImplementedError('TODO {}: later')"
    functions = (
        "quantize_key_per_channel",
        "quantize_value_per_token",
        "append_and_partition",
    )
    names = namespace({n: stub.format(f, n) for n, f in enumerate(functions, start=1)})
    for cell, source in CELLS.items():
        if cell.startswith("test_todo_"):
            with pytest.raises(NotImplementedError, match="TODO"):
                exec(source, names)


@pytest.mark.parametrize("swapped", [False, True])
def test_the_eight_tests_print_a_line_each(
    swapped: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    names = namespace()
    lost(names)  # defines the visible tests
    if swapped:
        names["quantize_key_per_channel"] = names["quantize_value_per_token"]
    capsys.readouterr()
    exec(CELLS["given_class"], names)
    *lines, summary = capsys.readouterr().out.splitlines()
    assert len(lines) == 8
    assert sum(line.startswith("passed") for line in lines) == (6 if swapped else 8)
    assert summary == f"{6 if swapped else 8} of 8 passed"


# More mistakes, as edits of the solution: (TODO, what stands there, what a student
# writes, text of the hint).
EDITS = [
    (1, "torch.int8", "torch.int32", "held in int8"),
    (1, "(values / scale)", "(values * 0)", "every code is 0"),
    (1, "return codes", "codes", "returned None"),
    (1, "codes.to(torch.int8), scale", "scale, codes.to(torch.int8)", "The order is"),
    (1, ".amax(", ".mean(", "the mean magnitude"),
    (1, "peak / qmax", "peak", "not divided by qmax"),
    (1, "values / scale", "values * scale", "you multiplied by the scale"),
    (1, "(values / scale)", "(values / scale).abs()", "the sign is lost"),
    (1, "(values / scale)", "(-values / scale)", "the sign is turned"),
    (1, ".round()", ".floor()", "you rounded down"),
    (1, ".round()", ".ceil()", "you rounded up"),
    (1, "dim=2", "dim=(1, 2)", "so you reduced heads and tokens"),
    (1, ".amax(dim=2, keepdim=True)", "", "every value has a scale of its own"),
    (1, "values.abs()", "values[:, :, :1].abs()", "the first value of the channel"),
    (1, "values.abs()", "values[:, :, -1:].abs()", "the last value of the channel"),
    (1, "min=eps", "max=-eps", "finite and above 0"),
    (1, "min=eps", "min=1e-8", "an eps of its own, 1e-08"),
    (1, "key.float()", "key.half().float()", "half precision (use float32)"),
    (1, "clamp(-qmax, qmax)", "clamp(-qmax, 5)", "stops at 5 and not at qmax"),
    (
        3,
        '"total_tokens": quantized',
        '"total": quantized',
        "the state lacks total_tokens",
    ),
    (3, '"value_residual": values', '"value_residual": keys', "holds Keys"),
    (3, "segments, parts", "segments[:3], parts[:3]", "differ in length"),
    (3, "    return lists | {", "    lists |= {", "returned a NoneType"),
    (
        3,
        "lists[name].append(part)",
        "lists[name] += [part] * 2",
        "are one segment together",
    ),
    (3, "quantize_value(values", "quantize_value(keys", "It must hold Values"),
    (3, "if flushed:", "if False:", "holds no segment"),
]


@pytest.mark.parametrize(
    ("todo", "right", "wrong", "hint"), EDITS, ids=[hint for *_, hint in EDITS]
)
def test_an_edit_of_the_solution_reads_its_hint(
    todo: int, right: str, wrong: str, hint: str
) -> None:
    source = CELLS[f"todo_{todo}"]
    assert right in source
    said = lost(namespace({todo: source.replace(right, wrong)}), of=[todo])
    assert any(hint in sentence for sentence in said.values()), said


# --- the checks themselves ------------------------------------------------------------


def solution(name: str) -> Callable[..., Any]:
    """One function of the reference solution."""
    found: Callable[..., Any] = namespace()[name]
    return found


QUANTIZERS = [
    (solution("quantize_key_per_channel"), axes.quantizes_keys),
    (solution("quantize_value_per_token"), axes.quantizes_values),
]
APPEND = solution("append_and_partition")
SIZES = st.tuples(*(st.integers(1, 5) for _ in range(4)))


@pytest.mark.parametrize(("quantize", "check"), QUANTIZERS, ids=["key", "value"])
@settings(max_examples=40, deadline=None)
@given(
    shape=SIZES,
    seed=st.integers(0, 999),
    dtype=st.sampled_from(DTYPES),
    qmax=st.sampled_from([1, 3, 7]),
    zero=st.booleans(),
)
def test_the_definition_passes_on_any_input(
    quantize: Callable[..., Any],
    check: Callable[..., None],
    shape: tuple[int, int, int, int],
    seed: int,
    dtype: torch.dtype,
    qmax: int,
    zero: bool,
) -> None:
    given_tensor = axes.example(*shape, seed=seed, dtype=dtype, zero=zero)
    check(quantize, given_tensor, qmax=qmax)


@pytest.mark.parametrize(("quantize", "check"), QUANTIZERS, ids=["key", "value"])
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 999), place=st.integers(0, 2 * 3 * 4 * 5 - 1), up=st.booleans()
)
def test_one_code_that_is_off_by_one_shows(
    quantize: Callable[..., Any],
    check: Callable[..., None],
    seed: int,
    place: int,
    up: bool,
) -> None:
    def off(held: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scale = quantize(held)
        steps = float((held / scale).flatten()[place])
        # away from the value: the neighbouring code would be as near at a half step
        codes.view(-1)[place] += 1 if codes.flatten()[place] >= steps else -1
        return codes, scale

    with pytest.raises(Wrong):
        check(off, axes.example(2, 3, 4, 5, seed=seed))


@pytest.mark.parametrize(("quantize", "check"), QUANTIZERS, ids=["key", "value"])
@pytest.mark.parametrize("factor", [0.99, 1.01, -1.0, float("nan"), float("inf"), 0.0])
def test_one_scale_that_is_off_shows(
    quantize: Callable[..., Any], check: Callable[..., None], factor: float
) -> None:
    def off(held: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scale = quantize(held)
        scale.view(-1)[-1] *= factor
        return codes, scale

    with pytest.raises(Wrong):
        check(off, axes.example(2, 3, 4, 5, seed=1))


@settings(max_examples=60, deadline=None)
@given(
    arrivals=st.lists(st.integers(1, 9), min_size=1, max_size=9),
    residual=st.integers(1, 12),
)
def test_the_window_passes_for_any_arrivals(arrivals: list[int], residual: int) -> None:
    axes.window(APPEND, arrivals, residual)
    axes.segments(APPEND, arrivals, residual)


@pytest.mark.parametrize(
    "entry", ["key_residual", "value_residual", "key_q_segments", "value_q_segments"]
)
def test_one_value_that_is_off_shows(entry: str) -> None:
    def off(*arguments: Any) -> dict[str, Any]:
        state: dict[str, Any] = APPEND(*arguments)
        held = state[entry] if entry.endswith("residual") else state[entry][-1]
        held.view(-1)[-1] += 1
        return state

    with pytest.raises(Wrong):
        axes.window(off, [5, 2], 3)


@pytest.mark.parametrize("stand_in", [axes._exact, axes.Recorder(1, 2)])
def test_a_stand_in_is_no_answer(stand_in: Callable[..., Any]) -> None:
    for check in (axes.quantizes_keys, axes.quantizes_values):
        with pytest.raises(Wrong):
            check(stand_in, axes.example(2, 3, 4, 5, seed=0))


def test_checks_leave_the_global_seed_alone() -> None:
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    lost(namespace())
    assert torch.equal(torch.rand(3), wanted)


# --- what the prose of the lab claims -------------------------------------------------


def attention_error(layer: int, start: int) -> dict[str, tuple[float, float]]:
    """Error of the attention output in percent, per channel and per token."""
    names = namespace()
    attention, percent, restore = (
        names[name] for name in ("attention", "percent", "restore")
    )
    one = captured.load(layer)
    part = slice(start, start + 64)
    queries, keys, values = (x[:, :, part] for x in (one.queries, one.keys, one.values))
    _, wanted = attention(queries, keys, values)
    near = [
        (restore(*quantize(keys)), restore(*quantize(values)))
        for quantize, _ in QUANTIZERS
    ]
    by_channel, by_token = near
    return {
        "keys": (
            percent(attention(queries, by_channel[0], values)[1], wanted),
            percent(attention(queries, by_token[0], values)[1], wanted),
        ),
        "values": (
            percent(attention(queries, keys, by_channel[1])[1], wanted),
            percent(attention(queries, keys, by_token[1])[1], wanted),
        ),
    }


def test_the_figures_of_section_5_are_those_in_the_prose() -> None:
    first, second = captured.load().layers
    got = attention_error(first, 0)
    assert [round(x) for x in (*got["keys"], *got["values"])] == [16, 42, 28, 14]
    for layer in (first, second):
        for start in (0, 32):
            got = attention_error(layer, start)
            assert got["keys"][0] < got["keys"][1]
            per_channel_wins = (layer, start) == (first, 32)
            assert (got["values"][0] < got["values"][1]) is per_channel_wins
