"""Recorded steps, run again."""
