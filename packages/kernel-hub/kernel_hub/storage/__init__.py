"""Files on the disk, and locks between servers."""
