"""Files on the disk or in another store, and locks between servers."""
