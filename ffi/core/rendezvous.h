// Where the ranks of a collective call meet on the CPU.
//
// XLA runs every device's program on threads that must not block: three
// collectives that wait for each other's ranks would take all threads there are.
// So a rank that calls leaves its operands and a way to complete its result, and
// its handler returns. The last rank to arrive owns the call: it runs the ranks'
// programs and completes the results. A watchdog fails calls that wait too long.
//
// Calls are told apart by call site (one Rendezvous each), run and group. One call
// site cannot be at two calls of one run and group: a rank comes to its next
// iteration only after its result of this one.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace jax_overlap {

// Completes a rank's result: with an error text, or (null) as available.
using Completion = std::function<void(const std::string* error)>;

// One rank's operands and results.
struct Operands {
  std::vector<const void*> inputs;
  std::vector<void*> outputs;
  std::vector<size_t> counts;  // elements, an input
};

// A call at which all ranks have arrived.
struct HostCall {
  int ranks = 0;
  std::vector<size_t> counts;       // an input
  std::vector<const void*> inputs;  // [input * ranks + rank]
  std::vector<void*> outputs;       // [result * ranks + rank]
  std::vector<Completion> completions;
};

class Rendezvous : public std::enable_shared_from_this<Rendezvous> {
 public:
  using Clock = std::chrono::steady_clock;

  // `what` names the op and its axes in errors; `ranks` a group.
  static std::shared_ptr<Rendezvous> Make(std::string what, int ranks);

  // Rank `rank` of `group` arrives in run `run`. Returns the call to the last
  // rank; to the others null, and their completion is called later.
  std::unique_ptr<HostCall> Arrive(int64_t run, int group, int rank, Operands operands,
                                   Completion completion);

  // Fails the calls whose limit has passed; returns how many still wait.
  size_t Expire(Clock::time_point now);

  const std::string& what() const { return what_; }

  static void SetWaitTimeout(std::chrono::duration<double> limit);
  static Clock::duration WaitTimeout();

 private:
  struct Pending {
    HostCall call;
    std::vector<bool> here;
    int arrived = 0;
    Clock::time_point since;
    // Once it has failed. It then stays here for the ranks that come later, which
    // get the same error, until the last has come.
    std::optional<std::string> error;
  };
  struct Failure {
    Completion completion;
    std::string error;
  };
  using Key = std::pair<int64_t, int>;

  Rendezvous(std::string what, int ranks) : what_(std::move(what)), ranks_(ranks) {}
  std::optional<std::string> Admit(Pending& pending, int rank, const Operands& operands) const;
  void Fail(Pending& pending, const std::string& error, std::vector<Failure>* failures) const;
  static void CompleteFailed(std::vector<Failure> failures);
  std::string TimeoutText(const Pending& pending, const Key& key, double waited) const;

  const std::string what_;
  const int ranks_;
  std::mutex mutex_;
  std::map<Key, Pending> pending_;
};

}  // namespace jax_overlap
