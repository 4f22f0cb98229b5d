"""Middleware and request bodies: limits, audit log and metrics."""
