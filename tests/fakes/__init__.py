"""Fakes of engines and links, controlled by the test."""
