// The explorer itself: that it finds what can go wrong, and that leaving out executions
// which differ in nothing loses no outcome.
#include "core/explore.h"

#include <cstdint>
#include <functional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "core/explore_search.h"
#include "core/testing.h"

namespace jax_overlap {
namespace {

// What a thread can do, in words 0, 1, .. of its own heap and of others.
class Heaps {
 public:
  explicit Heaps(Machine& machine) : machine_(machine) {}
  void Send(Kind kind, int peer, int word, uint64_t value) {
    machine_.Send(kind, At(peer, word), &value, sizeof(value));
  }
  void Data(int peer, int word) { Send(Kind::kData, peer, word, 1); }
  void Flag(int peer, int word, uint64_t value) { Send(Kind::kFlag, peer, word, value); }
  void Wait(int word, uint64_t value) { machine_.Act(Kind::kWait, Own(word), 8, value); }
  void Read(int word) { machine_.Act(Kind::kRead, Own(word), 8); }
  uint64_t Load(int word) {  // whatever it is
    Wait(word, 0);
    return *Own(word);
  }

 private:
  uint64_t* At(int rank, int word) {
    return reinterpret_cast<uint64_t*>(machine_.heap(rank)) + word;
  }
  uint64_t* Own(int word) { return At(machine_.rank(), word); }
  Machine& machine_;
};

constexpr size_t kHeapBytes = 512;

// The violation that is found in every order of exploring, "" for none.
std::string Violation(const std::function<void(Heaps&, int rank)>& program, int ranks = 2) {
  std::set<std::string> found;
  for (const Orders orders : {Orders::kRaces, Orders::kStates, Orders::kAll}) {
    Machine machine(ranks, 1, kHeapBytes);
    Heaps heaps(machine);
    Search search(machine, orders);
    const Explored explored = search.Explore(
        [&](int rank, int) {
          machine.BeginCall(1);
          program(heaps, rank);
        },
        100000);
    JO_CHECK(!explored.violation.empty() || explored.exhaustive);
    found.insert(explored.violation.substr(0, explored.violation.find_first_of(" :")));
  }
  JO_CHECK(found.size() == 1);
  return *found.begin();
}

void FindsWhatGoesWrong() {
  const auto receive = [](Heaps& heaps) {
    heaps.Wait(0, 1);
    heaps.Read(1);
  };
  JO_CHECK(Violation([&](Heaps& heaps, int rank) {
             if (rank == 1) return receive(heaps);
             heaps.Data(1, 1);
             heaps.Flag(1, 0, 1);
           }) == "");
  JO_CHECK(Violation([&](Heaps& heaps, int rank) {  // the flag is before the data
             if (rank == 1) return receive(heaps);
             heaps.Flag(1, 0, 1);
             heaps.Data(1, 1);
           }) == "early");
  JO_CHECK(Violation([&](Heaps& heaps, int rank) {  // the flag is no signal
             if (rank == 1) return receive(heaps);
             heaps.Data(1, 1);
             heaps.Data(1, 0);
           }) == "early");
  JO_CHECK(Violation([&](Heaps& heaps, int rank) {  // nobody says that it has been read
             if (rank == 1) return receive(heaps);
             heaps.Data(1, 1);
             heaps.Flag(1, 0, 1);
             heaps.Data(1, 1);
           }) == "unread");
  JO_CHECK(Violation([&](Heaps& heaps, int rank) {
             heaps.Wait(0, 1);
             heaps.Flag(1 - rank, 0, 1);
           }) == "deadlock");
}

// What a signal releases reaches who hears of it through others, too.
void SignalsAreCumulative() {
  const auto program = [](bool waits) {
    return [=](Heaps& heaps, int rank) {
      if (rank == 0) {
        heaps.Data(2, 1);
        heaps.Flag(1, 0, 1);
      } else if (rank == 1) {
        if (waits) heaps.Wait(0, 1);
        heaps.Flag(2, 0, 1);
      } else {
        heaps.Wait(0, 1);
        heaps.Read(1);
      }
    };
  };
  JO_CHECK(Violation(program(true), 3) == "");
  JO_CHECK(Violation(program(false), 3) == "early");
}

// Arrivals and loads of two ranks that have nothing to do with each other: 2 x 2 steps in
// any order that keeps each arrival before its load, but all of them the same.
void CountsOrders() {
  const auto executions = [](Orders orders) {
    Machine machine(2, 1, kHeapBytes);
    Heaps heaps(machine);
    const auto program = [&](int rank, int) {
      heaps.Flag(1 - rank, 0, 1);
      heaps.Wait(0, 1);
    };
    return Search(machine, orders).Explore(program, 1000).executions;
  };
  JO_CHECK(executions(Orders::kAll) == 6);
  JO_CHECK(executions(Orders::kRaces) == 1);
}

// Ranks that store, load and wait at random: what they can load, taken together.
struct RandomProgram {
  enum What { kFlag, kData, kLoad, kWait };
  static constexpr What kWhats[] = {kFlag, kData, kLoad, kLoad, kLoad, kWait};
  struct Action {
    What what;
    int peer, word;
  };
  explicit RandomProgram(unsigned seed) : ranks(2 + seed % 2), actions(ranks) {
    std::minstd_rand random(seed);
    for (int rank = 0; rank < ranks; ++rank) {
      const int count = ranks == 2 ? 4 : 3;
      for (int i = 0; i < count; ++i) {
        const int peer = (rank + 1 + static_cast<int>(random() % (ranks - 1))) % ranks;
        const What what = kWhats[random() % (rank > 0 ? 6 : 5)];
        // Data go to a word of their own, and are loaded from there.
        const int data =
            what == kData ? 2 + 4 * rank + i : 2 + 4 * peer + static_cast<int>(random() % 4);
        const int flag = static_cast<int>(random() % 2);
        const bool is_data = what == kData || (what == kLoad && random() % 2 == 0);
        actions[rank].push_back({what, peer, is_data ? data : flag});
      }
    }
    for (int peer = 1; peer < ranks; ++peer) actions[0].push_back({kFlag, peer, 0});
  }

