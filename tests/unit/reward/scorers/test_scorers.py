import numbers
import re
from pathlib import Path

import pytest

from services.common.config import ScorerConfig
from services.common.errors import InvalidData
from services.reward.scorers import labels, load_scorer
from services.reward.scorers.types import ScorerFailure, is_deterministic

README = Path(__file__).parents[4] / "README.md"
GARBAGE = ["", " ", "\x00", "🙂🙂", "((((", "$\\frac{", "\\boxed{}", "NaN", "None", "{", "1/0"]


def scorer(name, **options):
    return load_scorer(ScorerConfig(name=name, options=options))


def config(name, **options):
    return ScorerConfig(name=name, options=options)


@pytest.mark.parametrize(
    ("completion", "answer", "options", "expected"),
    [
        ("113459", "113459", {}, 1.0),
        (" 113459\n", "113459", {}, 1.0),
        (" 113459", "113459", {"strip": False}, 0.0),
        ("113458", "113459", {}, 0.0),
        ("1134590", "113459", {}, 0.0),
        ("paris", "Paris", {}, 0.0),
        ("paris", "Paris", {"ignore_case": True}, 1.0),
        ("7", 7, {}, 1.0),
        ("", "7", {}, 0.0),
        # A number of the row is right in every spelling; a text is right as it stands.
        ("42", 42.0, {}, 1.0),
        ("42.0", 42, {}, 1.0),
        ("1,000", 1000, {}, 1.0),
        ("4.20e1", 42.0, {}, 1.0),
        ("1/2", 0.5, {}, 1.0),
        ("\N{MINUS SIGN}5", -5, {}, 1.0),
        (" 42", 42.0, {"strip": False}, 0.0),
        ("43", 42.0, {}, 0.0),
        ("the answer is 42", 42.0, {}, 0.0),
        ("9007199254740993", 9007199254740992, {}, 0.0),
        ("1e-7", 1e-07, {}, 1.0),
        ("10000000000000000", 1e16, {}, 1.0),
        ("42", "42.0", {}, 0.0),
        ("7", "007", {}, 0.0),
    ],
)
def test_exact_match(completion, answer, options, expected):
    assert scorer("exact_match", **options)("", completion, {"answer": answer}) == expected


def test_exact_match_reads_the_field_it_is_told():
    assert scorer("exact_match", answer_field="solution")("", "x", {"solution": "x", "answer": "y"}) == 1.0


@pytest.mark.parametrize("name", ["exact_match", "numeric", "math_verify"])
@pytest.mark.parametrize("metadata", [{}, {"answer": None}, {"answer": True}, {"answer": ["1"]}])
def test_without_an_answer_there_is_a_failure_and_not_a_zero(name, metadata):
    outcome = scorer(name)("", "1", metadata)
    assert isinstance(outcome, ScorerFailure)
    assert outcome.code == "scorer_metadata"
    assert not outcome.retryable
    assert "metadata.answer" in outcome.reason


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("so the answer is 42.", 42, 1.0),
        ("first 41, then 42", "42", 1.0),
        ("first 42, then 41", "42", 0.0),
        ("10-5", "5", 1.0),
        ("it falls to -5", "-5", 1.0),
        ("it falls to \N{MINUS SIGN}5", "-5", 1.0),
        ("$1,234.50", "1234.5", 1.0),
        ("1,234,567", 1234567, 1.0),
        ("2e3", "2000", 1.0),
        (".5", "0.5", 1.0),
        ("1e999", "5", 0.0),
        ("no number at all", "5", 0.0),
        ("", "5", 0.0),
        ("٣", "3", 0.0),
        ("42", 42.0, 1.0),
        ("4.20e1", "42", 1.0),
        ("1,000", 1000.0, 1.0),
        ("so 1/2", 0.5, 1.0),
        ("0.5", "1/2", 1.0),
        ("3/4.", "0.75", 1.0),
        ("on 12/24/2024", "2024", 1.0),
        ("1/0", "1", 0.0),
        ("0/0", "0", 0.0),
        ("9007199254740993", "9007199254740992", 0.0),
        ("9" * 6000, "9", 0.0),
        ("1e99999999999999999999", "1", 0.0),
    ],
)
def test_numeric(completion, answer, expected):
    assert scorer("numeric")("", completion, {"answer": answer}) == expected


