"""`make bench GRADING=1`: both ways of grading run, on a small lab, and agree on honest work."""

from __future__ import annotations

from pathlib import Path

import grading_bench
import nbformat
import pytest
from classroom import write

from kvlab import course
from kvlab.course import Lab


def test_plain_nbgrader_and_ours_are_timed_and_agree(
    own_course: Path, tiny_lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(own_course)
    for student, notebook in (("a", tiny_lab.solution), ("b", tiny_lab.release)):
        made = nbformat.read(notebook, as_version=4)
        folder = own_course / "submitted" / student / tiny_lab.name
        write(folder / f"{tiny_lab.name}.ipynb", made)
    (own,) = course.find_labs(own_course)
    plain = grading_bench.plain(own_course, [own])
    ours = grading_bench.ours(own_course, 1)
    assert plain.scores == ours.scores
    assert plain.scores == {("a", tiny_lab.name): 20, ("b", tiny_lab.name): 0}
    assert ours.states == {"graded": 2}
    assert min(plain.seconds, ours.seconds - ours.spent, ours.spent) > 0
    assert min(plain.memory_bytes, ours.memory_bytes) > 2**20


def test_hostile_answers_of_a_lab_join_the_class(tmp_path: Path) -> None:
    (lab,) = course.choose_labs(grading_bench.ROOT, "03_kv_axes_and_window")
    students = grading_bench.hand_in_hostile(tmp_path, lab)
    handed_in = {path.name for path in (tmp_path / "submitted").iterdir()}
    assert set(students) == handed_in
    assert {"hostile changes_its_answer_later", "hostile leaves_a_daemon"} <= handed_in
