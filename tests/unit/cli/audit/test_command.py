import io
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from services.cli.app import app
from services.cli.audit import command
from services.cli.audit.table import label, tables
from services.cli.audit.verdict import DEFAULTS, failures
from services.cli.shared.trainer_module import NoReport
from services.common.errors import InvalidData
from services.common.run_files.audit_report import AuditReport, CandidateFacts, Mismatch, Refusal

STRICT = DEFAULTS["float32"]


def mismatch(*replayed: str, difference=2e-6, ratio=1.0, kl=1e-12, agreement=(1.0, 1.0)) -> Mismatch:
    return Mismatch(
        replayed=replayed,
        difference_mean=difference / 4,
        difference_max=difference,
        difference_quantiles={"0.5": difference / 5, "0.9": difference / 3, "0.99": difference / 2},
        ratio_mean=ratio,
        mismatch_kl=kl,
        worst_sample="audit-1/0/2",
        worst_position=7,
        agreement=agreement,
    )


def report(**changes) -> AuditReport:
    good = AuditReport(
        run="quickstart",
        model_type="qwen3_moe",
        dtype="float32",
        rollout_id="host-1",
        weights_version=3,
        weights_fingerprint="f70a4c402f3c089a",
        weights_path="models/quickstart",
        samples=64,
        tokens=359,
        groups_left_out=0,
        configured=("routing", "candidates"),
        rows=(
            mismatch("routing", "candidates"),
            mismatch("routing", difference=0.2, ratio=0.91, kl=6e-3),
            mismatch("candidates"),
            mismatch(difference=0.2, ratio=0.91, kl=6e-3),
        ),
        candidates=CandidateFacts(
            positions=359,
            inside=359,
            size_min=1,
            size_mean=7.25,
            size_max=20,
            summed_positions=359,
            sum_error_max=6e-7,
            mass_mean=0.91,
            mass_min=0.8,
        ),
        refused=(),
    )
    return good.model_copy(update=changes)


def only(row: Mismatch) -> AuditReport:
    return report(rows=(row,), configured=row.replayed)


def test_a_good_report_passes_whatever_is_lost_without_replay() -> None:
    assert failures(report(), STRICT) == []


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (mismatch(difference=1.1e-4), "|Δ log-prob| is 0.00011 at token 7 of audit-1/0/2, expected at most 0.0001"),
        (mismatch(difference=float("nan")), "|Δ log-prob| is nan"),
        (mismatch(ratio=1.0011), "mean ratio is 1.001100, expected 1 ± 0.001"),
        (mismatch(ratio=0.9989), "mean ratio is 0.998900"),
        (mismatch(ratio=float("inf")), "mean ratio is inf"),
        (mismatch(kl=1e-4), "mismatch KL is 0.0001, expected less than 0.0001"),
        (mismatch(agreement=(1.0, 0.9)), "routing agreement is down to 0.9000 in MoE layers [1]"),
    ],
)
def test_each_threshold_is_reported_with_value_and_limit(row: Mismatch, said: str) -> None:
    (sentence,) = failures(only(row), STRICT)
    assert said in sentence


def test_the_row_that_training_sees_decides() -> None:
    assert any("mean ratio is 0.91" in sentence for sentence in failures(report(configured=("routing",)), STRICT))


def test_candidates_and_refusals_count() -> None:
    facts = report().candidates.model_copy(update={"inside": 357, "sum_error_max": 0.5})
    refused = (Refusal(group_id="audit-2", code="routing_rows", reason="replay.routing has 3 rows, expected 9"),)
    reported = failures(report(candidates=facts, refused=refused), STRICT)
    assert reported[0].startswith("2 sampled tokens are outside")
    assert "1 ± 0.5" in reported[1]
    assert "routing_rows: replay.routing has 3 rows" in reported[2]


def test_defaults_are_stricter_than_the_usual_acceptance_and_bfloat16_is_looser_than_float32() -> None:
    narrow, wide = DEFAULTS["float32"], DEFAULTS["bfloat16"]
    for limits in (narrow, wide):
        assert limits.ratio_error < 0.2
        assert limits.mismatch_kl < 0.1
    assert narrow.difference_max < wide.difference_max
    assert narrow.agreement > wide.agreement


def rendered(found: AuditReport) -> str:
    console = Console(width=80, record=True, file=io.StringIO())
    for table in tables(found):
        console.print(table)
    return console.export_text()


