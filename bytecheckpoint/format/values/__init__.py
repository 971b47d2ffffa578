"""Encode plain values as bytes: strict, deterministic msgpack that cannot make a reader run code.

A value is decoded with its original type: a tuple as a tuple, a numpy scalar as that scalar, NaN with its bits. Types
that msgpack lacks are extensions (``types.Ext``), whose tags are part of the format. Anything else is rejected by name,
or stored as a pickle if the caller of both save and load requests it.
"""
