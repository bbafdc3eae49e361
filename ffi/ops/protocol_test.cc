// Every flag protocol, explored: the real algorithms, in every order of loads, stores and
// arrivals that makes a difference (core/explore.h says on which memory model).
//
// Several calls in a row reuse the slots without a barrier in between, as on a GPU. With
// the name of a protocol as an argument only this one is explored. With a mutant
// (core/mutants.h) it says what is violated, and the shortest way there, and fails.
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "core/explore.h"
#include "core/explore_link.h"
#include "core/explore_search.h"
#include "ops/all_gather.h"
#include "ops/all_gather_matmul.h"
#include "ops/all_to_all.h"
#include "ops/matmul_reduce_scatter.h"
#include "ops/psum.h"
#include "ops/psum_scatter.h"

namespace jax_overlap {

// Where the matmuls store their products.
Machine* multiplying = nullptr;

template <>
void Gemm(const GemmShape& s, const Element* a, const Element* b, bool accumulate, Element* c) {
  for (size_t i = 0; i < s.m; ++i) {
    for (size_t j = 0; j < s.n; ++j) {
      int64_t sum = accumulate ? c[i * s.ldc + j].value : 0;
      for (size_t k = 0; k < s.k; ++k) {
        const Element* right = b + (s.transposed ? j * s.ldb + k : k * s.ldb + j);
        sum += Load(*multiplying, a + i * s.lda + k).value * right->value;
      }
      Store(*multiplying, c + i * s.ldc + j, {sum});
    }
  }
}

namespace {

// How a protocol is explored.
struct Scope {
  Orders orders;
  int ranks, node_size;
  int calls;
  int threads = 1;      // of a rank
  size_t elements = 1;  // in a slice; an element is a cell
  size_t chunks = 1;    // in which a call is cut
  bool shrinks = false;
  int cell_pieces = 1;
  int give_ups = 0;

  // `n` threads share a rank's loops as those of a CUDA block do.
  Scope Threads(int n) const {
    Scope s = *this;
    s.threads = n;
    s.elements = n;
    return s;
  }
  Scope Chunks(size_t n) const {
    Scope s = *this;
    s.chunks = n;
    s.elements = n;
    return s;
  }
  // The second call has one element only.
  Scope Shrinking() const {
    Scope s = *this;
    s.elements = 2 * s.threads;
    s.shrinks = true;
    return s;
  }
  // A cell arrives in two pieces, as on the host.
  Scope Halves() const {
    Scope s = *this;
    s.cell_pieces = 2;
    return s;
  }
  // Up to `n` waits pass their limit. A rank that has failed once fails ever after.
  Scope GivingUp(int n) const {
    Scope s = *this;
    s.give_ups = n;
    return s;
  }
  size_t Elements(int call) const { return shrinks && call == 1 ? 1 : elements; }
  size_t Capacity() const { return elements / chunks; }  // of a slice in a chunk
};

// What one thread does in a call.
struct Part {
  const Scope& scope;
  const ExploreThreads& threads;
  ExploreLink& link;
  char* heap;
  int call;
  const Element* in;
  Element* out;
};

struct Protocol {
  const char* name;
  std::function<size_t(const Scope&)> heap_bytes;
  // Elements of a rank's operand and of its result.
  std::function<size_t(const Scope&, int call)> in, out;
  std::function<void(const Part&)> run;
  // Element i of the result of `rank`.
  std::function<int64_t(const Scope&, int call, int rank, size_t i)> expected;
  bool one_thread = false, one_chunk = false;
};

// Differs from call to call, rank to rank and element to element, as do sums of it.
int64_t InputAt(int call, int rank, size_t i) {
  return 1 + call * 1000 + rank * 10 + static_cast<int64_t>(i) * 100 + (rank * rank + call) % 7;
}
int64_t SumAt(const Scope& s, int call, size_t i) {
  int64_t sum = 0;
  for (int rank = 0; rank < s.ranks; ++rank) sum += InputAt(call, rank, i);
  return sum;
}

class Exploration {
 public:
  Exploration(const Protocol& protocol, const Scope& scope)
      : protocol_(protocol),
        scope_(scope),
        machine_(scope.ranks, scope.threads, protocol.heap_bytes(scope), scope.give_ups) {
    for (int call = 0; call < scope.calls; ++call) {
      for (int rank = 0; rank < scope.ranks; ++rank) {
        inputs_.emplace_back();
        for (size_t i = 0; i < protocol.in(scope, call); ++i) {
          inputs_.back().push_back({InputAt(call, rank, i)});
        }
        outputs_.emplace_back(protocol.out(scope, call));
      }
    }
  }

