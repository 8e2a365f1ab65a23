"""Scripts for developers of this package; not installed."""
