"""Log-probs so far apart that a ratio overflows: what is finite in truth is finite here, and right.

The truth is computed token by token with mpmath, whose numbers have no largest one, from formulas and derivatives
written down by hand.
"""

import math

import mpmath as mp
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.trainer.objective import (
    Calibration,
    ImportanceCorrection,
    KlPenalty,
    LossInputs,
    Objective,
    compute_loss,
    find_algorithm,
    quantiles_of,
)
from services.trainer.objective.importance import IMPORTANCE_MODES
from services.trainer.objective.kl import KL_ESTIMATORS, kl_estimate
from services.trainer.objective.metrics import distribution_of
from services.trainer.objective.scaled import wide_exp
from tests.support.trainer.objective_batches import REWARD_ALGORITHMS

LARGEST = torch.finfo(torch.float32).max


def inputs(current, old, rollout, reference, ids, advantages, kept, **more):
    """In float32, as the trainer has them."""
    logprobs = torch.tensor(current).requires_grad_()
    return LossInputs(
        logprobs=logprobs,
        old_logprobs=torch.tensor(old),
        rollout_logprobs=torch.tensor(rollout),
        reference_logprobs=None if reference is None else torch.tensor(reference),
        sequence_ids=torch.tensor(ids),
        advantages=torch.tensor(advantages),
        kept=torch.tensor(kept),
        total_tokens=len(ids),
        total_sequences=len(advantages),
        max_length=8,
        steps_applied=30,
        values=torch.zeros(len(ids), requires_grad=True),
        old_values=torch.zeros(len(ids)),
        returns=torch.zeros(len(ids)),
        gae_advantages=torch.tensor(advantages)[torch.tensor(ids)],
        **more,
    )


def gradient_of(outputs, given):
    return torch.autograd.grad(outputs.loss, given.logprobs)[0].tolist()


@pytest.mark.parametrize(
    ("gap", "advantage", "kept", "penalty"),
    [(100.0, 1.0, True, None), (100.0, -1.0, False, None), (-110.0, 0.0, True, KlPenalty())],
    ids=["clipped", "masked", "tiny ratio, huge k3"],
)
def test_what_has_no_part_in_the_loss_does_not_touch_the_gradient(gap, advantage, kept, penalty):
    old = [-101.0, -1.0]
    given = inputs([-101.0 + gap, -1.0], old, old, old if penalty else None, [0, 1], [advantage, 1.0], [kept, True])
    outputs = compute_loss(given, Objective(find_algorithm("grpo"), ImportanceCorrection("none"), penalty))
    assert math.isfinite(outputs.loss.item())
    assert gradient_of(outputs, given) == pytest.approx([0, -0.5], abs=1e-12)
    assert all(math.isfinite(value) for value in outputs.metrics.values().values())


def test_a_tiny_weight_and_a_huge_ratio_make_an_ordinary_product():
    """The old policy finds the token e^100 times less likely than sampler and current policy do."""
    given = inputs([-1.0, -1.0], [-101.0, -1.0], [-1.0, -1.0], None, [0, 1], [-1.0, 1.0], [True, True])
    outputs = compute_loss(given, Objective(find_algorithm("grpo"), ImportanceCorrection("token_truncate"), None))
    assert outputs.loss.item() == pytest.approx(0.0, abs=1e-6)
    assert gradient_of(outputs, given) == pytest.approx([0.5, -0.5], rel=1e-5)


@pytest.mark.parametrize("mode", ["token_mask", "sequence_mask"])
def test_what_the_weights_drop_is_dropped_whatever_its_ratio(mode):
    given = inputs([-1.0, -1.0], [-101.0, -1.0], [-301.0, -1.0], None, [0, 1], [-1.0, 1.0], [True, True])
    outputs = compute_loss(given, Objective(find_algorithm("grpo"), ImportanceCorrection(mode), None))
    assert gradient_of(outputs, given) == [0, -0.5]


