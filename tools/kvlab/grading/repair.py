"""Makes a damaged student notebook fit for nbgrader again, as far as the student's own cells allow.

Called by `RepairCells` inside nbgrader, and by `intake` to recognise a renamed notebook.
Never runs a cell, never changes an answer, and says in one sentence what it did.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Sequence

import nbformat
from nbformat import NotebookNode
from nbformat.validator import normalize

from kvlab.grading.released import ReleasedCell, defined_names

ALIKE = 0.6  # how similar (difflib) an edited test cell must be to the released one
CELL_ID = re.compile(r"^[a-zA-Z0-9_-]{1,64}$")
Claims = dict[str, int]  # grade_id -> index of the student's cell that is this cell


def repair(notebook: NotebookNode, released: list[ReleasedCell]) -> list[str]:
    """Changes the notebook in place; returns one sentence for each thing repaired.

    released  the marked cells of the lab, in order
    """
    notes: list[str] = []
    _note_old_format(notebook, notes)
    _replace_surrogates(notebook, notes)
    _drop_unknown_keys(notebook)
    for cell in notebook.cells:
        _complete(cell)
    _drop_copies(notebook, released, notes)
    claims = whose_cells(notebook, released)
    _restore_marks(notebook, released, claims, notes)
    _restore_types(notebook, released, claims, notes)
    _put_back_missing(notebook, released, claims, notes)
    _move_below_answers(notebook, released, notes)
    _note_edits(notebook, released, notes)
    _set_cell_ids(notebook)
    _drop_invalid_metadata(notebook, notes)
    return notes


# --- which cell is which --------------------------------------------------------------


def whose_cells(notebook: NotebookNode, released: list[ReleasedCell]) -> Claims:
    """For each released cell that can be recognised, the student's cell it became.

    The surest sign goes first: nbgrader's own mark, then the cell's id, then its text,
    then the names it defines, then the text above it, then likeness.
    """
    claims: Claims = {}
    signs: list[Callable[[NotebookNode, int, ReleasedCell], bool]] = [
        lambda nb, i, cell: mark_of(nb.cells[i]) == cell.grade_id,
        lambda nb, i, cell: cell.grade_id in _ids(nb.cells[i]),
        lambda nb, i, cell: cell.locked and _same_text(nb.cells[i].source, cell),
        lambda nb, i, cell: _names_its_todo(nb.cells[i].source, cell),
        lambda nb, i, cell: bool(cell.names & defined_names(nb.cells[i].source)),
        lambda nb, i, cell: _is_written_below(nb, i, cell),
        lambda nb, i, cell: (
            cell.is_test and _likeness(nb.cells[i].source, cell) > ALIKE
        ),
    ]
    known = {cell.grade_id for cell in released}
    for is_it in signs:
        for cell in released:
            taken = set(claims.values())
            others = known - {cell.grade_id}
            free = (
                i
                for i, own in enumerate(notebook.cells)
                if i not in taken and mark_of(own) not in others
            )
            if cell.grade_id not in claims:
                found = next((i for i in free if is_it(notebook, i, cell)), None)
                if found is not None:
                    claims[cell.grade_id] = found
    return claims


def mark_of(cell: NotebookNode) -> str | None:
    """The grade_id in a cell's nbgrader metadata, or None."""
    marks = cell.get("metadata", {}).get("nbgrader")
    grade_id = marks.get("grade_id") if isinstance(marks, dict) else None
    return grade_id if isinstance(grade_id, str) and grade_id else None


def _ids(cell: NotebookNode) -> set[str]:
    """A cell's id, and the one that Colab moves into the metadata."""
    return {str(cell.get("id", "")), str(cell.metadata.get("id", ""))}


def _plain(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip().split("\n"))


def _same_text(source: str, cell: ReleasedCell) -> bool:
    """Whether it is the released text, with or without the hidden tests."""
    return _plain(source) in (_plain(cell.visible), _plain(cell.source))


def _names_its_todo(source: str, cell: ReleasedCell) -> bool:
    """Whether the line `raise NotImplementedError("TODO n: ...")` is still there."""
    if not cell.solution or cell.cell_type != "code":
        return False
    line = re.search(r"raise NotImplementedError\(.*\)", cell.source)
    return line is not None and line.group() in source


