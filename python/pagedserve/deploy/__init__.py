"""Replicas of an engine on Ray Serve: placement, prefix-aware routing, resumed streams.

Ray starts, places, monitors and stops the replicas; the server uses them as one engine
(``ReplicatedEngine``), so every feature of one engine works with several.
"""
