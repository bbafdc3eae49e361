#include "core/rendezvous.h"

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <random>
#include <thread>

#include "core/completer.h"
#include "core/fibers.h"
#include "core/ledger.h"
#include "core/testing.h"

namespace jax_overlap {
namespace {

using namespace std::chrono_literals;  // NOLINT

Operands OneLeaf(const void* in, void* out, size_t count) { return {{in}, {out}, {count}}; }

// A rank's result, as XLA would wait for it.
class Result {
 public:
  Completion completion() {
    return [this](const std::string* error) {
      std::lock_guard<std::mutex> lock(mutex_);
      ++completed_;
      if (error != nullptr) error_ = *error;
      changed_.notify_all();
    };
  }
  // The error (empty: available); fails the test if there is no result in time.
  std::string Await() {
    std::unique_lock<std::mutex> lock(mutex_);
    JO_CHECK(changed_.wait_for(lock, 20s, [this] { return completed_ > 0; }));
    return error_;
  }
  int completed() {
    std::lock_guard<std::mutex> lock(mutex_);
    return completed_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int completed_ = 0;
  std::string error_;
};

// Runs tasks on threads of their own, as a pool with enough threads would.
Schedule OnThreads(std::vector<std::thread>* threads, std::mutex* mutex) {
  return [threads, mutex](std::function<void()> task) {
    std::lock_guard<std::mutex> lock(*mutex);
    threads->emplace_back(std::move(task));
  };
}

void LastOfManyConcurrentRanksOwnsTheCall() {
  constexpr int kRanks = 5, kRuns = 200;
  auto site = Rendezvous::Make("test", kRanks);
  std::atomic<int> owners{0};
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      std::mt19937 random(rank);
      for (int run = 0; run < kRuns; ++run) {
        if (random() % 4 == 0) std::this_thread::yield();
        const auto in = reinterpret_cast<void*>(static_cast<uintptr_t>(rank + 1));
        auto call = site->Arrive(run, run % 3, rank, OneLeaf(in, nullptr, 7), {});
        if (call == nullptr) continue;
        ++owners;
        JO_CHECK(call->ranks == kRanks && call->counts == std::vector<size_t>{7});
        for (int r = 0; r < kRanks; ++r) {
          JO_CHECK(reinterpret_cast<uintptr_t>(call->inputs[r]) == static_cast<uintptr_t>(r + 1));
        }
      }
    });
  }
  for (auto& thread : threads) thread.join();
  JO_CHECK(owners == kRuns);
}

void AMissingRankFailsTheOthersAndItselfWhenItComes() {
  Ledger::Get().Clear();
  Rendezvous::SetWaitTimeout(200ms);
  auto site = Rendezvous::Make("jax_overlap.test over ('x',)", 3);
  Result results[3];
  for (int rank : {0, 2}) {
    JO_CHECK(!site->Arrive(1, 0, rank, OneLeaf(nullptr, nullptr, 1), results[rank].completion()));
  }
  const std::string error = results[0].Await();
  for (const char* part : {"test over ('x',)", "[0, 2] of 3", "[1]", "WAIT_TIMEOUT_S"}) {
    JO_CHECK_IN(error.find(part) != std::string::npos, "%s", error.c_str());
  }
  JO_CHECK(results[2].Await() == error);
  // The late rank hears the same; the ledger has it once; a new run is not affected.
  JO_CHECK(!site->Arrive(1, 0, 1, OneLeaf(nullptr, nullptr, 1), results[1].completion()));
  JO_CHECK(results[1].Await() == error);
  JO_CHECK(Ledger::Get().Texts() == std::vector<std::string>{error});
  for (int rank = 0; rank < 3; ++rank) {
    auto call = site->Arrive(2, 0, rank, OneLeaf(nullptr, nullptr, 1), {});
    JO_CHECK((call != nullptr) == (rank == 2));
  }
  Ledger::Get().Clear();
  Rendezvous::SetWaitTimeout(60s);
}

