"""Sources of data and the batches made from them.

A source of batches maps a step to a batch and depends on nothing else, so that a resumed run
reads exactly what an uninterrupted one would.
"""