def test_numeric_tolerances():
    assert scorer("numeric")("", "3.1416", {"answer": "3.14159"}) == 0.0
    assert scorer("numeric", absolute_tolerance=1e-4)("", "3.1416", {"answer": "3.14159"}) == 1.0
    assert scorer("numeric", relative_tolerance=0.01)("", "101", {"answer": "100"}) == 1.0
    assert scorer("numeric", relative_tolerance=0.01)("", "102", {"answer": "100"}) == 0.0


@pytest.mark.parametrize("answer", ["seven", "1e999", "", "1 2"])
def test_numeric_refuses_a_reference_that_is_no_number(answer):
    outcome = scorer("numeric")("", "7", {"answer": answer})
    assert isinstance(outcome, ScorerFailure)
    assert outcome.code == "scorer_metadata"


def test_regex():
    assert scorer("regex", pattern=r"<answer>\d+</answer>")("", "so\n<answer>12</answer>", {}) == 1.0
    assert scorer("regex", pattern=r"<answer>\d+</answer>")("", "<answer>twelve</answer>", {}) == 0.0
    assert scorer("regex", pattern=r"\d+", mode="fullmatch")("", "12 ", {}) == 0.0
    assert scorer("regex", pattern="YES", ignore_case=True)("", "yes", {}) == 1.0
    assert scorer("regex")("", "abc", {"pattern": "^a.c$"}) == 1.0
    assert scorer("regex", pattern_field="format")("", "abc", {"format": "^b"}) == 0.0


@pytest.mark.parametrize("metadata", [{}, {"pattern": 5}, {"pattern": "("}])
def test_regex_without_a_usable_pattern_is_a_failure(metadata):
    outcome = scorer("regex")("", "abc", metadata)
    assert isinstance(outcome, ScorerFailure)
    assert outcome.code == "scorer_metadata"


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("The answer is $\\frac{2}{4}$.", "\\frac{1}{2}", 1.0),
        ("\\boxed{0.5}", "$\\frac{1}{2}$", 1.0),
        ("\\boxed{x^2+2x+1}", "(x+1)^2", 1.0),
        ("$x=3$", "3", 1.0),
        ("42", 42.0, 1.0),
        ("42.0", 42, 1.0),
        ("$0.0000001$", 1e-07, 1.0),
        ("10000000000000000", 1e16, 1.0),
        ("$e - 7$", 1e-07, 0.0),
        ("\\boxed{\\frac{1}{3}}", "\\frac{1}{2}", 0.0),
        ("I do not know", "5", 0.0),
        ("", "5", 0.0),
    ],
)
def test_math_verify(completion, answer, expected):
    assert scorer("math_verify")("", completion, {"answer": answer}) == expected


def test_math_verify_that_chokes_does_not_give_a_zero_unless_told_to():
    # Past Python's limit for reading integers: SymPy raises.
    digits = "9" * 6_000
    with pytest.raises(Exception, match="math-verify raised"):
        scorer("math_verify")("", digits, {"answer": "5"})
    assert scorer("math_verify", unreadable="missing")("", digits, {"answer": "5"}) == 0.0


def gym_row(task):
    import reasoning_gym

    row = reasoning_gym.create_dataset(task, size=1, seed=11)[0]
    return row["question"], {"answer": row["answer"], "metadata": row["metadata"]}


def test_reasoning_gym_takes_only_a_full_score():
    question, metadata = gym_row("spell_backward")
    answer = metadata["answer"]
    nearly = answer[:-1] + "?"
    assert scorer("reasoning_gym")(question, f" {answer}\n", metadata) == 1.0
    assert scorer("reasoning_gym")(question, nearly, metadata) == 0.0
    partial = scorer("reasoning_gym", threshold=None)(question, nearly, metadata)
    assert 0.0 < partial < 1.0
    assert scorer("reasoning_gym", threshold=partial)(question, nearly, metadata) == 1.0


