"""Notes each function of some folders that this process enters; `bench/entered.py` puts this on the path.

Each is written at once, for ranks and their server end without a last word. Modules, bodies of classes,
comprehensions and lambdas are part of what is around them.
"""

from __future__ import annotations

import os
import sys
import threading
from types import CodeType, FrameType
from typing import Any

_FOLDERS = tuple(os.environ["ENTERED_FOLDERS"].split(os.pathsep))
_IS_FUNCTION = 1  # CO_OPTIMIZED: a class's body and a module have names that are looked up
_seen: set[CodeType] = set()


def _profile(frame: FrameType, event: str, _argument: Any) -> None:
    code = frame.f_code
    if event != "call" or code in _seen:
        return
    _seen.add(code)
    if code.co_filename.startswith(_FOLDERS) and code.co_flags & _IS_FUNCTION and code.co_name[0] != "<":
        notes = os.open(os.environ["ENTERED_NOTES"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(notes, f"{code.co_filename}:{code.co_firstlineno}\n".encode())
        os.close(notes)


threading.setprofile(_profile)
sys.setprofile(_profile)
