"""The newest checkpoint is damaged and the configuration changes while the trainer is away: the run resumes."""

from tests.support.runs.disturbed_run import GROUPS, STEPS, THEN


def test_it_resumes_from_the_checkpoint_before_and_keeps_the_damaged_one(finished):
    checkpoints = finished.system.config.run.path / "checkpoints"
    assert (checkpoints / f"damaged-step-{finished.damaged:06}" / "trainer.json").is_file()
    assert finished.events("resumed")[-1]["checkpoint"].endswith(f"step-{finished.resumed:06}")
    assert (checkpoints / f"step-{STEPS:06}").is_dir()


def test_every_step_has_the_size_of_its_configuration(finished):
    sizes = [len(entry["groups"]) for entry in finished.system.run_log.steps()]
    assert sizes == [GROUPS] * finished.resumed + [THEN] * (STEPS - finished.resumed)


def test_no_group_is_older_than_the_new_bound(finished):
    then = finished.system.run_log.steps()[finished.resumed :]
    assert all(entry["metrics"]["staleness_max"] <= 0 for entry in then)
