"""Who goes first, who is refused, and the file that says so."""