def test_a_token_below_the_bound_is_dropped_where_its_ratio_underflows():
    """Importance ratio e^-150, and so 0 in float32; the policy's own ratio e^150 must not bring the token back."""
    given = inputs([0.0, -1.0], [-150.0, -1.0], [0.0, -1.0], None, [0, 1], [-1.5, 1.0], [True, True])
    correction = ImportanceCorrection("token_mask", clip_min=0.5)
    outputs = compute_loss(given, Objective(find_algorithm("grpo"), correction, None))
    assert gradient_of(outputs, given) == [0, -0.5]


def test_metrics_are_of_the_true_ratio():
    given = inputs([-1.0, -1.0], [-101.0, -1.0], [-151.0, -1.0], [-151.0, -1.0], [0, 1], [1.0, 1.0], [True, True])
    outputs = compute_loss(given, Objective(find_algorithm("grpo"), ImportanceCorrection("token_mask"), KlPenalty()))
    values = outputs.metrics.values()
    assert values["policy_ratio_max"] == pytest.approx(math.exp(100))
    assert values["policy_ratio"] == pytest.approx((math.exp(100) + 1) / 2)
    assert values["importance_ratio_max"] == pytest.approx(math.exp(50))
    assert values["clip_fraction"] == 0.5
    far = inputs([-151.0, -1.0], [-1.0, -1.0], [-1.0, -1.0], [-1.0, -1.0], [0, 1], [1.0, 1.0], [True, True])
    outputs = compute_loss(far, Objective(find_algorithm("grpo"), ImportanceCorrection("none"), KlPenalty("k3")))
    assert outputs.metrics.values()["kl"] == pytest.approx((math.exp(150) - 151) / 2)
    back = inputs([-201.0, -1.0], [-1.0, -1.0], [-1.0, -1.0], None, [0, 1], [1.0, 1.0], [True, True])
    outputs = compute_loss(back, Objective(find_algorithm("grpo"), ImportanceCorrection("none"), None))
    assert outputs.metrics.values()["mismatch_kl"] == pytest.approx(200 / 2, rel=0.01)


def test_a_distribution_of_what_overflows_float64_too():
    found = distribution_of(wide_exp(torch.tensor([0.0, 800.0])))
    assert found[0].item() == math.inf
    assert quantiles_of(found[2:])["p1"] == pytest.approx(1)


def test_a_coefficient_of_zero_leaves_the_gradient_alone():
    given = inputs([-201.0, -1.0], [-201.0, -1.0], [-201.0, -1.0], [-1.0, -1.0], [0, 1], [1.0, 1.0], [True, True])
    objective = Objective(find_algorithm("grpo"), ImportanceCorrection("none"), KlPenalty("k3", coef=0.0))
    assert gradient_of(compute_loss(given, objective), given) == [-0.5, -0.5]


@st.composite
def far_steps(draw):
    """Any algorithm, mask, KL estimator and importance mode over log-probs hundreds or thousands of nats apart."""
    lengths = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    ids = [sequence for sequence, length in enumerate(lengths) for _ in range(length)]
    reach = draw(st.sampled_from([3.0, 150.0, 3000.0]))
    number = st.one_of(st.sampled_from([0.0, -1.0, -reach]), st.floats(-reach, 0.0, width=32))
    policies = [draw(st.lists(number, min_size=len(ids), max_size=len(ids))) for _ in range(4)]
    # Often the same policy twice: then a product of two ratios is ordinary though each is not.
    for twin in draw(st.lists(st.sampled_from([(1, 2), (2, 3), (0, 1), (0, 2)]), max_size=2)):
        policies[twin[1]] = policies[twin[0]]
    advantages = draw(st.lists(st.sampled_from([-1.5, 0.0, 2.0]), min_size=len(lengths), max_size=len(lengths)))
    kept = draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    algorithm = find_algorithm(draw(st.sampled_from(REWARD_ALGORITHMS)))
    mode = draw(st.sampled_from(IMPORTANCE_MODES))
    calibration = Calibration(1.5, 10) if mode != "none" and draw(st.booleans()) else None
    return inputs(*policies, ids, advantages, kept), Objective(
        algorithm.override(draw(st.sampled_from(["token_mean", "sequence_mean", "fixed_length"]))),
        ImportanceCorrection(mode, draw(st.sampled_from([None, 0.5])), 2.0, calibration),
        draw(st.one_of(st.none(), st.builds(KlPenalty, st.sampled_from(KL_ESTIMATORS), st.just(0.3)))),
    )