  Explored Run() {
    multiplying = &machine_;
    Search search(machine_, scope_.orders);
    return search.Explore([&](int rank, int thread) { RunThread(rank, thread); }, kLimit);
  }

 private:
  static constexpr size_t kLimit = 1000000;  // executions

  void RunThread(int rank, int index) {
    const ExploreThreads threads(machine_, index);
    bool failed = false;
    for (int call = 0; call < scope_.calls; ++call) {
      machine_.BeginCall(call + 1);
      ExploreLink link(machine_, rank, scope_.cell_pieces, failed);
      const std::vector<Element>& in = inputs_[call * scope_.ranks + rank];
      std::vector<Element>& out = outputs_[call * scope_.ranks + rank];
      if (index == 0) out.assign(out.size(), Element{-1});
      protocol_.run({scope_, threads, link, machine_.heap(rank), call, in.data(), out.data()});
      threads.sync();  // a kernel ends
      if (index == 0 && !link.failed() && !machine_.stopped()) CheckResult(call, rank, out);
      failed = link.failed() && !JO_MUTANT("forgotten_failure");
    }
  }
  void CheckResult(int call, int rank, const std::vector<Element>& out) {
    for (size_t i = 0; i < out.size(); ++i) {
      const int64_t right = protocol_.expected(scope_, call, rank, i);
      if (out[i].value == right) continue;
      return machine_.Fail("wrong result: element " + std::to_string(i) + " of rank " +
                           std::to_string(rank) + " in call " + std::to_string(call + 1) + " is " +
                           std::to_string(out[i].value) + ", not " + std::to_string(right));
    }
  }