def test_reasoning_gym_that_raises_does_not_give_a_zero_unless_told_to():
    question, metadata = gym_row("prime_factorization")
    assert scorer("reasoning_gym")(question, metadata["answer"], metadata) == 1.0
    with pytest.raises(Exception, match="prime_factorization raised ValueError"):
        scorer("reasoning_gym")(question, "garbage", metadata)
    assert scorer("reasoning_gym", unreadable="missing")(question, "garbage", metadata) == 0.0


@pytest.mark.parametrize(
    "metadata",
    [{}, {"answer": "4"}, {"answer": "4", "metadata": 5}, {"answer": "4", "metadata": {"source_dataset": "no_such"}}],
)
def test_reasoning_gym_without_a_task_is_a_failure(metadata):
    outcome = scorer("reasoning_gym")("2 + 2 =", "4", metadata)
    assert isinstance(outcome, ScorerFailure)
    assert outcome.code == "scorer_metadata"


@pytest.mark.parametrize("task", ["arc_agi", "rearc"])
def test_reasoning_gym_refuses_tasks_whose_rows_json_cannot_carry(task):
    outcome = scorer("reasoning_gym")("", "0", {"answer": "0", "metadata": {"source_dataset": task}})
    assert isinstance(outcome, ScorerFailure)
    assert "JSON" in outcome.reason


def test_reasoning_gym_does_not_run_completions_as_code(tmp_path):
    question, metadata = gym_row("spiral_matrix")
    trace = tmp_path / "trace"
    completion = f"[open({str(trace)!r}, 'w')]"
    outcome = scorer("reasoning_gym")(question, completion, metadata)
    assert isinstance(outcome, ScorerFailure)
    assert "trust_completions" in outcome.reason
    assert not outcome.retryable
    assert not trace.exists()
    scorer("reasoning_gym", trust_completions=True)(question, completion, metadata)
    assert trace.exists(), "the task no longer evaluates completions: take it off the list"


def test_the_list_of_tasks_that_evaluate_completions_is_complete():
    from reasoning_gym.factory import DATASETS

    from services.reward.scorers.reasoning_gym import EVALUATING

    evaluates = re.compile(r"(?<![\w.])(?:eval|exec)\(answer\)|(?<!def )\bparse_expr\(answer|sympify\(answer")
    found = set()
    for name, (dataset, _) in DATASETS.items():
        module = __import__(dataset.__module__, fromlist=["_"])
        if evaluates.search(Path(module.__file__).read_text()):
            found.add(name)
    assert found == EVALUATING


@pytest.mark.parametrize("completion", GARBAGE)
@pytest.mark.parametrize(
    ("name", "options", "metadata"),
    [
        ("exact_match", {}, {"answer": "12"}),
        ("numeric", {}, {"answer": "12"}),
        ("regex", {"pattern": "^12$"}, {}),
        ("math_verify", {}, {"answer": "12"}),
        ("reasoning_gym", {}, {"answer": "12", "metadata": {"source_dataset": "chain_sum"}}),
    ],
)
def test_garbage_is_wrong(name, options, metadata, completion):
    assert scorer(name, **options)("5 + 7 =", completion, metadata) == 0.0


def test_built_in_scorers_may_be_cached_and_others_only_when_marked():
    assert is_deterministic(scorer("exact_match"))
    assert not is_deterministic(scorer("tests.support.reward.scorers:length"))
    assert is_deterministic(scorer("tests.support.reward.scorers:counted"))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("numpy_scalar", 0.5),
        ("numpy_bool", True),
        ("torch_scalar", 0.25),
        ("torch_bool", True),
        ("decimal", 0.5),
        ("fraction", 0.5),
        ("truth", True),
        ("awaited", 0.75),
        ("awaits_inside", 1.0),
    ],
)
def test_numbers_of_every_kind_count_like_pythons_and_coroutines_are_awaited(name, expected):
    """Twice: what the second awaits for belongs to the same event loop."""
    loaded = scorer(f"tests.support.reward.scorers:{name}")
    for _ in range(2):
        value = loaded("", "", {})
        assert value == expected
        assert isinstance(value, numbers.Real)
        assert type(value).__module__ in {"builtins", "fractions"}


