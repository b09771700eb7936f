"""The network policies, computed: exactly the paths of the design, names, Prometheus, and what the values add."""

from typing import Any

import pytest

from tests.support.deploy import chart_engine as engine
from tests.support.deploy.chart_engine import Document, preset, render

REDIS_USERS = {"rollout", "reward", "trainer", "test"}
DNS = ("kube-system", 53)


def matches(selector: Document, labels: dict[str, str]) -> bool:
    wanted = selector.get("matchLabels", {}).items() <= labels.items()
    return wanted and all(
        each["operator"] == "In" and labels.get(each["key"]) in each["values"]
        for each in selector.get("matchExpressions", [])
    )


def peers(rule: list[Document], pods: dict[str, dict[str, str]]) -> set[str]:
    """Components of the release, names of other namespaces, and address blocks."""
    found = set()
    for peer in rule:
        if "ipBlock" in peer:
            found.add(peer["ipBlock"]["cidr"])
        elif "namespaceSelector" in peer:
            found |= set(peer["namespaceSelector"]["matchLabels"].values())
        else:
            selected = {name for name, labels in pods.items() if matches(peer["podSelector"], labels)}
            found |= selected or {str(peer["podSelector"])}
    return found


def paths(documents: list[Document]) -> tuple[set[tuple[Any, ...]], set[tuple[Any, ...]]]:
    """(from, to, port) as the senders' policies allow it, and as the receivers' do; port None is any."""
    pods = {name: pod["metadata"]["labels"] for name, pod in engine.pod_templates(documents).items()}
    out, into = set(), set()
    for policy in engine.kinds(documents, "NetworkPolicy"):
        spec = policy["spec"]
        assert spec["policyTypes"] == ["Ingress", "Egress"]
        (owner,) = [name for name, labels in pods.items() if matches(spec["podSelector"], labels)]
        for rule in spec["egress"]:
            for port in rule.get("ports", [{"port": None}]):
                out |= {(owner, peer, port["port"]) for peer in peers(rule["to"], pods)}
        for rule in spec["ingress"]:
            for port in rule.get("ports", [{"port": None}]):
                into |= {(peer, owner, port["port"]) for peer in peers(rule["from"], pods)}
    return out, into


def inside(found: set[tuple[Any, ...]], documents: list[Document]) -> set[tuple[Any, ...]]:
    pods = engine.pod_templates(documents).keys()
    return {path for path in found if path[0] in pods and path[1] in pods}


def test_the_cpu_preset_lets_through_what_the_design_draws() -> None:
    documents = render(preset("cpu"))
    out, into = paths(documents)

    checked = {("test", each, 8080) for each in ("rollout", "reward")}
    assert inside(out, documents) == {(each, "redis", 6379) for each in REDIS_USERS} | checked
    scraped = {("test", "trainer", 8080)}
    assert inside(into, documents) == {(each, "redis", 6379) for each in REDIS_USERS} | checked | scraped
    senders = REDIS_USERS | {"prepare"}
    beyond = {(each, where, 53) for each in senders for where in ("kube-system", "169.254.20.10/32")}
    assert out - inside(out, documents) == beyond
    assert into - inside(into, documents) == {("monitoring", each, 8080) for each in engine.SERVICES}


def test_every_pod_has_exactly_one_policy() -> None:
    for name in engine.PRESETS:
        documents = render(preset(name))
        assert len(engine.kinds(documents, "NetworkPolicy")) == len(engine.pod_templates(documents))


def test_ranks_of_several_nodes_reach_each_other_and_keda_reaches_redis() -> None:
    documents = render(preset("multi-node"))
    out, into = paths(documents)

    assert ("trainer", "trainer", None) in out & into
    assert ("keda", "redis", 6379) in into
    assert not {path for path in out | into if path[:2] in {("trainer", "rollout"), ("rollout", "trainer")}}


def test_weights_over_the_network_open_trainer_and_rollouts_to_each_other() -> None:
    """NCCL chooses its ports, and connects rollouts among themselves too."""
    out, into = paths(render(preset("multi-node", "config.weights={transfer: nccl}")))

    sides = ("trainer", "rollout")
    assert {(one, other, None) for one in sides for other in sides} <= out & into
    assert not {path for path in out | into if path[2] is None} - {
        (one, other, None) for one in sides for other in sides
    }


def test_clients_are_let_in_to_the_services_and_to_nothing_else() -> None:
    client = "{podSelector: {matchLabels: {role: operator}}}"
    _, into = paths(render(preset("cpu", f"networkPolicy.clients=[{client}]")))

    reached = {(to, port) for sender, to, port in into if "operator" in sender}
    assert reached == {(service, port) for service in engine.SERVICES for port in (8080, 50051)}


@pytest.mark.parametrize(("name", "out_on_443"), [("single-node", {"rollout", "trainer"}), ("multi-node", set())])
def test_the_hub_is_reached_only_where_allowed(name: str, out_on_443: set[str]) -> None:
    out, _ = paths(render(preset(name)))

    assert {sender for sender, _, port in out if port == 443} == out_on_443


def test_an_outside_redis_is_reached_by_its_addresses() -> None:
    values = preset(
        "multi-node",
        "redis={enabled: false, external: {address: 'r.example:6380', port: 6380, cidrs: [10.1.2.0/24]}}",
        "secrets.existingSecret=mine",
    )
    out, _ = paths(render(values))

    assert {sender for sender, to, port in out if (to, port) == ("10.1.2.0/24", 6380)} == REDIS_USERS
