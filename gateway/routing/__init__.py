"""Placing: which backend a request goes to, and when. Pure: snapshots in, decisions out."""
