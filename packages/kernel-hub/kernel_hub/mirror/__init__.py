"""Repositories of another Hub, copied when somebody asks for them."""
