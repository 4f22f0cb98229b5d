"""What surrounds every route: connections, bodies, turns, audit log and metrics."""
