"""Packages -> a Hub, and back: publishing, verifying and signing, and the server of a Hub of one's own.

The rest of the builder does not know of this room.
"""
