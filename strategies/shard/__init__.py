"""Sharding: the variants, one module each, and the candidates of operators that they choose from.

An operator is a module (`linear`, `conv2d`, `view`) with a `candidates` function; what they share stands in
layers, from `layout` over `redistribution`, `operation`, `cost`, `candidates` and `derivation` to
`enumeration`, beside which `products` and `following` name families of operators, and to `execution`.
"""