def test_the_tables_fit_a_terminal_and_hold_every_number() -> None:
    text = rendered(report())
    assert "…" not in text
    lines = {line.split("  ")[0].strip(): line for line in text.splitlines()}
    assert lines["both ◀"].split()[2:] == ["5.0e-07", "4.0e-07", "6.7e-07", "1.0e-06", "2.0e-06", "1.00000", "1.0e-12"]
    assert "0.91000" in lines["no candidates"]
    assert "1.00000" in lines["no routing"]
    assert "neither" in lines
    assert ["1", "100.000%", "100.000%"] in [line.split() for line in text.splitlines()]
    assert "359 of 359" in text
    assert "1, 7.2, 20" in text
    assert "0.8000, 0.9100" in text


@pytest.mark.parametrize(
    ("kinds", "labels"),
    [
        (("candidates",), ["candidates", "no candidates"]),
        (("routing",), ["routing", "no routing"]),
        ((), ["nothing to replay"]),
    ],
)
def test_models_and_samplings_with_less_to_replay_have_their_own_labels(kinds, labels) -> None:
    rows = [mismatch(*kinds, agreement=())]
    if kinds:
        rows.append(mismatch(agreement=()))
    found = report(rows=tuple(rows), configured=kinds, candidates=None)
    assert [label(row, found) for row in found.rows] == labels
    assert "Candidate sets" not in rendered(found)
    assert "Routing agreement" not in rendered(found)


def test_a_report_survives_its_file_and_nothing_else_is_taken_for_one(tmp_path: Path) -> None:
    file = tmp_path / "audit.json"
    file.write_text(only(mismatch(kl=float("nan"), ratio=float("inf"))).model_dump_json(), encoding="utf-8")
    (row,) = AuditReport.read(file).rows
    assert row.ratio_mean == float("inf")
    assert row.mismatch_kl != row.mismatch_kl
    file.write_text('{"run": "other"}', encoding="utf-8")
    with pytest.raises(InvalidData, match="not an audit's report"):
        AuditReport.read(file)
    with pytest.raises(InvalidData, match=r"nothing\.json"):
        AuditReport.read(tmp_path / "nothing.json")


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    tree = yaml.safe_load((Path(__file__).parents[4] / "configs" / "quickstart.yaml").read_text(encoding="utf-8"))
    tree["run"]["directory"] = str(tmp_path / "runs")
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return file


def run(config_file: Path, *arguments: str):
    return CliRunner().invoke(app, ["audit", str(config_file), "--rollout", "127.0.0.1:9", *arguments])


@pytest.mark.parametrize(
    ("found", "arguments", "status"),
    [
        (report(), [], 0),
        (only(mismatch(ratio=1.01)), [], 1),
        (only(mismatch(ratio=1.01)), ["--ratio-error", "0.02"], 0),
        (report(), ["--max-difference", "1e-6"], 1),
        (report(), ["--max-kl", "0"], 1),
        (only(mismatch(agreement=(0.5,))), ["--min-agreement", "0.4"], 0),
        (only(mismatch(ratio=1.01)), ["--set", "model.dtype=bfloat16"], 0),
    ],
)
def test_exit_status_follows_the_thresholds(found, arguments, status, config_file, monkeypatch) -> None:
    monkeypatch.setattr(command, "measure", lambda *_, **__: found)
    ended = run(config_file, *arguments)
    assert ended.exit_code == status, ended.output
    assert ("✓ sampler and trainer agree" in ended.output) == (status == 0)


def test_what_is_asked_for_reaches_the_comparison(config_file, monkeypatch, tmp_path) -> None:
    asked = {}
    monkeypatch.setattr(command, "measure", lambda *_, **options: asked.update(options) or report())
    run(config_file, "--samples", "24", "--token", "a-secret-of-sixteen", "--output", str(tmp_path / "x.json"))
    assert asked["rollout"] == "127.0.0.1:9"
    assert asked["samples"] == 24
    assert asked["output"] == tmp_path / "x.json"
    assert asked["environment"] == {"TRIVET_TOKEN": "a-secret-of-sixteen"}


def test_no_verdict_has_a_status_of_its_own(config_file, monkeypatch) -> None:
    def measure(*_, **__):
        raise NoReport("weights_unknown: version 7")

    monkeypatch.setattr(command, "measure", measure)
    ended = run(config_file)
    assert ended.exit_code == 2
    assert "no verdict: weights_unknown: version 7" in ended.output
    ended = run(config_file, "--set", "trainer.stepz=3")
    assert ended.exit_code == 2
    assert "trainer.stepz is not a known key" in ended.output
    unprepared = f"prepare={{command: ['false'], creates: {config_file.parent / 'model'}}}"
    ended = CliRunner().invoke(app, ["audit", str(config_file), "--set", unprepared])
    assert ended.exit_code == 2
    assert "prepare.command ended with status 1" in ended.output
