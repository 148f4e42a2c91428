# %% [markdown] lang="en"
# # Lab 01 · Tiny
#
# Three TODOs without torch, so that a kernel is up in a second.

# %% nbgrader={"grade_id": "given_checks", "locked": true}
import contextlib


class Wrong(AssertionError):
    """Like kvlab.checks.Wrong."""

    def _render_traceback_(self):
        return [str(self)]


class checks:
    """Like kvlab.checks, as far as this lab needs it."""

    @staticmethod
    @contextlib.contextmanager
    def todo(number):
        try:
            yield
        except Wrong as error:
            raise Wrong(f"TODO {number} wrong: {error}") from None

    @staticmethod
    def expect(condition, sentence):
        if not condition:
            raise Wrong(sentence)


# %% [markdown] lang="en"
# ## TODO 1 · Double


# %% nbgrader={"grade_id": "todo_1", "solution": true} todo="TODO 1: double a number"
def double(number):
    """Twice the number."""
    # 1. refuse text
    # 2. double it
    ### BEGIN SOLUTION
    if isinstance(number, str):
        raise ValueError(f"number is text: {number!r}")
    return 2 * number
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_todo_1", "grade": true, "points": 6}
def test_small_number_is_doubled():
    checks.expect(double(2) == 4, "double(2) is not twice 2.")


with checks.todo(1):
    test_small_number_is_doubled()
    ### BEGIN HIDDEN TESTS
    secret_number = 1234567
    checks.expect(double(secret_number) == 2469134, "a large number is not doubled.")
    ### END HIDDEN TESTS


# %% nbgrader={"grade_id": "test_todo_1_errors", "grade": true, "points": 2}
with checks.todo(1):
    double(1)
    ### BEGIN HIDDEN TESTS
    try:
        double("a")
    except ValueError:
        pass
    else:
        checks.expect(False, "text was not refused.")
    ### END HIDDEN TESTS


# %% [markdown] lang="en"
# ## TODO 2 · Add one


# %% nbgrader={"grade_id": "todo_2", "solution": true} todo="TODO 2: add one"
def add_one(number):
    """The number after this one."""
    ### BEGIN SOLUTION
    return number + 1
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_todo_2", "grade": true, "points": 6}
def test_one_is_added():
    checks.expect(add_one(1) == 2, "add_one(1) is not 2.")


with checks.todo(2):
    test_one_is_added()
    ### BEGIN HIDDEN TESTS
    checks.expect(add_one(7) == 8, "add_one(7) is not 8.")
    ### END HIDDEN TESTS


# %% [markdown] lang="en"
# ## TODO 3 · Tell even from odd


# %% nbgrader={"grade_id": "todo_3", "solution": true} todo="TODO 3: tell even from odd"
def is_even(number):
    """Whether two divides the number."""
    ### BEGIN SOLUTION
    return number % 2 == 0
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_todo_3", "grade": true, "points": 6}
def test_two_is_even():
    checks.expect(is_even(2), "2 is even.")


with checks.todo(3):
    test_two_is_even()
    ### BEGIN HIDDEN TESTS
    checks.expect(not is_even(5), "5 is odd.")
    ### END HIDDEN TESTS


# %% [markdown] lang="en"
# ## Written question
#
# Why is zero even?

# %% [markdown] lang="en" nbgrader={"grade_id": "written_1", "grade": true, "solution": true, "points": 2}
# <!-- BEGIN SOLUTION -->
# Two divides it. **Rubric:** two points for that.
# <!-- END SOLUTION -->
