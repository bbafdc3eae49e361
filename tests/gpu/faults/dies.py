"""The last rank exits before its fifth call: the others get an error that names it.

What they call after that fails, too, without a wait.
"""

import time

from fault_tools import LAST, RANK, SLACK_S, WAIT_S, assert_fails, leave, works

for i in range(4):
    works(factor=i + 1)
if RANK == LAST:
    leave(9)
assert_fails()
start = time.monotonic()
assert_fails()
assert time.monotonic() - start < WAIT_S / 2, "waited again"
if RANK == 0:  # the coordinator: the others need it until they have ended
    time.sleep(WAIT_S + SLACK_S)
leave(0)
