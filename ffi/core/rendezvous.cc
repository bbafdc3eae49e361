#include "core/rendezvous.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <sstream>
#include <thread>

#include "core/ledger.h"
#include "core/mutants.h"

namespace jax_overlap {
namespace {

using Clock = Rendezvous::Clock;

std::atomic<int64_t> g_limit_ns{60'000'000'000};

// Looks at all call sites several times within the limit while any call waits.
class Watchdog {
 public:
  static Watchdog& Get() {
    static Watchdog* const watchdog = new Watchdog;  // its thread is never joined
    return *watchdog;
  }

  void Add(const std::shared_ptr<Rendezvous>& site) {
    std::lock_guard<std::mutex> lock(mutex_);
    sites_.push_back(site);
  }

  void Wake() {
    if (!idle_.load(std::memory_order_acquire)) return;
    std::lock_guard<std::mutex> lock(mutex_);
    idle_ = false;
    wake_.notify_one();
  }

 private:
  Watchdog() {
    std::thread([this] { Run(); }).detach();
  }

  void Run() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return !idle_.load(); });
      wake_.wait_for(lock, Period());
      // Idle is set before the look: a call that begins during it wakes us again.
      idle_ = true;
      std::vector<std::weak_ptr<Rendezvous>> sites = sites_;
      lock.unlock();
      size_t waiting = 0;
      for (const auto& weak : sites) {
        if (auto site = weak.lock()) waiting += site->Expire(Clock::now());
      }
      lock.lock();
      if (waiting > 0) idle_ = false;
      sites_.erase(std::remove_if(sites_.begin(), sites_.end(),
                                  [](const auto& site) { return site.expired(); }),
                   sites_.end());
    }
  }

  static Clock::duration Period() {
    return std::min<Clock::duration>(Rendezvous::WaitTimeout() / 8, std::chrono::milliseconds(250));
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<bool> idle_{true};
  std::vector<std::weak_ptr<Rendezvous>> sites_;
};

std::string RankList(const std::vector<bool>& here, bool value) {
  std::ostringstream text;
  const char* separator = "";
  for (size_t r = 0; r < here.size(); ++r) {
    if (here[r] != value) continue;
    text << separator << r;
    separator = ", ";
  }
  return text.str();
}

}  // namespace

void Rendezvous::SetWaitTimeout(std::chrono::duration<double> limit) {
  g_limit_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(limit).count();
}

Clock::duration Rendezvous::WaitTimeout() { return std::chrono::nanoseconds(g_limit_ns.load()); }

std::shared_ptr<Rendezvous> Rendezvous::Make(std::string what, int ranks) {
  auto site = std::shared_ptr<Rendezvous>(new Rendezvous(std::move(what), ranks));
  Watchdog::Get().Add(site);
  return site;
}

std::optional<std::string> Rendezvous::Admit(Pending& pending, int rank,
                                             const Operands& operands) const {
  if (pending.error) return pending.error;
  if (pending.here[rank]) {
    return what_ + ": rank " + std::to_string(rank) +
           " arrived twice at one call. This is a fault of jax_overlap: please report it";
  }
  if (pending.call.counts != operands.counts) {
    return what_ + ": rank " + std::to_string(rank) +
           " came with other sizes than the ranks before it. All ranks must call with the same "
           "shapes";
  }
  return std::nullopt;
}

std::unique_ptr<HostCall> Rendezvous::Arrive(int64_t run, int group, int rank, Operands operands,
                                             Completion completion) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto [it, first] = pending_.try_emplace({run, group});
  Pending& pending = it->second;
  if (first) {
    pending.since = Clock::now();
    pending.here.resize(ranks_);
    pending.call.ranks = ranks_;
    pending.call.counts = operands.counts;
    pending.call.inputs.resize(operands.inputs.size() * ranks_);
    pending.call.outputs.resize(operands.outputs.size() * ranks_);
    pending.call.completions.resize(ranks_);
  }
  ++pending.arrived;
  if (std::optional<std::string> error = Admit(pending, rank, operands)) {
    std::vector<Failure> failures;
    if (!pending.error) Fail(pending, *error, &failures);
    failures.push_back({std::move(completion), *error});
    if (pending.arrived == ranks_) pending_.erase(it);
    lock.unlock();
    CompleteFailed(std::move(failures));
    return nullptr;
  }
  pending.here[rank] = true;
  for (size_t i = 0; i < operands.inputs.size(); ++i) {
    pending.call.inputs[i * ranks_ + rank] = operands.inputs[i];
  }
  for (size_t i = 0; i < operands.outputs.size(); ++i) {
    pending.call.outputs[i * ranks_ + rank] = operands.outputs[i];
  }
  pending.call.completions[rank] = std::move(completion);
  if (pending.arrived < ranks_) {
    lock.unlock();
    if (first) Watchdog::Get().Wake();
    return nullptr;
  }
  // Gone from the table before anything completes, so that a rank that goes on to
  // the next iteration finds a fresh call.
  auto call = std::make_unique<HostCall>(std::move(pending.call));
  pending_.erase(it);
  return call;
}

size_t Rendezvous::Expire(Clock::time_point now) {
  std::vector<Failure> failures;
  size_t waiting = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [key, pending] : pending_) {
      if (pending.error) continue;
      const Clock::duration waited = now - pending.since;
      if (waited < WaitTimeout() || JO_MUTANT("deadline_ignored")) {
        ++waiting;
      } else {
        Fail(pending, TimeoutText(pending, key, std::chrono::duration<double>(waited).count()),
             &failures);
      }
    }
  }
  CompleteFailed(std::move(failures));
  return waiting;
}

void Rendezvous::Fail(Pending& pending, const std::string& error,
                      std::vector<Failure>* failures) const {
  pending.error = error;
  Ledger::Get().Record(error);
  for (int r = 0; r < ranks_; ++r) {
    if (pending.here[r]) failures->push_back({std::move(pending.call.completions[r]), error});
  }
}

void Rendezvous::CompleteFailed(std::vector<Failure> failures) {
  // Each on a thread of its own: what XLA does next on that thread may block.
  for (Failure& failure : failures) {
    std::thread([failure = std::move(failure)] { failure.completion(&failure.error); }).detach();
  }
}

std::string Rendezvous::TimeoutText(const Pending& pending, const Key& key, double waited) const {
  std::ostringstream text;
  text << what_ << ": ranks [" << RankList(pending.here, true) << "] of " << ranks_ << " waited "
       << waited << " s for ranks [" << RankList(pending.here, false)
       << "], which did not call (group " << key.second << ", run " << key.first
       << "). Every device of the axis has to run this call: look for a lax.cond or while_loop "
          "that depends on the device, or an error on the missing ranks. "
          "JAX_OVERLAP_WAIT_TIMEOUT_S sets the limit";
  return text.str();
}

}  // namespace jax_overlap
