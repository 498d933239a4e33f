"""Numerics shared by the methods: attention, masks, losses, sampling, learning-rate schedules."""
