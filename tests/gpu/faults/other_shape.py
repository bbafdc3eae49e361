"""The last rank calls with a vector of another length: an error on all ranks.

With the argument "again" after a call that was right, else as the first one.
"""

from fault_tools import ARGS, LAST, RANK, assert_fails, meet, program, works

again = ARGS == ["again"]
if again:
    works()
size = 1500 if RANK == LAST else 700
if not again:
    program(size)
    meet()
assert_fails(size, recorded=again)
