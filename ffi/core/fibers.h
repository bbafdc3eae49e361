// Runs the programs of all ranks of a call on the threads that are there.
//
// Ranks wait for each other in the middle of their programs, so each needs a
// stack, but a thread a rank would cost a wake-up each and may not block a thread
// of XLA's. So a rank is a fibre: Pause() switches to the next rank that can run.
// The thread that starts the job works on it until it is done; helpers may join
// at any time, or come too late and find nothing to do.
#pragma once

#include <functional>
#include <memory>

#include "core/waiter.h"

namespace jax_overlap {

// What rank `rank` does. It must not throw, must not hold a lock across Pause(),
// and must not use thread_local data: it may continue on another thread.
using RankProgram = std::function<void(int rank, Waiter& waiter)>;

// Runs `task` soon, on some other thread.
using Schedule = std::function<void(std::function<void()> task)>;

// Runs ranks 0 .. ranks-1 to their end, with up to `helpers` scheduled helpers.
// `waits` says whether a program may call Pause(); without, no stacks are needed.
void RunRanks(int ranks, bool waits, int helpers, const Schedule& schedule, RankProgram program);

// The same with one thread a rank: the mode for tests under sanitizers.
void RunRanksAsThreads(int ranks, const RankProgram& program);

}  // namespace jax_overlap
