"""How good are answers, and does an uncertainty tell the wrong ones: ranking, matching, judges.

On the host, in NumPy's float64; nothing here imports JAX.
"""