  // Of all executions of that kind; counts them.
  std::set<std::string> Outcomes(Orders orders, size_t* executions) const {
    Machine machine(ranks, 1, kHeapBytes);
    Heaps heaps(machine);
    std::set<std::string> outcomes;
    std::vector<std::string> loaded(ranks);
    int ended = 0;
    const auto program = [&](int rank, int) {
      if (rank == 0) ended = 0;
      loaded[rank].clear();
      uint64_t value = 0;
      for (const auto& [what, peer, word] : actions[rank]) {
        if (what == kFlag) heaps.Flag(peer, word, ++value + 10 * rank);
        if (what == kData) heaps.Data(peer, word);
        if (what == kLoad) loaded[rank] += std::to_string(heaps.Load(word)) + " ";
        if (what == kWait) heaps.Wait(0, 1);  // rank 0 signals in the end, and does not wait
      }
      if (machine.stopped() || ++ended < ranks) return;
      std::string outcome;
      for (const std::string& text : loaded) outcome += text + "/";
      outcomes.insert(outcome);
    };
    const Explored explored = Search(machine, orders).Explore(program, 3000000);
    JO_CHECK(explored.exhaustive && explored.violation.empty());
    *executions = explored.executions;
    return outcomes;
  }

  const int ranks;
  std::vector<std::vector<Action>> actions;
};

int RacesShowAllOutcomes() {
  constexpr int kPrograms = 20;
  for (int seed = 0; seed < kPrograms; ++seed) {
    const RandomProgram program(seed);
    size_t all, few;
    const auto outcomes = program.Outcomes(Orders::kAll, &all);
    JO_CHECK(program.Outcomes(Orders::kRaces, &few) == outcomes);
    JO_CHECK(few <= all && outcomes.size() <= few);
  }
  return kPrograms;
}

}  // namespace
}  // namespace jax_overlap

int main() {
  using namespace jax_overlap;  // NOLINT
  if (!kCanExplore) return 0;
  FindsWhatGoesWrong();
  SignalsAreCumulative();
  CountsOrders();
  const int programs = RacesShowAllOutcomes();
  std::printf("explore_test: %d passed, 0 failed\n", 3 + programs);
}
