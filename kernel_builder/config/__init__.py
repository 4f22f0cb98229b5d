"""`build.toml` -> Project -> the variants that it must offer: the format and the support matrix, both as data."""
