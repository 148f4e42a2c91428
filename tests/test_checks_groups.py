"""The checks of lab 04 name the known mistakes and let every right variant pass.

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
from kvlab.checks import Wrong, groups

ROOT = Path(__file__).parent.parent
LAB = "04_packed_groups"
ANSWERS = ROOT / "tests" / "answers" / LAB
TODOS = {
    1: ("pack", "unpack"),
    2: ("quantize_key_groups", "quantize_value_groups"),
    3: ("append_by_groups",),
    4: ("stored_bytes", "times_smaller"),
}
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def _cells() -> dict[str, str]:
    notebook = nbformat.read(ROOT / "solutions" / LAB / f"{LAB}.ipynb", as_version=4)
    return {c.id: c.source for c in notebook.cells if c.cell_type == "code"}


CELLS = _cells()


def namespace(answers: dict[int, str] | None = None) -> dict[str, Any]:
    """The names of the notebook after its locked cells and the four answers."""
    names: dict[str, Any] = {"__name__": "__main__"}
    todos = {n: CELLS[f"todo_{n}"] for n in TODOS} | (answers or {})
    with contextlib.redirect_stdout(io.StringIO()):
        for cell in ("setup", "given_imports"):
            exec(CELLS[cell], names)
    given = [source for cell, source in CELLS.items() if cell.startswith("given_")]
    for source in (*todos.values(), *given):
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
    prefix = f"TODO {header(text, 'todo')} wrong: "
    hints = [sentence for sentence in said.values() if sentence.startswith(prefix)]
    assert header(text, "hint") in hints[0]


@pytest.mark.parametrize("file", RIGHT, ids=names_of(RIGHT))
def test_a_right_answer_written_another_way_passes(file: Path) -> None:
    answers = parts(file.read_text(encoding="utf-8"))
    assert lost(namespace(answers), of=answers) == {}


def test_swapping_the_two_directions_costs_todo_2_alone() -> None:
    names = namespace()
    key = names["quantize_key_groups"]
    names["quantize_key_groups"] = names["quantize_value_groups"]
    names["quantize_value_groups"] = key
    said = lost(names)
    assert "so you grouped along head_dim" in said["test_todo_2"]
    assert "so you grouped along tokens" in said["test_todo_2_values"]
    assert all(cell.startswith("test_todo_2") for cell in said)


def stubs(number: int) -> str:
    return "\n".join(
        f"def {function}(*args, **named):\n"
        f"    raise NotImplementedError('TODO {number}: later')"
        for function in TODOS[number]
    )


def test_the_empty_notebook_is_not_attempted() -> None:
    names = namespace({number: stubs(number) for number in TODOS})
    for cell, source in CELLS.items():
        if cell.startswith("test_todo_"):
            with pytest.raises(NotImplementedError, match="TODO"):
                exec(source, names)


@pytest.mark.parametrize("missing", TODOS)
def test_a_missing_todo_costs_no_other(missing: int) -> None:
    said = lost(namespace({missing: stubs(missing)}))
    own = [cell for cell in CELLS if cell.startswith(f"test_todo_{missing}")]
    assert sorted(said) == sorted(own)


@pytest.mark.parametrize("number", TODOS)
def test_a_function_that_returns_none_earns_nothing(number: int) -> None:
    nothing = "\n".join(f"def {f}(*args, **named):\n    pass" for f in TODOS[number])
    said = lost(namespace({number: nothing}))
    own = [cell for cell in CELLS if cell.startswith(f"test_todo_{number}")]
    assert sorted(said) == sorted(own)
    assert all(text.startswith(f"TODO {number} wrong") for text in said.values()), said


# More mistakes, as edits of the solution: (TODO, what stands there, what a student
# writes, text of the hint).
EDITS = [
    (1, "    return packed", "    packed", "It must return a tensor"),
    (1, "torch.stack(parts, dim=-1).flatten(-2)", "parts[0]", "has shape"),
    (1, ".flatten(-2)[..., :length]", "", "are not joined"),
    (2, "return codes.flatten(2, 3)", "codes.flatten(2, 3)", "returned None"),
    (2, "steps.round()", "(0 * steps)", "every code is 0"),
    (2, "steps.round()", "(largest - steps.round())", "count down from the largest"),
    (2, "groups.amin(dim=3", "groups.mean(dim=3", "it is the mean"),
    (2, "groups.amin(dim=4", "groups.abs().amin(dim=4", "the smallest magnitude"),
    (2, "torch.uint8", "torch.int32", "held in uint8"),
    (2, "/ largest)", "/ (largest - 1))", "you divided by 14"),
    (2, "scale.squeeze(3)", "scale.squeeze(3).bfloat16()", "stored in float16"),
    (2, "/ scale.float()", "* scale.float()", "you multiplied by the scale"),
    (3, '"total_tokens": quantized', '"total": quantized', "lacks total_tokens"),
    (3, "zip(segments, parts, strict=True)", "zip(segments, parts[:5])", "differ in"),
    (3, "    return lists | {", "    lists |= {", "returned a NoneType"),
    (
        3,
        "lists[name].append(part)",
        "lists[name] += [part] * 2",
        "are one segment together",
    ),
    (3, "quantize_value(values", "quantize_value(keys", "It must hold Values"),
    (3, '"quantized_tokens": quantized +', '"quantized_tokens":', "of this call only"),
    (4, "return ledger", "return list(ledger)", "a dict of four parts"),
    (4, 'for side in ("key", "value")', 'for side in ("value",)', "the Values only"),
    (4, "return 2 * values /", "return 200 * values /", "it is a percentage"),
    (4, "2 * batch * heads", "heads", "times_smaller gave"),
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


PACK, UNPACK = solution("pack"), solution("unpack")
APPEND = solution("append_by_groups")
KEY, VALUE = solution("quantize_key_groups"), solution("quantize_value_groups")
QUANTIZERS = [
    (KEY, groups.quantizes_keys, groups.nearest_keys, groups.TOKENS),
    (VALUE, groups.quantizes_values, groups.nearest_values, groups.HEAD_DIM),
]
AXES = ["key", "value"]


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    bits=st.sampled_from([2, 4, 8]),
    seed=st.integers(0, 999),
)
def test_packing_passes_on_any_shape(shape: list[int], bits: int, seed: int) -> None:
    codes = groups.some_codes(*shape, bits=bits, seed=seed)
    groups.round_trip(PACK, UNPACK, codes, bits)


@settings(max_examples=60, deadline=None)
@given(bit=st.integers(0, 2 * 3 * 4 * 8 - 1), bits=st.sampled_from([2, 4, 8]))
def test_one_wrong_bit_shows(bit: int, bits: int) -> None:
    codes = groups.some_codes(2, 3, 3 * 8 // bits + 1, bits=bits, seed=bit)

    def off(held: torch.Tensor, width: int) -> torch.Tensor:
        packed: torch.Tensor = PACK(held, width)
        packed.view(-1)[bit // 8] ^= 1 << (bit % 8)
        return packed

    with pytest.raises(Wrong):
        groups.packs(off, codes, bits)


@settings(max_examples=40, deadline=None)
@given(place=st.integers(0, 2 * 3 * 5 - 1), bits=st.sampled_from([2, 4, 8]))
def test_one_wrong_code_shows(place: int, bits: int) -> None:
    packed = groups.some_codes(2, 3, -(-5 * bits // 8), bits=8, seed=place)

    def off(held: torch.Tensor, width: int, length: int) -> torch.Tensor:
        codes: torch.Tensor = UNPACK(held, width, length).contiguous()
        codes.view(-1)[place] ^= 1
        return codes

    with pytest.raises(Wrong):
        groups.unpacks(off, packed, bits, 5)


@pytest.mark.parametrize(("quantize", "check", "nearest", "axis"), QUANTIZERS, ids=AXES)
@settings(max_examples=40, deadline=None)
@given(
    shape=st.tuples(*(st.integers(1, 4) for _ in range(4))),
    group_size=st.integers(1, 5),
    seed=st.integers(0, 999),
    dtype=st.sampled_from(DTYPES),
    bits=st.sampled_from([2, 4, 8]),
    shift=st.sampled_from([0.0, -7.3, 300.0]),
    eps=st.sampled_from([1e-6, 1e-4, 0.02]),
)
def test_the_definition_passes_on_any_input(
    quantize: Callable[..., Any],
    check: Callable[..., None],
    nearest: Callable[..., None],
    axis: int,
    shape: tuple[int, int, int, int],
    group_size: int,
    seed: int,
    dtype: torch.dtype,
    bits: int,
    shift: float,
    eps: float,
) -> None:
    sizes = [n * group_size if a == axis else n for a, n in enumerate(shape)]
    held = (groups.example(*sizes, seed=seed) + shift).to(dtype)
    check(quantize, held, bits, group_size, eps=eps)
    nearest(quantize, held, bits, group_size)


@pytest.mark.parametrize(("quantize", "check", "nearest", "axis"), QUANTIZERS, ids=AXES)
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 999),
    place=st.integers(0, 2 * 3 * 4 * 6 - 1),
    bits=st.sampled_from([2, 4]),
)
def test_one_code_that_is_off_by_one_shows(
    quantize: Callable[..., Any],
    check: Callable[..., None],
    nearest: Callable[..., None],
    axis: int,
    seed: int,
    place: int,
    bits: int,
) -> None:
    given_tensor = groups.example(2, 3, 4, 6, seed=seed)
    size = 4 if axis == groups.TOKENS else 6

    def off(held: torch.Tensor, *settings: Any) -> tuple[torch.Tensor, ...]:
        codes, scale, minimum = quantize(held, *settings)
        step, low = (
            float(part.repeat_interleave(size, axis).flatten()[place])
            for part in (scale, minimum)
        )
        value = float(held.flatten()[place])
        code = int(codes.flatten()[place])
        # away from the value: the neighbouring code would be as near at a half step
        up = code == 0 or (code < 2**bits - 1 and code * step + low >= value)
        codes.view(-1)[place] += 1 if up else -1
        return codes, scale, minimum

    with pytest.raises(Wrong):
        nearest(off, given_tensor, bits, size)


@pytest.mark.parametrize(("quantize", "check", "nearest", "axis"), QUANTIZERS, ids=AXES)
@pytest.mark.parametrize("part", [1, 2])
@pytest.mark.parametrize("factor", [0.99, 1.01, -1.0, float("nan"), float("inf"), 0.0])
def test_one_scale_or_minimum_that_is_off_shows(
    quantize: Callable[..., Any],
    check: Callable[..., None],
    nearest: Callable[..., None],
    axis: int,
    part: int,
    factor: float,
) -> None:
    def off(held: torch.Tensor, *settings: Any) -> list[torch.Tensor]:
        answer = list(quantize(held, *settings))
        answer[part] = answer[part].contiguous()
        answer[part].view(-1)[-1] *= factor
        return answer

    with pytest.raises(Wrong):
        check(off, groups.example(2, 3, 4, 8, seed=1), 4, 4)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(("quantize", "axis"), [(KEY, 2), (VALUE, 3)], ids=AXES)
def test_the_bound_that_the_prose_teaches_holds(
    bits: int, quantize: Callable[..., Any], axis: int
) -> None:
    """Half a step between the two ends; beyond them what rounding has moved them."""
    restore = solution("restore")
    for seed in range(20):
        for shift in (0.0, 0.01, 30.0, -900.0):
            held = groups.example(2, 3, 8, 16, seed=seed) + shift
            codes, scale, minimum = quantize(held, bits, 8)
            error = (restore(codes, scale, minimum) - held).abs().double()
            step, low = (
                part.double().repeat_interleave(8, axis) for part in (scale, minimum)
            )
            largest = 2**bits - 1
            high = low + largest * step
            inside = (held >= low) & (held <= high)
            rounding = 2**-20 * (low.abs() + high.abs())  # float32 on the way
            assert bool((error <= step / 2 + rounding)[inside].all())
            # |m| and |s| are rounded ones here; the true ones are 1/2048 larger at most.
            moved = (low.abs() + largest * step) / 2047 + 2**-24 * (1 + largest)
            assert bool((error <= moved + rounding)[~inside].all())


@settings(max_examples=60, deadline=None)
@given(
    arrivals=st.lists(st.integers(1, 9), min_size=1, max_size=9),
    residual=st.integers(1, 8),
    group_size=st.integers(1, 6),
)
def test_the_window_passes_for_any_arrivals(
    arrivals: list[int], residual: int, group_size: int
) -> None:
    groups.window(APPEND, arrivals, residual, group_size)
    groups.segments(APPEND, arrivals, residual, group_size)


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
        groups.window(off, [5, 2], 2, 3)


@pytest.mark.parametrize("entry", groups.LISTS)
def test_one_number_of_an_earlier_segment_that_changes_shows(entry: str) -> None:
    def off(state: Any, *arguments: Any) -> dict[str, Any]:
        following: dict[str, Any] = APPEND(state, *arguments)
        if state is not None:
            following[entry][0] = following[entry][0] + 1
        return following

    with pytest.raises(Wrong):
        groups.segments(off, [5, 3], 2, 3)


@pytest.mark.parametrize("stand_in", [groups._exact, groups.Recorder(1)])
def test_a_stand_in_is_no_answer(stand_in: Callable[..., Any]) -> None:
    for check in (groups.quantizes_keys, groups.quantizes_values):
        with pytest.raises(Wrong):
            check(
                lambda held, *_: stand_in(held),
                groups.example(2, 3, 4, 8, seed=0),
                4,
                4,
            )


def test_checks_leave_the_global_seed_alone() -> None:
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    lost(namespace())
    assert torch.equal(torch.rand(3), wanted)


# --- what the prose of the lab claims -------------------------------------------------


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    return namespace()


@pytest.mark.parametrize(
    ("layer", "keys", "values"),
    [(0, (7.4, 14.3), (7.2, 22.7)), (1, (13.7, 13.9), (7, 32))],
)
def test_the_errors_by_direction_are_those_in_the_prose(
    layer: int,
    keys: tuple[float, float],
    values: tuple[float, float],
    names: dict[str, Any],
) -> None:
    """(Keys along tokens, along head_dim), (Values along head_dim, along tokens)."""
    one = captured.load(captured.load().layers[layer])
    queries, key, value = (x[:, :, :64] for x in (one.queries, one.keys, one.values))
    output = names["attention"](queries, key, value)

    def error(near_key: torch.Tensor, near_value: torch.Tensor) -> float:
        moved = names["attention"](queries, near_key, near_value)
        return float(names["percent"](moved, output))

    restore = names["restore"]
    for quantize, wanted in zip((KEY, VALUE), keys, strict=True):
        assert error(restore(*quantize(key, 4, 32)), value) == pytest.approx(
            wanted, abs=0.5
        )
    for quantize, wanted in zip((VALUE, KEY), values, strict=True):
        assert error(key, restore(*quantize(value, 4, 32))) == pytest.approx(
            wanted, abs=0.5
        )


@pytest.mark.parametrize(
    ("layer", "wanted"),
    [
        (0, {(2, 8): 32, (4, 4): 3, (4, 16): 8, (4, 64): 13}),
        (1, {(2, 8): 47, (4, 16): 16, (4, 32): 16}),
    ],
)
def test_the_errors_by_size_are_those_in_the_prose(
    layer: int, wanted: dict[tuple[int, int], int], names: dict[str, Any]
) -> None:
    one = captured.load(captured.load().layers[layer])
    queries, key, value = (x[:, :, :64] for x in (one.queries, one.keys, one.values))
    output = names["attention"](queries, key, value)
    for (bits, size), percent in wanted.items():
        near = [
            names["restore"](*quantize(held, bits, size))
            for quantize, held in ((KEY, key), (VALUE, value))
        ]
        moved = names["attention"](queries, *near)
        assert float(names["percent"](moved, output)) == pytest.approx(percent, abs=0.5)


def test_the_bill_is_the_one_in_the_prose(names: dict[str, Any]) -> None:
    """KiB after 96 tokens: 88 with groups of one, 32 with groups of 16; float16 has 72."""
    kv = captured.load()
    keys, values = kv.keys.half(), kv.values.half()
    assert round((keys.nbytes + values.nbytes) / 1024) == 72
    for size, wanted in ((1, 88), (16, 32)):
        quantizers = (
            names["with_packing"](KEY, 4, size),
            names["with_packing"](VALUE, 4, 64),
        )
        state = None
        for first, last in [(0, 32)] + [(t, t + 1) for t in range(32, 96)]:
            new = keys[:, :, first:last], values[:, :, first:last]
            state = APPEND(state, *new, 16, size, *quantizers)
        assert round(sum(names["stored_bytes"](state).values()) / 1024) == wanted
        for side, held in (("key", keys), ("value", values)):
            read = names["read"](state, side, 4)
            assert read.shape == held.shape
            assert torch.equal(read[:, :, 80:], held[:, :, 80:].float())


@pytest.mark.parametrize(("rounds", "wanted"), [(1, 1.92), (64, 3.46)])
def test_the_ratio_grows_towards_the_closed_form(
    rounds: int, wanted: float, names: dict[str, Any]
) -> None:
    kv = captured.load()
    quantizers = (
        names["with_packing"](KEY, 4, 64),
        names["with_packing"](VALUE, 4, 64),
    )
    state = None
    for _ in range(rounds):
        state = APPEND(state, kv.keys.half(), kv.values.half(), 32, 64, *quantizers)
    assert names["times_smaller"](state) == pytest.approx(wanted, abs=0.005)
    assert names["times_smaller"](state) < 16 / 4.5
