"""Requests of the workflows in `.github/` to GitHub, and their output."""
