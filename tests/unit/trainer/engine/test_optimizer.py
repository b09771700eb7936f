import pytest

from services.common.config import OptimizerConfig
from services.trainer.engine.optimizer import learning_rate


def rates(decay: str, **changes: float) -> list[float]:
    config = OptimizerConfig.model_validate(
        {"learning_rate": 1.0, "warmup_steps": 4, "decay": decay, "final_ratio": 0.2, **changes}
    )
    return [learning_rate(config, step, 13) for step in range(15)]


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine"])
def test_warm_up_is_linear_and_never_zero(decay: str) -> None:
    assert rates(decay)[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_decay_ends_at_the_final_ratio_and_stays() -> None:
    assert rates("constant")[4:] == pytest.approx([1.0] * 11)
    linear, cosine = rates("linear"), rates("cosine")
    assert linear[4:13] == pytest.approx([1 - 0.1 * step for step in range(9)])
    assert cosine[8] == pytest.approx(0.6)
    assert linear[12:] == pytest.approx([0.2] * 3)
    assert cosine[12:] == pytest.approx([0.2] * 3)
    assert cosine[5] > linear[5]


def test_without_warm_up_the_first_step_has_the_peak() -> None:
    assert rates("linear", warmup_steps=0)[0] == 1.0
    assert rates("linear", warmup_steps=30)[14] == pytest.approx(0.5)