def test_several_numbers_are_no_reward():
    assert not isinstance(scorer("tests.support.reward.scorers:numpy_array")("", "", {}), numbers.Real)


def test_the_readmes_scorer_scores_every_completion(tmp_path, monkeypatch):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) == 1
    (tmp_path / "readme_rewards.py").write_text(blocks[0], encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    loaded = scorer("readme_rewards:length_penalized")
    assert loaded("", "", {"answer": "123"}) == 0.0
    assert loaded("", "", {"answer": ""}) == 1.0
    assert loaded("", "123", {"answer": "123"}) == 1.0
    assert loaded("", "123" + 397 * " ", {"answer": "123"}) == 0.5


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("verl_style", "where prompt is expected stands data_source"),
        ("swapped", "where prompt is expected stands completion"),
        ("two_parameters", "expected a function with the parameters (prompt, completion, metadata)"),
        ("one_too_many", "expected a function with the parameters (prompt, completion, metadata)"),
        ("batched", "expected a function with the parameters (prompt, completion, metadata)"),
        ("generator", "it is a generator"),
    ],
)
def test_a_signature_that_is_not_a_scorers_is_refused_as_it_is_loaded(name, words):
    with pytest.raises(InvalidData, match=re.escape(words)) as caught:
        scorer(f"tests.support.reward.scorers:{name}")
    assert caught.value.code == "scorer_options"
    assert name in str(caught.value)


def test_parameters_that_are_not_used_may_say_so():
    assert scorer("tests.support.reward.scorers:unused")("", "four", {}) == 4.0


def test_import_path_with_options():
    assert scorer("tests.support.reward.scorers:length", scale=0.5)("", "four", {}) == 2.0


@pytest.mark.parametrize(
    ("name", "options", "code", "words"),
    [
        ("exact_mach", {}, "unknown_scorer", "exact_match"),
        ("no.such.module:score", {}, "unknown_scorer", "no.such.module"),
        ("tests.support.reward.scorers:no_such", {}, "unknown_scorer", "no_such"),
        ("tests.support.reward.scorers:length", {"scle": 2}, "scorer_options", "scle"),
        ("exact_match", {"stripp": True}, "scorer_options", "stripp is not a known option"),
        ("numeric", {"absolute_tolerance": -1}, "scorer_options", "absolute_tolerance is -1"),
        ("regex", {"pattern": "("}, "scorer_options", "pattern is '('"),
        ("reasoning_gym", {"unreadable": "zero"}, "scorer_options", "unreadable is 'zero'"),
    ],
)
def test_a_scorer_that_cannot_be_used_is_named(name, options, code, words):
    with pytest.raises(InvalidData, match=re.escape(words)) as caught:
        load_scorer(config(name, **options))
    assert caught.value.code == code


def test_a_module_that_fails_to_import_is_told_from_one_that_is_missing(tmp_path, monkeypatch):
    (tmp_path / "broken_scorers.py").write_text("import no_such_library\n")
    (tmp_path / "raising_scorers.py").write_text("raise RuntimeError('no license')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for module, words in (("broken_scorers", "no_such_library"), ("raising_scorers", "no license")):
        with pytest.raises(InvalidData, match=words) as caught:
            load_scorer(config(f"{module}:score"))
        assert caught.value.code == "scorer_import"


def test_labels_are_unique():
    configs = [config("regex", pattern="a"), config("numeric"), config("regex", pattern="b")]
    assert labels(configs) == ["regex", "numeric", "regex_2"]
