"""The manifest: the document that describes what a checkpoint contains and where each byte is.

``document`` is the manifest in memory, and ``files`` its part about the data files; ``validation`` and ``tiling`` check
it; ``payload`` encodes it as ``columns``, and ``envelope`` adds the version and a checksum.
"""
