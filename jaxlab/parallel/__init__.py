"""Meshes, sharding rules and start-up of many processes."""
