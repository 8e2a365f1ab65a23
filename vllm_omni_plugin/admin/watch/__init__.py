"""Shows the fleet: its state and its events, once or as a stream, and the page for both. Start with `watch_routes`."""
