#include "core/schedule.h"

#include <set>
#include <vector>

#include "core/testing.h"

namespace jax_overlap {
namespace {

void SlicesCoverEverythingOnce() {
  for (size_t n : {0, 1, 7, 16, 17, 255, 256, 4097}) {
    for (int parts = 1; parts <= 9; ++parts) {
      for (size_t align : {1, 16, 64}) {
        size_t next = 0;
        for (int i = 0; i < parts; ++i) {
          const Slice slice = SliceOf(n, parts, i, align);
          JO_CHECK(slice.begin == next && slice.end >= slice.begin);
          JO_CHECK(slice.begin % align == 0 || slice.begin == n);
          JO_CHECK(slice.size() <= MaxSlice(n, parts, align));
          next = slice.end;
        }
        JO_CHECK(next == n);
      }
    }
  }
}

void RotationServesEveryPeerOnceAndSpreadsThem() {
  for (int size = 1; size <= 9; ++size) {
    for (int k = 1; k < size; ++k) {
      std::set<int> served;
      for (int rank = 0; rank < size; ++rank) {
        JO_CHECK(Rotated(rank, k, size) != rank);
        served.insert(Rotated(rank, k, size));
      }
      JO_CHECK(served.size() == static_cast<size_t>(size));
    }
  }
}

void SubSlicesCoverEachSliceOnce() {
  for (size_t n : {0, 1, 7, 16, 17, 255, 256, 4097}) {
    for (int slices = 1; slices <= 9; ++slices) {
      for (int parts = 1; parts <= 5; ++parts) {
        for (size_t align : {1, 16, 64}) {
          const size_t most = MaxSlice(MaxSlice(n, slices, align), parts, align);
          size_t next = 0;
          for (int i = 0; i < slices; ++i) {
            for (int j = 0; j < parts; ++j) {
              const Slice part = SubSliceOf(SliceOf(n, slices, i, align), parts, j, align);
              JO_CHECK(part.begin == next && part.end >= part.begin);
              JO_CHECK(part.begin % align == 0 || part.size() == 0);
              JO_CHECK(part.size() <= most);
              next = part.end;
            }
            JO_CHECK(next == SliceOf(n, slices, i, align).end);
          }
          JO_CHECK(next == n);
        }
      }
    }
  }
}

// f(size, order, step_of) for both orders and up to 33 ranks.
template <class F>
void ForOrders(F f) {
  for (int size = 1; size <= 33; ++size) {
    f(size, OwnFirst, OwnFirstStep);
    f(size, OwnLast, OwnLastStep);
  }
}

void EveryRankComputesEverySliceOnce() {
  ForOrders([](int size, auto order, auto step_of) {
    for (int rank = 0; rank < size; ++rank) {
      std::set<int> computed;
      for (int step = 0; step < size; ++step) {
        const int slice = order(rank, step, size);
        JO_CHECK(slice >= 0 && slice < size);
        JO_CHECK(step_of(rank, slice, size) == step);
        computed.insert(slice);
      }
      JO_CHECK(computed.size() == static_cast<size_t>(size));
    }
  });
}

void NoTwoRanksComputeASliceInTheSameStep() {
  ForOrders([](int size, auto order, auto step_of) {
    for (int step = 0; step < size; ++step) {
      std::set<int> in_step;
      for (int rank = 0; rank < size; ++rank) in_step.insert(order(rank, step, size));
      JO_CHECK(in_step.size() == static_cast<size_t>(size));
    }
    // The owner of a slice gets one partial result in each step.
    for (int slice = 0; slice < size; ++slice) {
      std::set<int> steps;
      for (int rank = 0; rank < size; ++rank) steps.insert(step_of(rank, slice, size));
      JO_CHECK(steps.size() == static_cast<size_t>(size));
    }
  });
}

void TheOwnSliceIsFirstOrLastAndTheOthersGoDown() {
  for (int size = 1; size <= 33; ++size) {
    for (int rank = 0; rank < size; ++rank) {
      JO_CHECK(OwnFirst(rank, 0, size) == rank && OwnFirstStep(rank, rank, size) == 0);
      JO_CHECK(OwnLast(rank, size - 1, size) == rank && OwnLastStep(rank, rank, size) == size - 1);
      for (int step = 1; step < size; ++step) {
        JO_CHECK((OwnFirst(rank, step, size) + 1) % size == OwnFirst(rank, step - 1, size));
        JO_CHECK((OwnLast(rank, step, size) + 1) % size == OwnLast(rank, step - 1, size));
        // The owner's sends, to Rotated 1, 2, .., come in the order of need.
        JO_CHECK(OwnFirst(Rotated(rank, step, size), step, size) == rank);
      }
    }
  }
}

// Runs the exchanges on sets of nodes instead of numbers: in the end every node
// must hold every node's share exactly once, in the order that all agree on.
void DoublingReachesEveryNodeForAnyCount() {
  for (int nodes = 1; nodes <= 33; ++nodes) {
    const Doubling doubling{nodes};
    JO_CHECK(doubling.power() <= nodes && 2 * doubling.power() > nodes);
    JO_CHECK(1 << doubling.steps() == doubling.power());
    std::vector<std::vector<int>> sum(nodes);
    for (int node = 0; node < nodes; ++node) sum[node] = {node};
    const auto joined = [](std::vector<int> low, const std::vector<int>& high) {
      low.insert(low.end(), high.begin(), high.end());
      return low;
    };
    for (int node = 0; node < nodes; ++node) {
      if (!doubling.folded(node)) continue;
      const int host = doubling.fold_partner(node);
      JO_CHECK(doubling.hosts(host) && doubling.fold_partner(host) == node);
      sum[host] = joined(sum[host], sum[node]);
    }
    for (int step = 0; step < doubling.steps(); ++step) {
      const auto before = sum;
      for (int node = 0; node < doubling.power(); ++node) {
        const int partner = Doubling::partner(node, step);
        JO_CHECK(partner < doubling.power() && Doubling::partner(partner, step) == node);
        sum[node] = node < partner ? joined(before[node], before[partner])
                                   : joined(before[partner], before[node]);
      }
    }
    for (int node = doubling.power(); node < nodes; ++node) {
      sum[node] = sum[doubling.fold_partner(node)];
    }
    for (int node = 0; node < nodes; ++node) {
      JO_CHECK(sum[node] == sum[0]);
      JO_CHECK(std::set<int>(sum[node].begin(), sum[node].end()).size() ==
               static_cast<size_t>(nodes));
      JO_CHECK(sum[node].size() == static_cast<size_t>(nodes));
    }
  }
}

}  // namespace
}  // namespace jax_overlap

int main() {
  jax_overlap::SlicesCoverEverythingOnce();
  jax_overlap::RotationServesEveryPeerOnceAndSpreadsThem();
  jax_overlap::SubSlicesCoverEachSliceOnce();
  jax_overlap::EveryRankComputesEverySliceOnce();
  jax_overlap::NoTwoRanksComputeASliceInTheSameStep();
  jax_overlap::TheOwnSliceIsFirstOrLastAndTheOthersGoDown();
  jax_overlap::DoublingReachesEveryNodeForAnyCount();
  std::puts("schedule_test: 7 passed, 0 failed");
}