class Truth:
    """Loss and gradient of a step, and how large the numbers were that made them up."""

    def __init__(self, given, objective):
        self.given, self.objective = given, objective
        self.ids = given.sequence_ids.tolist()
        self.lengths = given.lengths.tolist()
        names = ("logprobs", "old_logprobs", "rollout_logprobs", "reference_logprobs")
        self.lp, self.old, self.roll, self.ref = (
            [mp.mpf(number) for number in getattr(given, name).tolist()] for name in names
        )
        self.loss, self.size = mp.mpf(0), mp.mpf(0)
        self.gradient, self.sizes = [mp.mpf(0)] * len(self.ids), [mp.mpf(0)] * len(self.ids)
        for token in range(len(self.ids)):
            self.add_policy(token)
            if objective.kl is not None:
                self.add_kl(token)

    def add(self, value, slopes, size):
        self.loss += value
        self.size += size
        for token, slope in slopes.items():
            self.gradient[token] += slope
            self.sizes[token] += size

    def share(self, token):
        match self.objective.algorithm.aggregation:
            case "token_mean":
                return mp.mpf(1) / len(self.ids)
            case "sequence_mean":
                return mp.mpf(1) / (self.lengths[self.ids[token]] * len(self.lengths))
            case "fixed_length":
                return mp.mpf(1) / (len(self.lengths) * self.given.max_length)

    def weight(self, token):
        correction = self.objective.importance
        gaps = [old - roll for old, roll in zip(self.old, self.roll, strict=True)]
        if correction.mode.startswith("sequence"):
            ratio = mp.exp(sum(gap for gap, owner in zip(gaps, self.ids, strict=True) if owner == self.ids[token]))
        else:
            ratio = mp.exp(gaps[token])
        low, high = mp.mpf(correction.clip_min or 0), mp.mpf(correction.cap)
        if correction.mode == "none":
            weight = mp.mpf(1)
        elif correction.mode.endswith("mask"):
            weight = ratio if low <= ratio <= high else mp.mpf(0)
        else:
            weight = min(max(ratio, low), high)
        calibration = correction.calibration
        return weight if calibration is None else weight * mp.mpf(calibration.factor(self.given.steps_applied))

    def add_policy(self, token):
        sequence = self.ids[token]
        if not self.given.kept[sequence]:
            return
        algorithm, scale = self.objective.algorithm, self.share(token) * self.weight(token)
        advantage = mp.mpf(self.given.advantages[sequence].item())
        mates = [other for other, owner in enumerate(self.ids) if owner == sequence]
        learners = mates if algorithm.name == "gspo" else [token]
        ratio = mp.exp(sum(self.lp[each] - self.old[each] for each in learners) / len(learners))
        bounded = min(max(ratio, 1 - mp.mpf(algorithm.clip_low)), 1 + mp.mpf(algorithm.clip_high))
        if algorithm.name == "cispo":
            slope = -bounded * advantage
            self.add(scale * slope * self.lp[token], {token: scale * slope}, scale * abs(slope * self.lp[token]))
        elif bounded * advantage < ratio * advantage:
            self.add(-scale * bounded * advantage, {}, scale * abs(bounded * advantage))
        else:
            value = -scale * ratio * advantage
            self.add(value, {each: value / len(learners) for each in learners}, abs(value))

    def add_kl(self, token):
        penalty, lp, old, ref = self.objective.kl, self.lp[token], self.old[token], self.ref[token]
        scale = mp.mpf(penalty.coef) * self.share(token)
        gap = ref - lp
        k3 = mp.exp(gap) - gap - 1
        match penalty.estimator:
            case "k1":
                value, slope, size = -gap, mp.mpf(1), abs(gap) + 1
            case "k2":
                value, slope, size = gap**2 / 2, -gap, gap**2 + 1
            case "k3":
                value, slope, size = k3, 1 - mp.exp(gap), mp.exp(gap) + abs(gap)
            case "importance_sampling_corrected":
                ratio = mp.exp(lp - old)
                clipped = ratio > mp.mpf(penalty.clip_ratio)
                ratio = min(ratio, mp.mpf(penalty.clip_ratio))
                value = ratio * k3
                slope = ratio * (1 - mp.exp(gap)) + (0 if clipped else ratio * k3)
                size = ratio * (mp.exp(gap) + abs(gap) + 1)
        self.add(scale * value, {token: scale * slope}, scale * size)


