"""docs/metrics.md is what the script writes of the catalogue."""

from tools.metrics_page import PAGE, page


def test_the_page_of_metrics_is_written_from_the_catalogue() -> None:
    assert PAGE.read_text() == page(), "run python -m tools.metrics_page"