  const Protocol& protocol_;
  const Scope scope_;
  Machine machine_;
  std::vector<std::vector<Element>> inputs_, outputs_;  // [call][rank]
};

// Of `slices` slices.
template <class Algorithm>
Protocol Psum(const char* name, int (*slices)(const Scope&)) {
  const auto shape = [](const Scope& s, int rank) { return TeamShape{rank, s.ranks, s.node_size}; };
  const auto capacity = [=](const Scope& s) { return slices(s) * s.Capacity(); };
  const auto count = [=](const Scope& s, int call) {
    return s.Elements(call) < s.elements ? s.Elements(call) : slices(s) * s.elements;
  };
  return {name,
          [=](const Scope& s) { return PsumChannelBytes<Algorithm>(shape(s, 0), capacity(s)); },
          count,
          count,
          [=](const Part& p) {
            RunPsum<Algorithm>(p.threads, p.link, shape(p.scope, p.link.rank()), p.heap,
                               capacity(p.scope), p.in, count(p.scope, p.call), p.out);
          },
          [](const Scope& s, int call, int, size_t i) { return SumAt(s, call, i); }};
}

template <class Algorithm, class Expected>
Protocol OnBlocks(const char* name, bool in_parts, bool out_parts, Expected expected) {
  const auto count = [](bool parts) {
    return [=](const Scope& s, int call) { return (parts ? s.ranks : 1) * s.Elements(call); };
  };
  return {name,
          [](const Scope& s) { return BlockChannelBytes<Element>(s.ranks, s.Capacity()); },
          count(in_parts),
          count(out_parts),
          [](const Part& p) {
            const Blocks blocks{p.scope.ranks, 1, p.scope.Elements(p.call)};
            RunBlocks<Algorithm>(p.threads, p.link, p.heap, p.scope.Capacity(), blocks, p.in,
                                 p.out);
          },
          expected};
}

// x [rows, 1] times w [1, 1], which lies behind x in the operand.
template <class Sliced, class Run, class Expected>
Protocol Matmul(const char* name, bool scatters, Run run, Expected expected) {
  const auto rows = [=](const Scope& s, int call) {
    return (scatters ? s.ranks : 1) * s.Elements(call);
  };
  // The chunk of a scattered part is a block, which is larger than what is tried here.
  const auto capacity = [=](const Scope& s) { return scatters ? s.elements : s.Capacity(); };
  return {name,
          [=](const Scope& s) {
            Carver carver(nullptr);
            Sliced::Carve(carver, s.ranks, capacity(s));
            return carver.bytes();
          },
          [=](const Scope& s, int call) { return rows(s, call) + 1; },
          [=](const Scope& s, int call) { return (scatters ? 1 : 2 * s.ranks) * s.Elements(call); },
          [=](const Part& p) {
            const int rank = p.link.rank(), ranks = p.scope.ranks;
            const size_t m = rows(p.scope, p.call);
            std::vector<const void*> inputs(2 * ranks);  // of other ranks, none is used
            std::vector<void*> outputs(2 * ranks);
            inputs[rank] = p.in, inputs[ranks + rank] = p.in + m;
            outputs[rank] = p.out, outputs[ranks + rank] = p.out + ranks * m;
            Carver carver(p.heap);
            run(Sliced::Carve(carver, ranks, capacity(p.scope)), p,
                MatmulShape{Cut::kRows, ranks, 1, 1, m, {{1, 1, false}}},
                MatmulOperands(inputs.data(), outputs.data(), ranks, 1));
          },
          expected,
          /*one_thread=*/true,
          /*one_chunk=*/scatters};
}

std::vector<Protocol> Protocols() {
  // Element i of a result in which the ranks' parts lie side by side.
  const auto source = [](const Scope& s, int call, size_t i) {
    return static_cast<int>(i / s.Elements(call));
  };
  const auto at = [](const Scope& s, int call, size_t i) { return i % s.Elements(call); };
  return {
      Psum<OneShot<Element>>("one_shot", [](const Scope&) { return 1; }),
      Psum<OneShot<Element, 2, 4>>("one_shot_several", [](const Scope&) { return 1; }),
      Psum<OneShotByFlags<Element>>("one_shot_by_flags", [](const Scope&) { return 1; }),
      Psum<TwoShot<Element, Steps::kFlags>>("two_shot", [](const Scope& s) { return s.ranks; }),
      Psum<TwoShot<Element, Steps::kCells>>("two_shot_cells",
                                            [](const Scope& s) { return s.ranks; }),
      Psum<Nvrar<Element, Steps::kFlags>>("nvrar", [](const Scope& s) { return s.node_size; }),
      Psum<Nvrar<Element, Steps::kCells>>("nvrar_cells",
                                          [](const Scope& s) { return s.node_size; }),
      OnBlocks<PsumScatter>("psum_scatter", true, false,
                            [](const Scope& s, int call, int rank, size_t i) {
                              return SumAt(s, call, rank * s.Elements(call) + i);
                            }),
      OnBlocks<AllGather>("all_gather", false, true,
                          [=](const Scope& s, int call, int, size_t i) {
                            return InputAt(call, source(s, call, i), at(s, call, i));
                          }),
      OnBlocks<AllToAll>("all_to_all", true, true,
                         [=](const Scope& s, int call, int rank, size_t i) {
                           return InputAt(call, source(s, call, i),
                                          rank * s.Elements(call) + at(s, call, i));
                         }),
      Matmul<SlicedMatmulReduceScatter<Element>>(
          "matmul_reduce_scatter", true,
          [](const auto& sliced, const Part& p, const auto& shape, const auto& operands) {
            sliced.template Run<Element>(p.threads, p.link, shape, operands);
          },
          [](const Scope& s, int call, int rank, size_t i) {
            const size_t n = s.Elements(call);
            int64_t sum = 0;
            for (int r = 0; r < s.ranks; ++r) {
              sum += InputAt(call, r, rank * n + i) * InputAt(call, r, s.ranks * n);
            }
            return sum;
          }),
      Matmul<SlicedAllGatherMatmul<Element>>(
          "all_gather_matmul", false,
          [](const auto& sliced, const Part& p, const auto& shape, const auto& operands) {
            sliced.template Run<Element>(p.threads, p.link, shape, operands, /*gathered=*/true);
          },
          [=](const Scope& s, int call, int rank, size_t i) {
            const size_t n = s.Elements(call), rows = s.ranks * n;
            const int64_t x = InputAt(call, source(s, call, i % rows), at(s, call, i % rows));
            return i < rows ? x * InputAt(call, rank, n) : x;
          }),
  };
}

// Up to 3 ranks, every state there is; beyond, and with several threads a rank, what differs
// in the order of a race.
std::vector<Scope> Scopes(const Protocol& protocol) {
  const Orders states = Orders::kStates, races = Orders::kRaces;
  if (std::string(protocol.name).rfind("nvrar", 0) == 0) {
    return {
        Scope{states, 2, 1, 3},  // doubling
        Scope{states, 3, 1, 3},  // with a fold
        Scope{states, 2, 1, 2}.Chunks(2),
        Scope{states, 2, 2, 3},  // in a node
        Scope{states, 4, 2, 2},  // both
        Scope{states, 4, 1, 2},
        Scope{races, 3, 1, 3}.Threads(2).Shrinking(),
        Scope{races, 4, 1, 3}.Threads(2).Halves(),
        Scope{races, 4, 2, 3}.Threads(2).Shrinking(),
        Scope{races, 6, 2, 2}.Threads(2),
        Scope{states, 2, 1, 3}.GivingUp(3),
        Scope{states, 3, 1, 3}.GivingUp(2),
        Scope{states, 2, 2, 3}.GivingUp(2),
    };
  }
  std::vector<Scope> scopes = {
      Scope{states, 2, 2, 3},
      Scope{states, 3, 3, 2},
      Scope{states, 2, 2, 2}.Chunks(2),
      Scope{states, 2, 2, 3}.Shrinking().Halves(),
      Scope{races, 3, 3, 3},
      Scope{races, 4, 4, 2},  // of too many states
      Scope{states, 2, 2, 3}.GivingUp(2),
  };
  if (protocol.one_thread) return scopes;
  scopes.push_back(Scope{states, 2, 2, 3}.Threads(2));
  scopes.push_back(Scope{races, 3, 3, 3}.Threads(2).Shrinking());
  scopes.push_back(Scope{races, 4, 4, 2}.Threads(2).Halves());
  return scopes;
}

std::string Words(const Scope& s) {
  std::string words = std::to_string(s.ranks) + " ranks";
  if (s.node_size < s.ranks) words += " in nodes of " + std::to_string(s.node_size);
  words += ", " + std::to_string(s.calls) + " calls";
  if (s.threads > 1) words += ", " + std::to_string(s.threads) + " threads";
  if (s.elements > 1) words += ", " + std::to_string(s.elements) + " elements";
  if (s.chunks > 1) words += " in " + std::to_string(s.chunks) + " chunks";
  if (s.shrinks) words += " or 1";
  if (s.cell_pieces > 1) words += ", cells in halves";
  if (s.give_ups > 0) words += ", giving up " + std::to_string(s.give_ups) + " times";
  return words;
}

// Whether nothing is violated, within any scope.
bool Explore(const Protocol& protocol) {
  for (const Scope& scope : Scopes(protocol)) {
    if (scope.chunks > 1 && protocol.one_chunk) continue;
    const Explored explored = Exploration(protocol, scope).Run();
    std::printf("%s, %s: %zu executions", protocol.name, Words(scope).c_str(), explored.executions);
    if (explored.states > 0) std::printf(", %zu states", explored.states);
    std::printf(explored.exhaustive ? ": all there are\n" : "\n");
    if (!explored.violation.empty()) {
      std::printf("violation: %s\n", explored.violation.c_str());
      for (const std::string& step : explored.trace) std::printf("    %s\n", step.c_str());
      return false;
    }
    JO_CHECK(explored.exhaustive);
  }
  return true;
}

}  // namespace
}  // namespace jax_overlap

int main(int argc, char** argv) {
  using namespace jax_overlap;  // NOLINT
  if (!kCanExplore) return 0;
  int passed = 0, failed = 0;
  for (const Protocol& protocol : Protocols()) {
    if (argc > 1 && std::string(argv[1]) != protocol.name) continue;
    ++(Explore(protocol) ? passed : failed);
  }
  std::printf("protocol_test: %d passed, %d failed\n", passed, failed);
  return failed > 0 || passed == 0;
}
