"""Replicas of an engine on Ray Serve: placement, routing by prefix, streams that outlive a replica.

Ray starts, places, watches and ends the replicas; the server in front knows them as one engine
(``ReplicatedEngine``), so all that is served by one engine is served by many.
"""
