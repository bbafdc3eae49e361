// Completes the results of a call without waiting for what XLA runs next.
//
// Completing a rank's result runs that rank's program on the completing thread,
// up to the next thing it has to wait for; and XLA's own collectives wait by
// blocking. So no completion may have to wait for another to return. A task for
// each would do that, but waking a thread for each costs more than a small call.
//
// Here the thread that owns the call completes one result after the other, and
// one task stands by to do the same. Whenever a task starts while results are
// left, it first makes sure that another stands by. If all goes well the owner is
// done before the second task has started; if it gets stuck, the tasks take over,
// as many as it takes.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/fibers.h"
#include "core/rendezvous.h"

namespace jax_overlap {

class Completer : public std::enable_shared_from_this<Completer> {
 public:
  // Completes all of `completions`, with `error` unless it is empty. `schedule` is
  // used only before this returns: it may refer to the caller's stack.
  static void CompleteAll(std::vector<Completion> completions, const std::string& error,
                          const Schedule& schedule) {
    if (completions.empty()) return;
    auto self = std::shared_ptr<Completer>(new Completer(std::move(completions), error, schedule));
    {
      std::lock_guard<std::mutex> lock(self->mutex_);
      self->StandBy();
    }
    self->Work();
  }

 private:
  Completer(std::vector<Completion> completions, std::string error, const Schedule& schedule)
      : left_(std::make_move_iterator(completions.begin()),
              std::make_move_iterator(completions.end())),
        error_(std::move(error)),
        schedule_(schedule) {}

  // Has a task standing by while results are left. Results are taken under the
  // lock, and the owner returns only after it has seen that none is left: so
  // `schedule_` is alive here.
  void StandBy() {
    if (left_.empty() || standing_by_) return;
    standing_by_ = true;
    schedule_([self = shared_from_this()] {
      {
        std::lock_guard<std::mutex> lock(self->mutex_);
        self->standing_by_ = false;
      }
      self->Work();
    });
  }

  void Work() {
    for (;;) {
      Completion completion;
      {
        std::lock_guard<std::mutex> lock(mutex_);
        if (left_.empty()) return;
        completion = std::move(left_.front());
        left_.pop_front();
        StandBy();
      }
      completion(error_.empty() ? nullptr : &error_);
    }
  }

  std::mutex mutex_;
  std::deque<Completion> left_;
  bool standing_by_ = false;
  const std::string error_;
  const Schedule& schedule_;
};

}  // namespace jax_overlap
