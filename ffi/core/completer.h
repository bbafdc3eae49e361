// Completes the results of a call so that no completion waits for another.
//
// Completing a rank's result runs that rank's program on the completing thread, up
// to the next thing it has to wait for; and XLA's own collectives wait by blocking,
// for all ranks. So the thread that owns the call must not complete the others': its
// own rank goes on only after its handler has returned. And one that completes
// results one after the other may get stuck at the first.
//
// Threads of our own do it, as many as it takes: there is always an idle one, or a
// new one is made. Waking a thread for each result would cost more than a small
// call, so the first completes one result after the other, and has a second stand by
// to do the same; a thread that starts while results are left first makes sure that
// another stands by. If all goes well the first is done before the second has begun.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/rendezvous.h"

namespace jax_overlap {

// Runs every task at once, on an idle thread or a new one. Threads are kept.
class GrowingPool {
 public:
  static GrowingPool& Get();
  void Run(std::function<void()> task);

 private:
  void Loop();

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> tasks_;
  size_t idle_ = 0;  // threads that wait; each task in the queue has one of them
};

class Completer : public std::enable_shared_from_this<Completer> {
 public:
  // Completes all of `completions`, with `error` unless it is empty; returns at once.
  static void CompleteAll(std::vector<Completion> completions, std::string error);

 private:
  Completer(std::vector<Completion> completions, std::string error)
      : left_(std::make_move_iterator(completions.begin()),
              std::make_move_iterator(completions.end())),
        error_(std::move(error)) {}

  void StandBy();  // has a thread standing by while results are left; needs the lock
  void Work();

  std::mutex mutex_;
  std::deque<Completion> left_;
  bool standing_by_ = false;
  const std::string error_;
};

}  // namespace jax_overlap
