from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from services.common.serving.exposition import RunLabel


def test_every_series_carries_the_run():
    registry = CollectorRegistry()
    Counter("work_total", "Work", ["kind"], registry=registry).labels("a").inc(2)
    Gauge("level", "Level", registry=registry).set(3)
    text = generate_latest(RunLabel(registry, "sorting")).decode()
    assert 'work_total{kind="a",run="sorting"} 2.0' in text
    assert 'level{run="sorting"} 3.0' in text
    series = [line for line in text.splitlines() if not line.startswith("#")]
    assert all('run="sorting"' in line for line in series)


def test_what_names_its_own_run_keeps_it():
    registry = CollectorRegistry()
    Gauge("level", "Level", ["run"], registry=registry).labels("other").set(3)
    assert 'level{run="other"} 3.0' in generate_latest(RunLabel(registry, "sorting")).decode()
