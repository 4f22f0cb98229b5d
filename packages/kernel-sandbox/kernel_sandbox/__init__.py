"""A sandbox for processes: bubblewrap or Landlock, with a filter of system calls."""
