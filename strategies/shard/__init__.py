"""Sharding: the variants, one module each, and the candidates of operators that they choose from.

`operators` describes each operator by the labels of its dimensions. `candidates` derives from a description
where operands may lie on a mesh, what that communicates and what it costs, and runs it. `model` chooses for
every call of a whole model, and `linear` is the door for programs outside.
"""
