"""The last rank calls with a vector of another length: an error on all ranks.

With the argument "again" after a call that was right, else as the first one.
"""

import sys

from fault_tools import LAST, RANK, assert_fails, works

again = sys.argv[1] == "again"
if again:
    works()
assert_fails(size=1500 if RANK == LAST else 700, recorded=again)
