"""Networks in Flax linen.

A module's parameters carry logical axis names (`flax.linen.unbox` removes them) and are float32
unless it says otherwise; its `dtype` is that of the computation.
"""
