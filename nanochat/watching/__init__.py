"""Watching a run from outside: its records read back as history, status, health, curve and report. No torch."""
