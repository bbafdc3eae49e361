#include "core/completer.h"

#include <thread>

namespace jax_overlap {

GrowingPool& GrowingPool::Get() {
  static GrowingPool* const pool = new GrowingPool;  // its threads are never joined
  return *pool;
}

void GrowingPool::Run(std::function<void()> task) {
  std::unique_lock<std::mutex> lock(mutex_);
  tasks_.push_back(std::move(task));
  const bool enough = idle_ >= tasks_.size();
  lock.unlock();
  if (enough) {
    wake_.notify_one();
  } else {
    std::thread([this] { Loop(); }).detach();
  }
}

void GrowingPool::Loop() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    while (tasks_.empty()) {
      ++idle_;
      wake_.wait(lock);
      --idle_;
    }
    std::function<void()> task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    task();
    task = nullptr;
    lock.lock();
  }
}

void Completer::CompleteAll(std::vector<Completion> completions, std::string error) {
  auto self = std::shared_ptr<Completer>(new Completer(std::move(completions), std::move(error)));
  std::lock_guard<std::mutex> lock(self->mutex_);
  self->StandBy();
}

void Completer::StandBy() {
  if (left_.empty() || standing_by_) return;
  standing_by_ = true;
  GrowingPool::Get().Run([self = shared_from_this()] {
    {
      std::lock_guard<std::mutex> lock(self->mutex_);
      self->standing_by_ = false;
    }
    self->Work();
  });
}

void Completer::Work() {
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

}  // namespace jax_overlap