void RanksThatDisagreeAllFail() {
  Ledger::Get().Clear();
  auto site = Rendezvous::Make("test", 3);
  Result results[3];
  site->Arrive(1, 0, 0, OneLeaf(nullptr, nullptr, 8), results[0].completion());
  site->Arrive(1, 0, 1, OneLeaf(nullptr, nullptr, 9), results[1].completion());
  site->Arrive(1, 0, 2, OneLeaf(nullptr, nullptr, 8), results[2].completion());
  for (Result& result : results) {
    JO_CHECK(result.Await().find("other sizes") != std::string::npos);
    JO_CHECK(result.completed() == 1);
  }
  Result twice[2];
  for (Result& result : twice) {
    site->Arrive(2, 0, 0, OneLeaf(nullptr, nullptr, 8), result.completion());
  }
  for (Result& result : twice) JO_CHECK(result.Await().find("twice") != std::string::npos);
  JO_CHECK(Ledger::Get().Texts().size() == 2);
  Ledger::Get().Clear();
}

void CompletionsThatBlockHoldUpNeitherTheOthersNorTheCaller() {
  constexpr int kRanks = 6;
  for (int round = 0; round < 50; ++round) {
    // Every completion waits until all have begun and the caller has gone on: none
    // may depend on another, as in a collective of XLA's that follows.
    std::mutex mutex;
    std::condition_variable changed;
    int begun = 0, ended = 0;
    bool caller_went_on = false;
    std::vector<Completion> completions;
    for (int r = 0; r < kRanks; ++r) {
      completions.push_back([&](const std::string* error) {
        std::unique_lock<std::mutex> lock(mutex);
        JO_CHECK(error == nullptr);
        ++begun;
        changed.notify_all();
        JO_CHECK(changed.wait_for(lock, 20s, [&] { return begun == kRanks && caller_went_on; }));
        ++ended;
        changed.notify_all();
      });
    }
    Completer::CompleteAll(std::move(completions), "");
    std::unique_lock<std::mutex> lock(mutex);
    caller_went_on = true;
    changed.notify_all();
    JO_CHECK(changed.wait_for(lock, 20s, [&] { return ended == kRanks; }));
  }
}

#if !defined(__SANITIZE_THREAD__)  // it does not know about switched stacks
void FibersRunRanksThatWaitForEachOther(int helpers) {
  constexpr int kRanks = 7, kRounds = 20;
  for (int repeat = 0; repeat < 20; ++repeat) {
    auto turn = std::make_shared<std::atomic<int>>(0);
    std::vector<std::thread> threads;
    std::mutex mutex;
    // Ranks take turns from the last to the first: each has to wait for all others.
    RunRanks(kRanks, /*waits=*/true, helpers, OnThreads(&threads, &mutex),
             [turn](int rank, Waiter& waiter) {
               for (int round = 0; round < kRounds; ++round) {
                 const int mine = round * kRanks + (kRanks - 1 - rank);
                 while (turn->load() != mine) waiter.Pause();
                 turn->store(mine + 1);
               }
             });
    JO_CHECK(*turn == kRanks * kRounds);
    for (auto& thread : threads) thread.join();
  }
}

#endif

void ProgramsThatDoNotWaitRunOnce(int helpers) {
  std::vector<std::thread> threads;
  std::mutex mutex;
  auto runs = std::make_shared<std::vector<std::atomic<int>>>(9);
  RunRanks(9, /*waits=*/false, helpers, OnThreads(&threads, &mutex),
           [runs](int rank, Waiter&) { ++(*runs)[rank]; });
  for (auto& count : *runs) JO_CHECK(count == 1);
  for (auto& thread : threads) thread.join();
}

}  // namespace
}  // namespace jax_overlap

int main() {
  using namespace jax_overlap;  // NOLINT
  LastOfManyConcurrentRanksOwnsTheCall();
  AMissingRankFailsTheOthersAndItselfWhenItComes();
  RanksThatDisagreeAllFail();
  CompletionsThatBlockHoldUpNeitherTheOthersNorTheCaller();
  int passed = 4;
#if !defined(__SANITIZE_THREAD__)
  FibersRunRanksThatWaitForEachOther(0);
  FibersRunRanksThatWaitForEachOther(2);
  passed += 2;
#endif
  ProgramsThatDoNotWaitRunOnce(0);
  ProgramsThatDoNotWaitRunOnce(2);
  std::printf("rendezvous_test: %d passed, 0 failed\n", passed + 2);
}
