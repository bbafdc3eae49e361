"""The last rank lives, but does not call: never (argument "ever"), or not "again"."""

import sys
import time

from fault_tools import LAST, RANK, SLACK_S, WAIT_S, assert_fails, works

again = sys.argv[1] == "again"
if again:
    works()
if RANK == LAST:
    time.sleep(WAIT_S + SLACK_S)
else:
    assert_fails(recorded=again)
