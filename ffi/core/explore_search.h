// Explores what a Machine can do, depth first, by running it again from the start with
// another choice at the end of the common part.
//
// Steps that touch different words commute, so it is enough to try both orders of those
// that conflict and that nothing else orders: a race. Before its first step, a step that
// leads to the other order is tried too (source sets: Abdulla, Aronis, Jonsson, Sagonas,
// POPL 2014), and sleep sets (Godefroid 1996) keep what was tried from being tried again
// in an order that is the same. A protocol in which all accesses to the data are ordered
// has one execution then, however many ranks there are.
//
// Without that argument, all states can be visited, as long as they are not too many.
#pragma once

#include <algorithm>
#include <functional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "core/explore.h"

namespace jax_overlap {

// Which executions are explored.
enum class Orders {
  kRaces,   // one for each outcome of the races
  kStates,  // those that lead to all states, up to a collision of 64-bit hashes
  kAll,     // every one: for tests of this file
};

struct Explored {
  size_t executions = 0;
  size_t states = 0;  // if these are what counts
  bool exhaustive = false;
  std::string violation;           // or empty
  std::vector<std::string> trace;  // the shortest that was found for it
};

class Search {
 public:
  Search(Machine& machine, Orders orders) : machine_(machine), orders_(orders) {}

  // Explores up to `limit` executions.
  Explored Explore(const std::function<void(int rank, int thread)>& program, size_t limit) {
    size_t left = limit;
    do {
      first_new_ = nodes_.empty() ? 0 : nodes_.size() - 1;
      machine_.Run(program, [&] { return Choose(); });
      ++found_.executions;
      Keep(machine_.violation());
      if (!found_.violation.empty()) left = Min(left, kMoreAfterViolation);
      JO_CHECK(nodes_.size() == machine_.steps().size());
      if (orders_ == Orders::kRaces) TryRacesTheOtherWay();
    } while (NextChoice() && --left > 0);
    found_.exhaustive = nodes_.empty();
    found_.states = states_.size();
    return found_;
  }

 private:
  static constexpr size_t kMoreAfterViolation = 1000;  // for a shorter trace

  struct Sleeper {
    Mover mover;
    Access access;
  };
  // The state before a step, and which movers have made it or should make it.
  struct Node {
    Mover chosen;
    std::vector<Mover> wanted;
    std::vector<Sleeper> asleep;
  };
  static bool Sleeps(const Node& node, Mover mover) {
    return std::any_of(node.asleep.begin(), node.asleep.end(),
                       [&](const Sleeper& s) { return s.mover == mover; });
  }

  Mover Choose() {
    const size_t depth = machine_.steps().size();
    if (depth < nodes_.size()) return nodes_[depth].chosen;
    const std::vector<Mover> movable = machine_.Movable();
    if (movable.empty()) return Machine::kNone;
    Node node{Machine::kNone, {}, {}};
    if (orders_ == Orders::kRaces) {
      if (depth > 0) node.asleep = StillAsleep(nodes_[depth - 1]);
      for (const Mover mover : movable) {
        if (node.wanted.empty() && !Sleeps(node, mover)) node.wanted = {mover};
      }
    } else if (orders_ == Orders::kAll || states_.insert(machine_.State()).second) {
      node.wanted = movable;
    }
    if (node.wanted.empty()) return Machine::kNone;
    node.chosen = node.wanted[0];
    nodes_.push_back(node);
    return node.chosen;
  }

  // After the step that was chosen at `node`: those with which it commutes.
  std::vector<Sleeper> StillAsleep(const Node& node) const {
    std::vector<Sleeper> still;
    const Access& last = machine_.steps().back().access;
    for (const Sleeper& sleeper : node.asleep) {
      if (!Conflict(sleeper.access, last)) still.push_back(sleeper);
    }
    return still;
  }

  // For a race of steps i and j: at node i, one of those that can start an execution of
  // which j is a part and i is not.
  void TryRacesTheOtherWay() {
    const std::vector<Step>& steps = machine_.steps();
    for (const auto& [i, j] : machine_.races()) {
      if (j < static_cast<int>(first_new_)) continue;  // an execution before has seen it
      std::vector<int> others;
      for (int k = i + 1; k <= j; ++k) {
        if (k == j || !steps[k].past[i]) others.push_back(k);
      }
      std::vector<Mover> first;
      for (const int k : others) {
        const bool is_first = std::none_of(others.begin(), others.end(), [&](int before) {
          return before < k && steps[k].past[before];
        });
        if (is_first) first.push_back(steps[k].mover);
      }
      std::vector<Mover>& wanted = nodes_[i].wanted;
      if (std::find_first_of(wanted.begin(), wanted.end(), first.begin(), first.end()) ==
          wanted.end()) {
        wanted.push_back(first[0]);
      }
    }
  }

  // Goes back to the last node with something left to try; false if there is none.
  bool NextChoice() {
    for (; !nodes_.empty(); nodes_.pop_back()) {
      Node& node = nodes_.back();
      node.asleep.push_back({node.chosen, machine_.steps()[nodes_.size() - 1].access});
      for (const Mover mover : node.wanted) {
        if (Sleeps(node, mover)) continue;
        node.chosen = mover;
        return true;
      }
    }
    return false;
  }

  void Keep(const std::string& violation) {
    if (violation.empty()) return;
    std::vector<std::string> trace = machine_.Trace();
    if (!found_.violation.empty() && trace.size() >= found_.trace.size()) return;
    found_.violation = violation;
    found_.trace = std::move(trace);
  }

  Machine& machine_;
  const Orders orders_;
  std::vector<Node> nodes_;
  size_t first_new_ = 0;  // node whose choice is another than in the execution before
  std::unordered_set<std::string> states_;
  Explored found_;
};

}  // namespace jax_overlap
