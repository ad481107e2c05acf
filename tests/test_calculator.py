"""The calculator says what is right, or nothing; it never runs code and always ends."""

from __future__ import annotations

import ast
import threading
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat.inference import calculator
from nanochat.inference.calculator import MAX_DIGITS, MAX_LENGTH, MAX_NESTING, calculate


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("60+33", "93"),
        (" 60 + 33\n", "93"),
        ("10/2", "5"),
        ("7/2", "3.5"),
        ("2.5*2", "5"),
        ("0.1+0.2", "0.3"),
        ("1/3", "0.3333333333333333"),
        ("1/3*3", "1"),
        ("2+3*4-5", "9"),
        ("(2+3)*(4-5)", "-5"),
        ("8/4/2", "1"),
        ("8-4-2", "2"),
        ("-3*-(2)", "6"),
        ("--5", "5"),
        ("0*-1", "0"),
        (".5+5.", "5.5"),
        ("1,234*2", "2468"),
        ("1,234,567.25-0.25", "1234567"),
        ("1/1,000,000,000", "0.000000001"),
        ("99999999999999999999*99999999999999999999", "9999999999999999999800000000000000000001"),
    ],
)
def test_arithmetic_is_exact_and_integers_stay_integers(expression: str, said: str) -> None:
    assert calculate(expression) == said


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("'strawberry'.count('r')", "3"),
        ('"strawberry".count("r")', "3"),
        ("'direct'.count(\"i\")", "1"),
        ("'import __builtins__, exec'.count('e')", "2"),
        ("'1,234,567'.count(',')", "2"),
        ("'a, b, c'.count(', ')", "2"),
        (r"'it\'s'.count('\'')", "1"),
        (r"'it\'s \\ \"so\"'.count('\\')", "1"),
        (r"'tab\tnew\nline'.count('\n')", "1"),
        (r"'\x41\u0041\U00000041'.count('A')", "3"),
        ("'😀 über 日本 日本'.count('日本')", "2"),
        ("'Größe'.count('ß')", "1"),
        ("''.count('a')", "0"),
        ("'Mississippi' . count ( 'ss' )", "2"),
        ("'aaa'.count('a') + 2*(1)", "5"),
    ],
)
def test_counting_works_in_any_string(expression: str, said: str) -> None:
    assert calculate(expression) == said


@pytest.mark.parametrize(
    "expression",
    [
        *(
            "",
            " ",
            "hello",
            "1+",
            "+",
            "(1",
            "1)",
            "()",
            "1 2",
            "(2)(3)",
            "2**3",
            "7//2",
            "7%2",
            "1e5",
            "0x10",
            "1_000",
        ),
        *("1/0", "1/(2-2)", "0/0", "1,23", "12,34", "1,2345", "1,,000", ",5", "1.2.3", "٣+٣", "1+x", "1;2", "1=1"),
        *("'a'", "'a'+'b'", "'a'*3", "'a'.upper()", "'a'.count", "'a'.count()", "'a'.count(1)", "'a'.count('b'", "'a"),
        *(
            "'a'.count('a').real",
            "'a'.counts('a')",
            "'a''b'.count('a')",
            r"'\q'.count('q')",
            r"'\U00110000'.count('a')",
        ),
        *("__import__('os').system('true')", "().__class__", "f'a'.count('a')", "'a'.count(f'a')", "lambda: 1", "[1]"),
        *("9" * (MAX_DIGITS + 1), "*".join(["9" * 31] * 2), "10000000000000000000000000/3"),
        "+".join(["1"] * MAX_LENGTH),
    ],
)
def test_what_cannot_be_evaluated_has_no_value(expression: str) -> None:
    assert calculate(expression) is None


def test_limits_hold_on_both_sides() -> None:
    assert calculate("9" * MAX_DIGITS) == "9" * MAX_DIGITS
    assert calculate("(" * MAX_NESTING + "1" + ")" * MAX_NESTING) == "1"
    assert calculate("(" * (MAX_NESTING + 1) + "1" + ")" * (MAX_NESTING + 1)) is None
    assert calculate("+".join(["1"] * (MAX_LENGTH // 2))) == str(MAX_LENGTH // 2)
    # Side by side is not nested.
    assert calculate("+".join(["(1)"] * (MAX_NESTING + 1))) == str(MAX_NESTING + 1)
    assert calculate("-" * (MAX_LENGTH - 1) + "1") == "-1"


def test_no_intermediate_value_outgrows_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 0
    bounded = calculator._bounded

    def watched(value: Fraction) -> Fraction:
        nonlocal largest
        largest = max(largest, abs(value.numerator), value.denominator)
        return bounded(value)

    monkeypatch.setattr(calculator, "_bounded", watched)
    for operator in "*/":
        assert calculate(operator.join(["987654321.123456789"] * 200)) is None
    assert largest < 10 ** (2 * MAX_DIGITS)


def test_it_works_in_any_thread() -> None:
    found: list[str | None] = []
    thread = threading.Thread(target=lambda: found.append(calculate("'banana'.count('a')")))
    thread.start()
    thread.join()
    assert found == ["3"]


def test_it_evaluates_nothing_as_code() -> None:
    names = {node.id for node in ast.walk(ast.parse(Path(calculator.__file__).read_text())) if type(node) is ast.Name}
    assert not names & {"eval", "exec", "compile", "ast", "__import__", "getattr", "signal"}


NUMBERS = st.integers(0, 10**6).map(str) | st.decimals(0, 1000, places=3).map(str)
EXPRESSIONS = st.recursive(
    NUMBERS,
    lambda inner: st.tuples(inner, st.sampled_from(["+", "-", "*", " / "]), inner).map(lambda p: f"({''.join(p)})"),
    max_leaves=8,
)


@settings(deadline=None)
@given(EXPRESSIONS)
def test_values_are_those_of_exact_fractions(expression: str) -> None:
    as_fractions = ast.unparse(_Exact().visit(ast.parse(expression, mode="eval")))
    try:
        exact = eval(as_fractions, {"Fraction": Fraction})
    except ZeroDivisionError:
        exact = None
    said = calculate(expression)
    if said is None:
        limit = 10**17
        assert exact is None or max(abs(exact.numerator), exact.denominator) > limit
    elif exact.denominator == 1:
        assert said == str(exact)
    else:
        assert float(said) == float(exact)
        assert "e" not in said


class _Exact(ast.NodeTransformer):
    """Every number as a fraction of its text."""

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        return ast.parse(f"Fraction({str(node.value)!r})", mode="eval").body


@settings(deadline=None)
@given(st.text(max_size=40), st.text(min_size=1, max_size=3))
def test_counts_are_those_of_python(text: str, sought: str) -> None:
    assert calculate(f"{_quoted(text)}.count({_quoted(sought)})") == str(text.count(sought))


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


@settings(deadline=None)
@given(st.text(alphabet="0123456789.,+-*/()'\"\\ count\n", max_size=60))
def test_any_text_ends_in_a_value_or_none(text: str) -> None:
    said = calculate(text)
    assert said is None or float(said) == float(said)
