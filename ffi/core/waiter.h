// How a rank that has to wait lets the others run.
#pragma once

#include <sched.h>

namespace jax_overlap {

class Waiter {
 public:
  virtual ~Waiter() = default;
  virtual void Pause() = 0;
};

// For a rank that has a thread of its own.
class ThreadWaiter : public Waiter {
 public:
  void Pause() override { sched_yield(); }
};

}  // namespace jax_overlap
