"""Tasks, candidates, and a judge that trusts no candidate."""
