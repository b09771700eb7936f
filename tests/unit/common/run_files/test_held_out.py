import pytest

from services.common.run_files.held_out import Best, Score, best_score, comparable_scores, fallen, read_best, write_best


def entry(step, value, asks="same", error=0.02, **metrics):
    return {
        "step": step,
        "asks": asks,
        "metrics": {"greedy_accuracy": value, "greedy_accuracy_error": error, **metrics},
    }


def scores(*values, error=0.02):
    return [Score(step * 10, "greedy_accuracy", value, error) for step, value in enumerate(values)]


def test_the_best_is_the_newest_of_equal_ones_and_the_better_rewarded():
    assert best_score(scores(0.5, 0.7, 0.7, 0.6)).step == 20
    tied = comparable_scores([entry(1, 0.0, greedy_reward=0.4), entry(2, 0.0, greedy_reward=0.3)])
    assert best_score(tied).step == 1
    assert best_score([]) is None


def test_scores_of_other_questions_do_not_count():
    evaluations = [entry(0, 0.9), entry(10, 0.9, asks="harder"), entry(20, 0.3), entry(30, 0.2)]
    assert [score.step for score in comparable_scores(evaluations)] == [20, 30]
    del evaluations[2]["asks"], evaluations[3]["asks"]
    assert [score.step for score in comparable_scores(evaluations)] == [20, 30]
    assert comparable_scores([]) == []


@pytest.mark.parametrize(
    ("values", "steps"),
    [
        ((0.75, 0.0, 0.0, 0.0), [10, 20, 30]),
        ((0.2, 0.75, 0.3, 0.3), [20, 30]),
        ((0.75, 0.0, 0.7, 0.1), [30]),
        ((0.75, 0.0, 0.0, 0.7), []),
        ((0.75, 0.6, 0.5, 0.4), []),
        ((0.0, 0.0, 0.0, 0.0), []),
        ((0.75,), []),
        ((), []),
    ],
)
def test_which_of_the_last_have_fallen(values, steps):
    assert [score.step for score in fallen(scores(*values), 0.5)] == steps


def test_what_chance_explains_is_no_fall():
    assert fallen(scores(0.2, 0.05, error=0.05), 0.5) == []
    assert len(fallen(scores(0.5, 0.05, error=0.05), 0.5)) == 1
    assert fallen(scores(0.75, 0.0), 0.0) == []


def test_the_best_checkpoint_is_known_while_it_is_there(tmp_path):
    assert read_best(tmp_path) is None
    path = tmp_path / "step-000004"
    path.mkdir()
    best = Best(4, "held-out accuracy", 0.5, path)
    write_best(tmp_path, best)
    assert read_best(tmp_path) == best
    path.rmdir()
    assert read_best(tmp_path) is None
    (tmp_path / "best.json").write_text("{")
    assert read_best(tmp_path) is None
