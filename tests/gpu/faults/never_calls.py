"""The last rank lives, but does not call: never (argument "ever"), or not "again"."""

import time

from fault_tools import ARGS, LAST, RANK, SLACK_S, WAIT_S, assert_fails, works

again = ARGS == ["again"]
if again:
    works()
if RANK == LAST:
    time.sleep(WAIT_S + SLACK_S)
else:
    assert_fails(recorded=again)
