"""Searches: agents write candidates, the judge decides, and the best becomes a project."""