def _is_written_below(notebook: NotebookNode, index: int, cell: ReleasedCell) -> bool:
    """Whether a written answer stands here: right below its question."""
    written = cell.solution and cell.cell_type == "markdown"
    if not written or not cell.above.strip() or index == 0:
        return False
    return _plain(notebook.cells[index - 1].source) == _plain(cell.above)


def _likeness(source: str, cell: ReleasedCell) -> float:
    return difflib.SequenceMatcher(None, _plain(source), _plain(cell.visible)).ratio()


# --- the repairs, in the order they are made ------------------------------------------


def _note_old_format(notebook: NotebookNode, notes: list[str]) -> None:
    old = notebook.metadata.get("orig_nbformat", 4)
    if old != 4:
        notes.append(f"The file was in notebook format {old}; it was read as format 4.")


def _replace_surrogates(notebook: NotebookNode, notes: list[str]) -> None:
    """Halves of characters, which JSON can hold and no file in UTF-8 can."""
    text = json.dumps(notebook, ensure_ascii=False)
    whole = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if whole != text:
        clean = nbformat.from_dict(json.loads(whole))
        notebook.clear()
        notebook.update(clean)
        notes.append("Broken characters were replaced by \ufffd.")


def _drop_unknown_keys(notebook: NotebookNode) -> None:
    for key in notebook.keys() - {"cells", "metadata", "nbformat", "nbformat_minor"}:
        del notebook[key]
    if not isinstance(notebook.metadata.get("kvlab", {}), dict):
        del notebook.metadata["kvlab"]


def _drop_invalid_metadata(notebook: NotebookNode, notes: list[str]) -> None:
    changes, valid = normalize(notebook, strip_invalid_metadata=True)
    if changes:
        notebook["metadata"] = valid.metadata
        for cell, fixed in zip(notebook.cells, valid.cells, strict=True):
            cell["metadata"] = fixed.metadata
        notes.append("Metadata that the notebook format does not allow was dropped.")


KEYS_OF_A_CELL = {
    "attachments",
    "cell_type",
    "execution_count",
    "id",
    "metadata",
    "outputs",
    "source",
}


def _complete(cell: NotebookNode) -> None:
    """Fills in what every cell must have, and drops what the format does not know."""
    for key in cell.keys() - KEYS_OF_A_CELL:
        del cell[key]
    cell.setdefault("metadata", NotebookNode())
    cell.setdefault("source", "")
    if cell.cell_type not in ("code", "markdown", "raw"):
        cell["cell_type"] = "markdown"
    if cell.cell_type == "code":
        cell.setdefault("outputs", [])
        cell["execution_count"] = None
        cell.pop("attachments", None)
    else:
        cell.pop("outputs", None)
        cell.pop("execution_count", None)


def _drop_copies(
    notebook: NotebookNode, released: list[ReleasedCell], notes: list[str]
) -> None:
    """Leaves one cell for each grade_id: the one with an answer, in the lab's order.

    A copy with an answer of its own stays and runs, as the student's own cell.
    """
    last = -1
    for cell in released:
        places = [
            i for i, c in enumerate(notebook.cells) if mark_of(c) == cell.grade_id
        ]
        if len(places) < 2:
            last = places[0] if places else last
            continue
        answered = [i for i in places if not _same_text(notebook.cells[i].source, cell)]
        best = (cell.solution and answered) or places
        keep = next((i for i in best if i > last), best[-1])
        notes.append(
            f"{_upper(cell.called)} was there {len(places)} times; "
            + ("the one with an answer counts." if cell.solution else "one counts.")
        )
        gone = []
        for i in places:
            if i != keep and cell.solution and i in answered:
                del notebook.cells[i].metadata["nbgrader"]
                notebook.cells[i]["id"] = nbformat.v4.new_code_cell()["id"]
            elif i != keep:
                gone.append(i)
        last = keep - sum(i < keep for i in gone)
        notebook.cells = [c for i, c in enumerate(notebook.cells) if i not in gone]


