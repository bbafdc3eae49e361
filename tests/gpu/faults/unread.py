"""A call fails for want of the last rank, and nobody reads the result.

Rank 0 exits at once (argument "soon") or when the error is there ("late"): not with
exit code 0, either way.
"""

import time

from fault_tools import ARGS, LAST, RANK, SLACK_S, WAIT_S, operand, program, works

works()
if RANK == LAST:
    time.sleep(WAIT_S + SLACK_S)
else:
    program(1000)(operand(1000))
    if ARGS == ["late"]:
        time.sleep(WAIT_S + 2)
