"""Networks in Flax linen.

A module's parameters are float32 and carry logical axis names (`flax.linen.unbox` removes them);
its `dtype` is that of the computation.
"""
