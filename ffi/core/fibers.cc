#include "core/fibers.h"

#include <ucontext.h>

#include <atomic>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace jax_overlap {
namespace {

constexpr size_t kStackBytes = 64 << 10;  // a program keeps at most 8 KB of tiles on it

using Stack = std::unique_ptr<char[]>;

// Stacks are kept for the next call: a fresh one costs page faults.
class StackPool {
 public:
  Stack Take() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (free_.empty()) return Stack(new char[kStackBytes]);
    Stack stack = std::move(free_.back());
    free_.pop_back();
    return stack;
  }
  void Give(Stack stack) {
    std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(std::move(stack));
  }

 private:
  std::mutex mutex_;
  std::vector<Stack> free_;
};

// Never destroyed: threads of XLA's may still run when the process exits.
StackPool& Stacks() {
  static StackPool* const pool = new StackPool;
  return *pool;
}

class Fiber : public Waiter {
 public:
  Fiber(int rank, const RankProgram& program)
      : rank_(rank), program_(program), stack_(Stacks().Take()) {
    getcontext(&fiber_);
    fiber_.uc_stack.ss_sp = stack_.get();
    fiber_.uc_stack.ss_size = kStackBytes;
    fiber_.uc_link = nullptr;
    // makecontext passes ints only, so the pointer travels in two halves.
    const auto self = reinterpret_cast<uintptr_t>(this);
    makecontext(&fiber_, reinterpret_cast<void (*)()>(&Fiber::Enter), 2,
                static_cast<unsigned>(self), static_cast<unsigned>(self >> 32));
  }
  ~Fiber() override { Stacks().Give(std::move(stack_)); }

  // Runs until the program pauses or ends; returns whether it has ended.
  bool Resume() {
    swapcontext(&home_, &fiber_);
    return finished_;
  }
  void Pause() override { swapcontext(&fiber_, &home_); }

 private:
  static void Enter(unsigned low, unsigned high) {
    auto* self = reinterpret_cast<Fiber*>(static_cast<uintptr_t>(high) << 32 | low);
    self->program_(self->rank_, *self);
    self->finished_ = true;
    self->Pause();  // for good: a finished fibre is not resumed
  }

  const int rank_;
  const RankProgram& program_;
  Stack stack_;
  ucontext_t fiber_;
  ucontext_t home_;
  bool finished_ = false;
};

// Ranks that can run stand in a queue; whoever works on the job takes the next.
// Helpers share ownership, as they may start after the last rank has ended.
class FiberJob {
 public:
  FiberJob(int ranks, RankProgram program) : program_(std::move(program)), left_(ranks) {
    for (int r = 0; r < ranks; ++r) {
      fibers_.push_back(std::make_unique<Fiber>(r, program_));
      ready_.push_back(fibers_.back().get());
    }
  }

  void Work() {
    int paused = 0;  // in a row
    for (int left = left_.load(); left > 0; left = left_.load(std::memory_order_acquire)) {
      bool others_run = false;
      Fiber* fiber = Take(left, &others_run);
      if (fiber == nullptr) {  // the rest is running on other threads
        sched_yield();
      } else if (fiber->Resume()) {
        left_.fetch_sub(1, std::memory_order_acq_rel);
        paused = 0;
      } else {
        Put(fiber);
        // Maybe all of these wait for one whose thread was preempted.
        if (others_run && ++paused >= left) {
          sched_yield();
          paused = 0;
        }
      }
    }
  }

 private:
  Fiber* Take(int left, bool* others_run) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (ready_.empty()) return nullptr;
    *others_run = ready_.size() < static_cast<size_t>(left);
    Fiber* fiber = ready_.front();
    ready_.pop_front();
    return fiber;
  }
  void Put(Fiber* fiber) {
    std::lock_guard<std::mutex> lock(mutex_);
    ready_.push_back(fiber);
  }

  const RankProgram program_;
  std::atomic<int> left_;
  std::mutex mutex_;
  std::deque<Fiber*> ready_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
};

// Programs that never wait are plain function calls, taken in turn.
class PlainJob {
 public:
  PlainJob(int ranks, RankProgram program)
      : program_(std::move(program)), ranks_(ranks), left_(ranks) {}

  void Work() {
    ThreadWaiter unused;
    for (int r = next_.fetch_add(1); r < ranks_; r = next_.fetch_add(1)) {
      program_(r, unused);
      left_.fetch_sub(1, std::memory_order_acq_rel);
    }
  }
  void Finish() {
    Work();
    while (left_.load(std::memory_order_acquire) > 0) sched_yield();
  }

 private:
  const RankProgram program_;
  const int ranks_;
  std::atomic<int> next_{0};
  std::atomic<int> left_;
};

}  // namespace

void RunRanks(int ranks, bool waits, int helpers, const Schedule& schedule, RankProgram program) {
  if (waits) {
    auto job = std::make_shared<FiberJob>(ranks, std::move(program));
    for (int h = 0; h < helpers; ++h) schedule([job] { job->Work(); });
    job->Work();
  } else {
    auto job = std::make_shared<PlainJob>(ranks, std::move(program));
    for (int h = 0; h < helpers; ++h) schedule([job] { job->Work(); });
    job->Finish();
  }
}

void RunRanksAsThreads(int ranks, const RankProgram& program) {
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&program, r] {
      ThreadWaiter waiter;
      program(r, waiter);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace jax_overlap
