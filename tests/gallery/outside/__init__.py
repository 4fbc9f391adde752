"""Cases that outsiders brought: wrong numbers, changed models, false causes, hostile input.

One module a case. Each has three names:

    BEFORE: the answer of the version that the case was found in, as text
    RIGHT: the right answer
    answer(): runs the case and returns today's answer, in the words of RIGHT where it is right

The first line of its docstring says what was done; the rest says where it was found.
"""