def _restore_marks(
    notebook: NotebookNode,
    released: list[ReleasedCell],
    claims: Claims,
    notes: list[str],
) -> None:
    """Every recognised cell gets its marks as released; no other cell has any."""
    lost = []
    for cell in released:
        if cell.grade_id in claims:
            own = notebook.cells[claims[cell.grade_id]]
            if mark_of(own) != cell.grade_id:
                lost.append(cell.grade_id)
            own.metadata["nbgrader"] = NotebookNode(cell.marks)
    for index, own in enumerate(notebook.cells):
        if index not in claims.values():
            own.metadata.pop("nbgrader", None)
    if lost:
        cells = "cell" if len(lost) == 1 else "cells"
        notes.append(
            f"nbgrader's marks were missing from {len(lost)} {cells} "
            f"({_listed(lost)}); they were put back."
        )


def _restore_types(
    notebook: NotebookNode,
    released: list[ReleasedCell],
    claims: Claims,
    notes: list[str],
) -> None:
    for cell in released:
        if cell.grade_id not in claims:
            continue
        own = notebook.cells[claims[cell.grade_id]]
        if own.cell_type != cell.cell_type:
            notes.append(
                f"{_upper(cell.called)} had become a {own.cell_type} cell; "
                f"it is a {cell.cell_type} cell again."
            )
            own["cell_type"] = cell.cell_type
            own.pop("attachments", None)
            _complete(own)


def _put_back_missing(
    notebook: NotebookNode,
    released: list[ReleasedCell],
    claims: Claims,
    notes: list[str],
) -> None:
    """Puts every deleted cell back below the marked cell that precedes it in the lab."""
    missing = [cell for cell in released if cell.grade_id not in claims]
    place = min(claims.values(), default=len(notebook.cells))
    for cell in released:
        if cell in missing:
            notebook.cells.insert(place, _as_released(cell))
            place += 1
        else:
            place = _place_of(notebook, cell.grade_id) + 1
    if released and not claims:
        notes.append(
            "No cell of this lab was found in the notebook: is it the right file?"
        )
        return
    for cell in missing:
        if cell.solution:
            notes.append(f"{_upper(cell.called)} was missing, so it is not answered.")
    others = [cell.called for cell in missing if not cell.solution]
    if others:
        verb = "was" if len(others) == 1 else "were"
        notes.append(f"{_upper(_listed(others))} {verb} missing and put back.")


def _as_released(cell: ReleasedCell) -> NotebookNode:
    new = {
        "code": nbformat.v4.new_code_cell,
        "markdown": nbformat.v4.new_markdown_cell,
    }[cell.cell_type]
    return new(source=cell.source, metadata={"nbgrader": cell.marks})


def _move_below_answers(
    notebook: NotebookNode, released: list[ReleasedCell], notes: list[str]
) -> None:
    """A test cell that stands above a cell it needs goes right below that cell."""
    for at, cell in enumerate(released):
        if not cell.is_test:
            continue
        needed = [
            _place_of(notebook, earlier.grade_id)
            for earlier in released[:at]
            if earlier.cell_type == "code"
            and not earlier.is_test
            and (earlier.todo == cell.todo or not earlier.solution)
        ]
        place = _place_of(notebook, cell.grade_id)
        if needed and place < max(needed):
            notebook.cells.insert(max(needed), notebook.cells.pop(place))
            notes.append(
                f"{_upper(cell.called)} stood above its answer; it was moved below it."
            )


def _note_edits(
    notebook: NotebookNode, released: list[ReleasedCell], notes: list[str]
) -> None:
    """Says which locked cells differ; nbgrader itself writes the original over them."""
    for cell in released:
        own = notebook.cells[_place_of(notebook, cell.grade_id)]
        if cell.locked and not _same_text(own.source, cell):
            notes.append(
                f"{_upper(cell.called)} had been changed; the original was used."
            )


def _set_cell_ids(notebook: NotebookNode) -> None:
    """Unique ids that the format allows: a marked cell is called by its grade_id."""
    notebook["nbformat"], notebook["nbformat_minor"] = 4, 5
    taken: set[str] = {
        grade_id for grade_id in map(mark_of, notebook.cells) if grade_id
    }
    for cell in notebook.cells:
        name = mark_of(cell)
        if name is None:
            name = str(cell.get("id", ""))
            while name in taken or not CELL_ID.match(name):
                name = nbformat.v4.new_code_cell()["id"]
            taken.add(name)
        cell["id"] = name


def _place_of(notebook: NotebookNode, grade_id: str) -> int:
    return next(i for i, c in enumerate(notebook.cells) if mark_of(c) == grade_id)


def _listed(names: Sequence[str], most: int = 4) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def _upper(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]
