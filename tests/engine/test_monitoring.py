"""The dashboards and rules of examples/monitoring, asked of real engines."""

from collections.abc import Set

from prometheus_client.parser import text_string_to_metric_families

from tests.monitoring.queries import all_queries, check, of_the_catalogue, recorded

from .server import Server


def scrape_of(server: Server) -> dict[str, Set[str]]:
    """Names and labels of all that a server tells."""
    with server.http() as http:
        families = text_string_to_metric_families(http.get("/metrics").text)
        scrape: dict[str, Set[str]] = {}
        for sample in (sample for family in families for sample in family.samples):
            scrape[sample.name] = scrape.get(sample.name, frozenset()) | sample.labels.keys()
        return scrape


def test_every_query_asks_for_what_a_real_fleet_tells(fleet: Server) -> None:
    fleet.complete()
    scrape, ours = scrape_of(fleet), of_the_catalogue()
    # What a fleet has to tell depends on what it is and on what has happened.
    assert {name: labels for name, labels in scrape.items() if name in ours} == {
        name: labels for name, labels in ours.items() if name in scrape
    }
    known = recorded(scrape | ours)
    for query in all_queries():
        check(query, known)