@settings(max_examples=600)
@given(far_steps())
def test_every_combination_is_what_it_is_in_exact_numbers(drawn):
    given, objective = drawn
    truth = Truth(given, objective)
    outputs = compute_loss(given, objective)
    loss, gradient = outputs.loss.item(), gradient_of(outputs, given)
    if max(truth.size, *truth.sizes) > LARGEST / 1e3:
        # In truth too large for float32: then it is too large here, and the step is left out.
        assert loss == math.inf or abs(loss) > LARGEST / 1e8
        return
    # Gaps of thousands of nats are rounded by up to 2e-4 before they go into exp.
    for found, expected, size in zip(
        [loss, *gradient], [truth.loss, *truth.gradient], [truth.size, *truth.sizes], strict=True
    ):
        assert math.isfinite(found)
        assert abs(found - expected) <= 2e-3 * size + 1e-6


@pytest.mark.parametrize(
    ("current", "old", "reference"),
    [
        (-85.0, -95.0, 0.0),  # the product alone is too large for float32: e^10 · e^85
        (-1.0, -95.0, -2.0),  # the ratio alone
        (-1.0, -95.0, -90.0),  # the ratio, next to a reference far below
        (-90.0, -95.0, 0.0),  # k3
    ],
)
def test_what_overflows_in_either_factor_or_in_their_product_keeps_its_scale(current, old, reference):
    logprobs = torch.tensor([current, 0.0], requires_grad=True)
    penalty = KlPenalty(clip_ratio=math.inf)
    kl = kl_estimate(logprobs, torch.tensor([old, 0.0]), torch.tensor([reference, 0.0]), penalty)
    lp, before, ref = mp.mpf(current), mp.mpf(old), mp.mpf(reference)
    ratio, gap = mp.exp(lp - before), ref - lp
    assert kl.value.isfinite().all()
    assert kl.wide.tolist() == pytest.approx([float(ratio * (mp.exp(gap) - gap - 1)), 0], rel=1e-4)
    (gradient,) = torch.autograd.grad(kl.value.sum(), logprobs)
    # Ratio · exp(gap) does not depend on the policy.
    slope = -ratio * gap
    assert (gradient.double() * kl.log_scale.double().exp()).tolist() == pytest.approx([float(slope), 0], rel=1e-4)


@settings(max_examples=300)
@given(st.floats(-200, 0, width=32), st.floats(-200, 0, width=32), st.floats(-200, 0, width=32))
def test_the_corrected_estimator_is_its_formula_where_nothing_overflows(current, old, reference):
    logprobs = torch.tensor([current], dtype=torch.float64, requires_grad=True)
    kl = kl_estimate(
        logprobs,
        torch.tensor([old], dtype=torch.float64),
        torch.tensor([reference], dtype=torch.float64),
        KlPenalty(clip_ratio=5.0),
    )
    gap = mp.mpf(reference) - mp.mpf(current)
    exact = min(mp.exp(mp.mpf(current) - mp.mpf(old)), 5) * (mp.exp(gap) - gap - 1)
    assert kl.log_scale.tolist() == [0]
    assert kl.wide.item() == pytest.approx(float(exact), rel=1e-9, abs=1e-12)
