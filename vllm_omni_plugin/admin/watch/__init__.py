"""The fleet to look at: its state and its events, once or as they change, and the page that shows both.

Start with `watch_routes`.
"""
